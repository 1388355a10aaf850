"""The loop against an engine made of numbers: what is reported, when, and how a run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import GlobalStep, MicroBatch, SourceShare
from dsft.engine.api import StepResult
from dsft.errors import NonFiniteError, StoppedError
from dsft.objective.api import Objective, Term, evaluation_record, with_perplexity
from dsft.run import loop
from dsft.run.loop import Progress, Record, Schedule, fit, position, seed_step
from tests.make import make_micro_batch
from tests.trainers import PlainTrainer

OBJECTIVE = Objective((Term("tokens"),), lambda logps, micro_batch: (-logps.double().sum(),))


def micro_batch(*shape: int) -> MicroBatch:
    nothing = torch.zeros(shape, dtype=torch.int64)
    return make_micro_batch(nothing, nothing, nothing)


class Steps:
    def step(self, index: int) -> GlobalStep:
        return GlobalStep((), {"tokens": 10 * (index + 1)}, 100, (index + 1) / 4, (index,))


@dataclass
class FakeEngine:
    """Step n (from 0) has a sum of 10·(n+1)·(5−n), hence a loss of 5−n, unless its gradient is not finite."""

    nonfinite: set[int] = field(default_factory=set)
    rates: list[float] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)
    checked: list[int] = field(default_factory=list)

    def step(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
    ) -> StepResult:
        self.rates.append(learning_rate)
        self.draws.append(torch.rand(()).item())
        n = counts["tokens"] // 10 - 1
        applied = n not in self.nonfinite
        total = counts["tokens"] * (5 - n) if applied else math.nan
        return StepResult(torch.tensor([total], dtype=torch.float64), 0.5 if applied else math.inf, applied)

    def first_step(self, *given: Any) -> StepResult:
        self.checked.append(given[3])
        return self.step(*given[:3])

    def _never(self, *given: Any, **named: Any) -> Any:
        raise AssertionError("the loop does this through its trainer")

    evaluate = gradient_squares = load = owned_fragments = probe = snapshot = replicated = score = (
        set_loss_scale
    ) = shapes = _never


@dataclass
class Log:
    records: list[Record] = field(default_factory=list)
    saved: list[Progress] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)

    def run(self, objective: Objective = OBJECTIVE, **changes: Any) -> Logged:
        """changes: of the trainer's methods, or of its recorder."""
        methods = {name: changes.pop(name) for name in ("annotate", "ask") if name in changes}
        run = Logged(self, objective, changes)
        for name, method in methods.items():
            setattr(run, name, method)
        return run

    def report(self, record: Record) -> None:
        self.records.append(record)

    def save(self, progress: Progress, held_out_loss: float | None) -> None:
        self.saved.append(progress)
        self.losses.append(held_out_loss)

    def of(self, key: str) -> list[tuple[float, float]]:
        return [(record["train/global_step"], record[key]) for record in self.records if key in record]


class Logged(PlainTrainer):
    """On the first of two ranks, of which the other one has nothing. Every evaluation gives a loss of 1."""

    def __init__(self, log: Log, objective: Objective, parts: dict[str, Any]) -> None:
        world = SimpleNamespace(rank=0, world_size=2, sum=lambda sums: sums)
        super().__init__(objective, world, log.report, **parts)
        self.log = log

    def checkpoint(self, progress: Progress, *, evaluates: bool, saves: bool) -> str | None:
        if evaluates:
            self.log.report({"eval/loss": 1.0} | position(progress))
        if not saves:
            return None
        self.log.save(progress, 1.0 if evaluates else None)
        return self.ask()()


def schedule(**changes: object) -> Schedule:
    values = {
        "total_steps": 5, "log_every": 1, "eval_every": 2, "save_every": 3,
        "learning_rate": lambda step: 0.1 * (step + 1), "max_nonfinite_in_a_row": 3, "seed": 1,
    }  # fmt: skip
    return Schedule(**{**values, **changes})  # type: ignore[arg-type]


def test_steps_are_checked_until_one_is_applied_whose_learning_rate_is_not_0() -> None:
    warming = schedule(learning_rate=lambda step: 0.1 * step)
    fit(started := FakeEngine(nonfinite={1}), Steps(), warming, Log().run(), Progress())
    assert started.checked == [0, 1, 1]
    fit(resumed := FakeEngine(), Steps(), warming, Log().run(), Progress(step=2, applied_steps=2))
    assert resumed.checked == [2]


def test_an_evaluation_before_the_first_step_is_reported_once() -> None:
    whole, resumed = Log(), Log()
    fit(FakeEngine(), Steps(), schedule(evaluate_first=True), whole.run(), Progress())
    assert whole.of("eval/loss")[0] == (0, 1.0)
    fit(FakeEngine(), Steps(), schedule(evaluate_first=True), resumed.run(), whole.saved[0])
    assert resumed.of("eval/loss")[0][0] > 0


def test_step_is_trained_on_annotated_micro_batches() -> None:
    annotated: list[GlobalStep] = []
    batch = micro_batch(1, 2)

    class Given(FakeEngine):
        def step(self, micro_batches: Sequence[MicroBatch], *given: Any) -> StepResult:
            assert micro_batches == (batch,)
            return super().step(micro_batches, *given)

    run = Log().run(
        annotate=lambda step: annotated.append(step) or replace(step, micro_batches=(batch,))  # type: ignore[func-returns-value]
    )
    fit(engine := Given(), Steps(), schedule(), run, Progress())
    assert [step.micro_batches for step in annotated] == [()] * 5 and len(engine.rates) == 5


def test_every_step_is_reported_and_the_end_is_evaluated_and_saved_once() -> None:
    log = Log()
    end = fit(FakeEngine(), Steps(), schedule(), log.run(), Progress())
    assert log.of("train/loss") == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 1.0)]
    assert [step for step, _ in log.of("eval/loss")] == [2, 4, 5]
    assert [progress.step for progress in log.saved] == [3, 5]
    assert log.losses == [None, 1.0]
    assert end == Progress(step=5, applied_steps=5, num_tokens=500, epoch=1.25)


def test_each_checkpoint_is_evaluated_where_the_best_are_kept() -> None:
    log = Log()
    fit(FakeEngine(), Steps(), schedule(evaluate_saved=True, eval_every=None), log.run(), Progress())
    assert [step for step, _ in log.of("eval/loss")] == [3, 5]
    assert log.losses == [1.0, 1.0]


def test_a_window_of_steps_is_the_sum_over_the_count() -> None:
    log = Log()
    fit(FakeEngine(), Steps(), schedule(log_every=2, save_every=None, evaluates=False), log.run(), Progress())
    # steps 1 and 2: (10·5 + 20·4) ÷ 30, not the mean of 5 and 4
    assert log.of("train/loss")[0] == (2, pytest.approx(130 / 30, abs=1e-15))
    assert [step for step, _ in log.of("train/loss")] == [2, 4, 5]


class FromSources(Steps):
    """Source a has all of the first step, b half of the others."""

    def step(self, index: int) -> GlobalStep:
        half = 0 if index == 0 else 50
        sources = {"a": SourceShare(2, 100 - half, index / 2), "b": SourceShare(half // 10, half, index / 4)}
        return replace(super().step(index), sources=sources)


def test_window_counts_the_tokens_of_each_source() -> None:
    log = Log()
    fit(FakeEngine(), FromSources(), schedule(log_every=2, save_every=None), log.run(), Progress())
    assert log.of("data/a/tokens") == [(2, 150), (4, 100), (5, 50)]
    assert log.of("data/b/tokens") == [(2, 50), (4, 100), (5, 50)]
    assert log.of("data/b/examples") == [(2, 5), (4, 10), (5, 5)]
    assert log.of("data/a/epoch") == [(2, 0.5), (4, 1.5), (5, 2.0)]  # as of the window's last step


def test_resumed_run_draws_the_same_random_numbers() -> None:
    whole, part = FakeEngine(), FakeEngine()
    log = Log()
    fit(whole, Steps(), schedule(), Log().run(), Progress())
    fit(part, Steps(), schedule(), log.run(), Progress(step=3, applied_steps=3, num_tokens=300))
    assert log.of("train/loss") == [(4, 2.0), (5, 1.0)]
    assert part.draws == whole.draws[3:] and part.rates == whole.rates[3:]


def test_resumed_run_reports_the_same_windows() -> None:
    whole, part = Log(), Log()
    fit(FakeEngine(), Steps(), schedule(log_every=5), whole.run(), Progress())
    fit(FakeEngine(), Steps(), schedule(log_every=5), part.run(), whole.saved[0])
    assert [step for step, _ in whole.of("train/loss")] == [3, 5]
    assert part.of("train/loss") == whole.of("train/loss")[1:]


def test_nonfinite_step_is_reported_and_does_not_advance_the_learning_rate() -> None:
    engine, log = FakeEngine(nonfinite={1}), Log()
    end = fit(engine, Steps(), schedule(log_every=5, save_every=None), log.run(), Progress())
    assert (end.step, end.applied_steps, end.nonfinite_in_a_row) == (5, 4, 0)
    assert engine.rates == pytest.approx([0.1, 0.2, 0.2, 0.3, 0.4])
    assert [step for step, _ in log.of("train/loss")] == [2, 5] and math.isnan(log.of("train/loss")[0][1])


def test_several_nonfinite_steps_in_a_row_end_the_run_with_their_examples_named() -> None:
    log = Log()
    message = r"step 4: .* 3 steps in a row, the last on examples \[3\].* move the checkpoints after step 1"
    with pytest.raises(NonFiniteError, match=message):
        fit(FakeEngine(nonfinite={1, 2, 3}), Steps(), schedule(save_every=1), log.run(), Progress())
    assert [progress.step for progress in log.saved] == [1, 2, 3]


def test_rows_of_each_nonfinite_step_are_named_at_once() -> None:
    asked: list[tuple[int, float]] = []

    def named(step: int, batch: GlobalStep, loss: float) -> str:
        asked.append((step, loss))
        return f"a.jsonl:{batch.example_ids[0]} (rank 1)"

    log = Log()
    engine, run = FakeEngine(nonfinite={1, 3}), log.run(skipped=named)
    fit(engine, Steps(), schedule(log_every=5, save_every=None), run, Progress())
    assert [step for step, _ in asked] == [2, 4] and all(math.isnan(loss) for _, loss in asked)
    with pytest.raises(NonFiniteError, match=r"2 steps in a row, the last on a\.jsonl:3 \(rank 1\);"):
        engine = FakeEngine(nonfinite={2, 3})
        fit(engine, Steps(), schedule(max_nonfinite_in_a_row=2), run, Progress())


@dataclass
class Ordered(Log):
    """What happens, in order: steps as they are launched, and then what is written of which step."""

    happened: list[tuple[str, float]] = field(default_factory=list)

    def report(self, record: Record) -> None:
        super().report(record)
        self.happened.append(
            ("evaluated" if "eval/loss" in record else "record", record["train/global_step"])
        )

    def save(self, progress: Progress, held_out_loss: float | None) -> None:
        super().save(progress, held_out_loss)
        self.happened.append(("saved", progress.step))

    def engine(self, **changes: Any) -> FakeEngine:
        engine = FakeEngine(**changes)
        step = engine.step

        def launched(*given: Any) -> StepResult:
            self.happened.append(("step", len(engine.rates) + 1))
            return step(*given)

        engine.step = launched  # type: ignore[method-assign]
        return engine


def test_on_a_gpu_a_record_is_read_after_the_next_step_is_launched_and_before_what_depends_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once, late = Ordered(), Ordered()
    when = schedule(total_steps=6, eval_every=3, save_every=4)
    fit(at_once.engine(), Steps(), when, at_once.run(), Progress())
    monkeypatch.setattr(loop, "on_gpu", lambda sums: True)
    fit(late.engine(), Steps(), when, late.run(), Progress())
    assert late.happened == [
        ("step", 1), ("step", 2), ("record", 1), ("step", 3), ("record", 2), ("record", 3), ("evaluated", 3),
        ("step", 4), ("record", 4), ("saved", 4), ("step", 5), ("step", 6), ("record", 5), ("record", 6),
        ("evaluated", 6), ("saved", 6),
    ]  # fmt: skip
    assert [timeless(record) for record in late.records] == [timeless(record) for record in at_once.records]
    assert [list(record) for record in late.records] == [list(record) for record in at_once.records]


def timeless(record: Record) -> Record:
    return {name: value for name, value in record.items() if not name.startswith("perf/")}


def test_a_step_that_is_not_applied_and_one_that_fails_leave_no_record_unread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "on_gpu", lambda sums: True)
    named = Ordered()
    run = named.run(skipped=lambda *given: named.happened.append(("named", given[0])) or "rows")
    with pytest.raises(NonFiniteError, match="step 3"):
        fit(
            named.engine(nonfinite={1, 2}), Steps(),
            schedule(eval_every=None, save_every=None, max_nonfinite_in_a_row=2), run, Progress(),
        )  # fmt: skip
    assert named.happened == [
        ("step", 1), ("step", 2), ("record", 1), ("record", 2), ("named", 2), ("step", 3), ("record", 3),
        ("named", 3),
    ]  # fmt: skip

    class Failing(Steps):
        def step(self, index: int) -> GlobalStep:
            if index == 2:
                raise StoppedError("the disk is gone")
            return super().step(index)

    failed = Ordered()
    with pytest.raises(StoppedError, match="the disk is gone"):
        fit(failed.engine(), Failing(), schedule(eval_every=None), failed.run(), Progress())
    assert failed.happened == [("step", 1), ("step", 2), ("record", 1), ("record", 2)]


def test_a_comparison_of_ranks_is_read_before_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step may change what differs."""
    checked = Ordered()

    class Every2:
        def mine(self, step: int, *, saves: bool) -> Tensor:
            return torch.ones(int(step % 2 == 0), dtype=torch.float64)

        def check(self, everyones: Tensor, step: int) -> None:
            if len(everyones):
                checked.happened.append(("checked", step))

    monkeypatch.setattr(loop, "on_gpu", lambda sums: True)
    when = schedule(total_steps=3, eval_every=None, save_every=None)
    fit(checked.engine(), Steps(), when, checked.run(replicas=Every2()), Progress())
    assert checked.happened[:7] == [
        ("step", 1), ("step", 2), ("record", 1), ("checked", 2), ("record", 2), ("step", 3), ("record", 3),
    ]  # fmt: skip


def test_speed_counts_all_ranks_tokens() -> None:
    log = Log()
    fit(FakeEngine(), Steps(), schedule(evaluates=False), log.run(), Progress())
    for record in log.records:
        assert record["perf/tokens_per_second"] == pytest.approx(100 / record["perf/step_time"])
        assert record["perf/tokens_per_second_per_gpu"] == pytest.approx(record["perf/tokens_per_second"] / 2)
        assert 0 <= record["perf/data_wait_fraction"] <= 1


def test_held_out_loss_is_exact_over_tokens() -> None:
    sums = torch.tensor([[30.0]], dtype=torch.float64)
    record = with_perplexity(evaluation_record(OBJECTIVE, sums, [{"tokens": 20}], [None]))
    assert record == {"eval/loss": 1.5, "eval/perplexity": pytest.approx(math.exp(1.5))}


@pytest.mark.parametrize(("total", "expected"), [(math.nan, math.nan), (1e5, math.inf), (math.inf, math.inf)])
def test_the_perplexity_of_a_loss_that_is_no_number_is_none_either(total: float, expected: float) -> None:
    sums = torch.tensor([[total]], dtype=torch.float64)
    record = with_perplexity(evaluation_record(OBJECTIVE, sums, [{"tokens": 20}], [None]))
    assert record["eval/perplexity"] == pytest.approx(expected, nan_ok=True)


def test_named_sets_have_losses_of_their_own_and_count_by_their_tokens() -> None:
    sums = torch.tensor([[30.0], [2.0], [0.0]], dtype=torch.float64)
    counts = [{"tokens": 20}, {"tokens": 4}, {"tokens": 1}]
    record = with_perplexity(evaluation_record(OBJECTIVE, sums, counts, ["a", "b", None]))
    assert record["eval/loss"] == 32 / 25
    assert (record["eval/a/loss"], record["eval/b/loss"]) == (1.5, 0.5)
    assert record["eval/b/perplexity"] == pytest.approx(math.exp(0.5))
    assert len(record) == 6


PREFERENCES = replace(
    OBJECTIVE,
    terms=(
        Term("examples"),
        Term("chosen_tokens", 0.5, "nll_loss"),
        Term("examples", 0.0, "rewards/margins"),
    ),
    of_answers=lambda logps, pairs: (),
)


def test_metrics_of_preference_pairs_are_means_over_pairs_and_tokens_without_a_perplexity() -> None:
    sums = torch.tensor([[3.0, 40.0, 6.0], [1.0, 5.0, -2.0]], dtype=torch.float64)
    counts = [{"examples": 3, "chosen_tokens": 40}, {"examples": 1, "chosen_tokens": 10}]
    assert evaluation_record(PREFERENCES, sums, counts, ["a", None]) == {
        "eval/loss": 4 / 4 + 0.5 * 45 / 50, "eval/nll_loss": 45 / 50, "eval/rewards/margins": 1.0,
        "eval/a/loss": 1.5, "eval/a/nll_loss": 1.0, "eval/a/rewards/margins": 2.0,
    }  # fmt: skip


def test_training_reports_the_metrics_of_a_window() -> None:
    @dataclass
    class PairEngine(FakeEngine):
        def step(
            self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
        ) -> StepResult:
            return StepResult(torch.tensor([2.0, 10.0, 4.0], dtype=torch.float64), 0.5, applied=True)

    class PairSteps:
        def step(self, index: int) -> GlobalStep:
            return GlobalStep((), {"examples": 2 + index, "chosen_tokens": 20}, 100, 0.0, (0, 1))

    log = Log()
    fit(PairEngine(), PairSteps(), schedule(total_steps=2, log_every=2), log.run(PREFERENCES), Progress())
    assert log.of("train/loss") == [(2, pytest.approx(4 / 5 + 0.5 * 20 / 40))]
    assert log.of("train/nll_loss") == [(2, 0.5)]
    assert log.of("train/rewards/margins") == [(2, pytest.approx(8 / 5))]


def test_a_figure_of_a_step_is_a_producer_and_a_reader() -> None:
    """The widths and heights of micro-batches, over two of them, two steps and two ranks."""

    class Measured(FakeEngine):
        def step(
            self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int], learning_rate: float
        ) -> StepResult:
            result = super().step(micro_batches, counts, learning_rate)
            sizes = torch.tensor([[*batch.shape] for batch in micro_batches], dtype=torch.float64)
            return replace(result, figures={"none": torch.zeros(0), "sizes": sizes.sum(0, keepdim=True)})

    class TwoMicroBatches(Steps):
        def step(self, index: int) -> GlobalStep:
            batches = micro_batch(1, 2 + index), micro_batch(3, 10)
            return replace(super().step(index), micro_batches=batches)

    def sizes(total: Tensor, steps: int) -> Record:
        assert total.shape == (1, 2)
        return {"train/rows": total[0, 0].item() / steps, "train/lengths": total[0, 1].item()}

    log = Log()
    run = log.run(figures={"none": lambda total, steps: {}, "sizes": sizes})
    run.recorder.world.sum = lambda mine: 2 * mine  # type: ignore[method-assign, assignment]
    fit(Measured(), TwoMicroBatches(), schedule(total_steps=3, log_every=2, save_every=None), run, Progress())
    assert log.of("train/rows") == [(2, 8.0), (3, 8.0)]
    assert log.of("train/lengths") == [(2, 2 * (12 + 13)), (3, 2 * 14)]
    assert log.of("train/loss") == [(2, pytest.approx(2 * 130 / 30)), (3, 6.0)]


def test_random_numbers_differ_by_seed_step_and_rank() -> None:
    draws = set()
    for place in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]:
        seed_step(*place)
        draws.add(torch.rand(()).item())
    assert len(draws) == 4


def asks(*reasons: str | None) -> tuple[Callable[[], Callable[[], str | None]], list[str]]:
    """One reason for each question, in order, then None; and when questions were asked and answered."""
    left, when = list(reasons), []

    def ask() -> Callable[[], str | None]:
        when.append("asked")
        reason = left.pop(0) if left else None
        return lambda: when.append("answered") or reason

    return ask, when


def stopped(log: Log, reasons: tuple[str | None, ...], **changes: object) -> str:
    run = log.run(ask=asks(*reasons)[0])
    with pytest.raises(StoppedError) as raised:
        fit(FakeEngine(), Steps(), schedule(**changes), run, Progress())
    return str(raised.value)


def test_a_stop_saves_at_the_end_of_its_step_and_the_run_goes_on_as_if_there_was_none() -> None:
    whole, log = Log(), Log()
    end = fit(FakeEngine(), Steps(), schedule(eval_every=2), whole.run(), Progress())
    message = stopped(log, (None, "SIGTERM"), eval_every=2)
    assert message.startswith("stopped at step 2 of 5 by SIGTERM, and saved; the same command continues")
    assert [(progress.step, progress.owes_evaluation) for progress in log.saved] == [(2, True)]
    assert log.losses == [None], "it is saved before the evaluation, for which there may be no time"
    assert fit(FakeEngine(), Steps(), schedule(eval_every=2), log.run(), log.saved[-1]) == end
    for key in ("train/loss", "eval/loss"):
        assert log.of(key) == whole.of(key), key
    assert [progress.step for progress in log.saved] == [2, 3, 5]
    assert log.saved[1:] == whole.saved, "the postponed evaluation is done and no longer owed"


def test_agreement_on_a_stop_begins_before_a_step_and_ends_after_it() -> None:
    done: list[str] = []
    ask, done = asks()
    engine = FakeEngine()
    step = engine.step
    engine.step = lambda *arguments: done.append("step") or step(*arguments)  # type: ignore[method-assign]
    fit(engine, Steps(), schedule(save_every=None), Log().run(ask=ask), Progress())
    assert done == ["asked", "step", "answered"] * 5 + ["asked", "answered"]


def test_request_during_a_save_stops_before_the_next_step() -> None:
    log = Log()
    message = stopped(log, (None, None, None, "cluster.time_limit"))
    assert "stopped at step 3 of 5 by cluster.time_limit" in message
    assert [progress.step for progress in log.saved] == [3], "once"


def test_a_stop_at_the_end_leaves_a_finished_run() -> None:
    log = Log()
    assert "stopped at step 5 of 5" in stopped(log, (None,) * 4 + (None, "SIGINT"), save_every=None)
    assert log.losses == [1.0] and not log.saved[-1].owes_evaluation
