"""The check at step 0, against an engine made of numbers: what it lets pass, and each cause by its name."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsft.data.sets.dataset import Example
from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.data.steps.collate import AnswerIds, collate_padded
from dsft.engine.api import ScoreOutput, log_probabilities
from dsft.engine.self_check import whole_rows
from dsft.errors import SpecError
from dsft.objective.answers import answer_logps
from dsft.reference import check
from dsft.reference.check import StartCheck, check_start
from tests.examples import dataset_of
from tests.unit.reference import small

PAIRS, VOCABULARY = 6, 32


def pair(number: int, prompt: Sequence[int] = (1, 2, 3)) -> Example:
    chosen, rejected = ([4 + number] * (5 + number), [5 + number, *range(4, 9)])
    ids = [*prompt, *chosen, *prompt, *rejected]
    trained = [0] * len(prompt) + [1] * len(chosen) + [0] * len(prompt) + [1] * len(rejected)
    segments = (len(prompt) + len(chosen), len(prompt) + len(rejected))
    return Example(np.array(ids, np.int32), np.array(trained, bool), segments)


@dataclass
class Engine:
    """A token's log-probability from its weight and the mean of those before it."""

    weights: Tensor = field(default_factory=lambda: torch.linspace(-1, 1, VOCABULARY))
    adapter: float = 0.0
    dropout: float = 0.0
    rounding: float = 0.0
    is_last: bool = True

    def score(
        self,
        micro_batches: Sequence[MicroBatch],
        output: ScoreOutput = log_probabilities,
        *,
        training: bool = False,
    ) -> tuple[Tensor, ...]:
        scored = tuple(output(self.logps(batch, training), batch) for batch in micro_batches)
        return scored if self.is_last else ()

    def logps(self, batch: MicroBatch, training: bool) -> Tensor:
        before = self.weights[batch.tokens.input_ids].cumsum(1) / torch.arange(1, batch.shape[1] + 1)
        own = self.weights[batch.tokens.targets.clamp(min=0)]
        noise = self.dropout * torch.rand(own.shape) if training else 0.0
        shape = torch.Generator().manual_seed(own.numel())
        rounded = self.rounding * torch.randn(own.shape, generator=shape)  # by the layout
        logps = -torch.exp(own + before + self.adapter) + noise + rounded
        return logps.masked_fill(batch.tokens.targets == NO_TARGET, 0.0)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        kept, self.adapter = self.adapter, 0.0
        yield
        self.adapter = kept


class World:
    """Of one rank, and of another one's value."""

    sequence_rank = 0

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather(self, mine: Any) -> list[Any]:
        return [mine, *self.others]


def with_reference(reference: Engine, rows: Sequence[Example] | None = None, answers: int = 2) -> StartCheck:
    """Two micro-batches of three examples: pairs or (answers: 1) their chosen answers alone. The reference
    has scored `rows`."""
    own = [pair(number) for number in range(PAIRS)]
    if answers == 1:
        own = [whole_rows(one)[0] for one in own]
    batches = []
    for ids in np.arange(PAIRS).reshape(2, 3):
        batch, scored = (
            collate_padded([some[i] for i in ids], pad_id=0, answers=AnswerIds(ids, answers))
            for some in (own, rows or own)
        )
        (logps,) = reference.score([scored], answer_logps)
        assert batch.answers is not None
        batches.append(replace(batch, answers=replace(batch.answers, reference=logps)))
    return StartCheck(
        small.spec(Path()), 0.1, dataset_of(own, pairs=answers == 2, file="pairs.jsonl"), batches, 0
    )


def shown(start: StartCheck, engine: Engine, world: Any = None) -> str:
    policy: Any = SimpleNamespace(causal_lm=None, parameters=lambda: iter([torch.zeros(1)]))
    return check_start(start, engine, policy, world or World())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "own_attention", lambda model: nullcontext())


def test_one_model_in_both_passes() -> None:
    text = shown(with_reference(Engine()), Engine())
    assert "on 6 pairs rewards and margins are at most" in text and "(allowed for rounding: 1e-05)" in text


def test_examples_of_one_answer_have_rewards_and_no_margins() -> None:
    text = shown(with_reference(Engine(), answers=1), Engine())
    assert "rewards are at most" in text and "margins" not in text
    text = refused(with_reference(Engine(weights=OTHER), answers=1), Engine())
    assert "other weights than the policy starts from" in text and "pairs.jsonl:" in text


def refused(start: StartCheck, engine: Engine, world: Any = None) -> str:
    with pytest.raises(SpecError) as raised:
        shown(start, engine, world)
    return str(raised.value)


OTHER = torch.linspace(-1, 1.05, VOCABULARY)


def test_dropout_is_named() -> None:
    text = refused(with_reference(Engine()), Engine(dropout=0.05))
    assert "dropout is on" in text and "switch it off" in text
    assert "other weights" not in text


def test_another_models_weights_are_named() -> None:
    text = refused(with_reference(Engine(weights=OTHER)), Engine())
    assert "other weights than the policy starts from" in text and "dropout" not in text
    assert "pairs.jsonl:" in text


def test_another_template_is_named() -> None:
    """Other tokens before the same answers."""
    rows = [pair(number, prompt=(1, 9, 2, 3)) for number in range(PAIRS)]
    text = refused(with_reference(Engine(), rows), Engine())
    assert "0 of 6 pairs are the same in both" in text and "another chat template" in text


def test_other_rows_are_named_by_those_that_are_the_same() -> None:
    rows = [pair(number) for number in (0, 1, 2, 3, 5, 4)]
    text = refused(with_reference(Engine(), rows), Engine())
    assert "4 of 6 pairs are the same in both" in text and "from different rows" in text
    assert "pairs.jsonl:5" in text and "pairs.jsonl:6" in text and "pairs.jsonl:1 " not in text


@pytest.mark.parametrize(("of_reference", "of_policy", "message"), [
    (0.0, 0.1, "the policy without its adapter"),
    (0.1, 0.0, "or an adapter"),
    (0.1, 0.1, None),
])  # fmt: skip
def test_an_adapter_that_one_of_both_has_is_named(
    of_reference: float, of_policy: float, message: str | None
) -> None:
    engine = Engine(adapter=of_policy)
    start = with_reference(Engine(adapter=of_reference))
    start = replace(start, without_adapter=engine.without_adapter)
    if message:
        assert message in refused(start, engine)
    else:
        assert "equals its reference" in shown(start, engine)


def test_rounding_is_measured_and_more_than_that_refused() -> None:
    """bf16's, of 0.01 nats a token."""
    rounded = Engine(rounding=0.01)
    layout = with_reference(Engine(rounding=-0.007))  # as another layout rounds
    assert "equals its reference" in shown(layout, rounded)
    assert "other weights" in refused(
        with_reference(Engine(weights=torch.linspace(-1, 1.6, VOCABULARY))), rounded
    )


def test_a_difference_over_the_bound_of_fp32_is_refused() -> None:
    """A reward of 2e-5, where 1e-5 is allowed, and a margin of 1.6e-5 between two rewards of 0.8e-5."""
    start = with_reference(Engine())
    (first, second) = start.micro_batches
    for nats, passes in (((0.8e-4, 0.0), True), ((2e-4, 0.0), False), ((0.8e-4, -0.8e-4), False)):
        moved = first.answers.reference.clone()
        moved[1] += torch.tensor(nats)
        changed = replace(first, answers=replace(first.answers, reference=moved))
        one = replace(start, micro_batches=[changed, second])
        if passes:
            shown(one, Engine())
        else:
            assert "5 of 6 pairs" in refused(one, Engine())


def test_what_is_not_a_number_is_refused() -> None:
    refused(with_reference(Engine(weights=torch.full((VOCABULARY,), math.nan))), Engine())
    shown = refused(with_reference(Engine()), Engine(weights=torch.full((VOCABULARY,), math.nan)))
    assert "not finite" in shown and "dropout" not in shown


def test_all_ranks_see_what_one_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without the last stage, or whose own pairs are right."""
    gathered: list[Any] = []
    monkeypatch.setattr(World, "gather", lambda self, mine: gathered.append(mine) or [mine])
    with pytest.raises(SpecError):
        shown(with_reference(Engine(weights=OTHER)), Engine())
    monkeypatch.undo()
    monkeypatch.setattr(check, "own_attention", lambda model: nullcontext())
    right = with_reference(Engine())
    for mine in (Engine(), Engine(is_last=False)):
        with pytest.raises(SpecError, match="are the same in both" if mine.is_last else "other weights"):
            shown(right, mine, World(gathered[0]))


@pytest.mark.parametrize("adapter", [0.0, 0.1])
def test_pairs_of_a_group_count_once(adapter: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second rank scores them too and gives none; both come to the same end."""
    engine, ends, gathered = Engine(adapter=adapter), list[str](), list[Any]()
    start = replace(with_reference(Engine()), without_adapter=engine.without_adapter)
    for others in ([], gathered):
        world = World()
        world.sequence_rank = len(ends)
        replies = iter(list(others))

        def gather(mine: Any, replies: Any = replies) -> list[Any]:
            gathered.append(mine)
            return [mine, next(replies, None)]

        monkeypatch.setattr(world, "gather", gather)
        ends.append(refused(start, engine, world) if adapter else shown(start, engine, world))
    assert ends[0] == ends[1] and ("without its adapter" if adapter else "on 6 pairs") in ends[0]


def test_answers_of_a_shared_prompt_are_whole_again() -> None:
    ids, trained = np.arange(9, dtype=np.int32), np.array([0, 0, 0, 1, 1, 0, 1, 1, 1], bool)
    shared = Example(ids, trained, (5, 4), (0, 2))  # prompt 0 1 2, chosen 3 4, [2] rejected 6 7 8
    chosen, rejected = whole_rows(shared)
    assert chosen.input_ids.tolist() == [0, 1, 2, 3, 4]
    assert rejected.input_ids.tolist() == [0, 1, 5, 6, 7, 8]
    assert rejected.trained.tolist() == [False] * 3 + [True] * 3
