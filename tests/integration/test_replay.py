"""`dsft replay`: a step computed again is the run's, bit for bit in its layout; losses of rows, gradients of
layers and the step without rows are those of plain PyTorch."""

from __future__ import annotations

import codecs
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from dsft.checkpoint.export import export_checkpoint
from dsft.commands import on_ranks
from dsft.commands import replay as command
from dsft.data.sets.dataset import Dataset
from dsft.data.steps.steps import TrainSteps
from dsft.errors import CheckpointError, MissingInputError, SpecError
from dsft.run.loop import Progress
from dsft.run.replay import Replay, shares_of_loss
from dsft.setup.inputs import read_inputs
from dsft.spec.layout import batch_on, layout_of
from dsft.spec.load import load_spec
from tests.integration.runs import records, run_forked, train, trained, write_model, write_spec
from tests.integration.test_killed import DYING
from tests.integration.test_preference import write_pairs
from tests.launching import forked

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS, LONG, SHIFTED = 72, 4, 6
"""Rows of the first epoch, of 6 steps, and the steps with a bad one."""
Replayed = dict[str, Any]


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ranks, "run", run_forked)


def replay(
    run: Path, step: int, *overrides: str, without: Sequence[str] = (), processes: int | None = None
) -> Replayed:
    """Replay a step, and check that the run's folder is as it was."""
    before = contents(run)
    assert command.replay(str(run), step, overrides, without, processes, blame=True, as_json=False) == 0
    assert contents(run) == before
    assert not list(run.parent.glob("replay-*")), "the ranks' folder is removed"
    found: Replayed = json.loads((run.parent / f"{run.name}-step-{step}.json").read_text(encoding="utf-8"))
    return found


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def same_as_recorded(found: Replayed, run: Path, step: int) -> None:
    """Check that loss and gradient norm are the recorded ones to the last bit."""
    for name in ("loss", "grad_norm"):
        assert found["record"][name] == found["recorded"][name] == records(run, f"train/{name}")[step]


def weighted(found: Replayed, which: str) -> float:
    rows = found["rows"]
    return float(sum(row[which] * row["targets"] for row in rows) / sum(row["targets"] for row in rows))


# --- a packed run over two ranks, killed in its seventh step ----------------------------------------------


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder. It has kept the checkpoint of step 4 alone; step LONG has a row with a long repeated
    text, step SHIFTED one whose answer has other letters."""
    folder = tmp_path_factory.mktemp("crashed")
    rows = folder / "rows.jsonl"
    lines = [
        {"prompt": f"Add {a} to {b}.", "completion": f"The sum of {a} and {b} is {a + b}."}
        for a in range(9)
        for b in range(8)
    ]
    rows.write_text("\n".join(map(json.dumps, lines)))
    spec = write_spec(folder)
    overrides = (
        f"data.train=[{{path: {rows}}}]", "data.packing=true", "parallel.zero_stage=2", "train.max_steps=8",
        "optim.learning_rate=1e-2", "model.from_config.num_hidden_layers=4",
    )  # fmt: skip
    data, steps = train_steps(spec, overrides)
    for step, completion in ((LONG, "@" * 200), (SHIFTED, None)):
        number = int(data.source(steps.step(step - 1).example_ids[0]).rpartition(":")[2]) - 1
        lines[number]["completion"] = completion or codecs.encode(lines[number]["completion"], "rot13")
    rows.write_text("\n".join(map(json.dumps, lines)))
    killed = forked(DYING, 2, ["step", "1", "6", str(spec), *overrides])
    assert killed.returncode != 0
    run = folder / "runs" / "small"
    assert sorted(records(run, "train/loss")) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-4"]
    return run


def train_steps(path: Path, overrides: Sequence[str] = ()) -> tuple[Dataset, TrainSteps]:
    spec = load_spec(path, overrides)
    inputs = read_inputs(spec, lambda text: None)
    batch = batch_on(spec, layout_of(spec.parallel, 1))
    return inputs.train, TrainSteps(inputs.train, batch, 0, spec.train.seed, inputs.pad_id)


def bad_row(run: Path, step: int) -> str:
    """Return the source of the step's bad row."""
    data, steps = train_steps(run / "spec.yaml")
    return data.source(steps.step(step - 1).example_ids[0])


@pytest.mark.parametrize("step", [LONG, SHIFTED])
def test_a_bad_row_is_blamed_and_the_step_is_that_of_the_run(
    crashed: Path, step: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")  # so that no path is wrapped
    found = replay(crashed, step)
    same_as_recorded(found, crashed, step)
    assert found["checkpoint"] is None if step == LONG else found["checkpoint"].endswith("step-4")
    worst = max(found["rows"], key=lambda row: row["share"])
    assert worst["row"] == bad_row(crashed, step) and worst["share"] > 0.5
    shown = capsys.readouterr().out
    first = next(line for line in shown.splitlines() if "rows.jsonl:" in line)
    assert first.split()[0] == worst["row"] and f"{found['record']['loss']:.6g}" in shown
    assert weighted(found, "before") == pytest.approx(found["loss"], rel=1e-6)
    assert weighted(found, "after") < weighted(found, "before")
    if step == LONG:  # the model after it is in a checkpoint
        after = {row["row"]: row["after"] for row in found["rows"]}
        assert after == pytest.approx(plain(crashed, LONG - 1)[0], rel=1e-5)


def test_rows_layers_and_the_step_without_a_row_are_those_of_plain_pytorch(crashed: Path) -> None:
    data, steps = train_steps(crashed / "spec.yaml")
    left_out = data.source(steps.step(4).example_ids[3])
    found = replay(crashed, 5, without=[Path(left_out).name])
    same_as_recorded(found, crashed, 5)
    losses, loss, norms = plain(crashed, 4)
    assert {row["row"]: row["before"] for row in found["rows"]} == pytest.approx(losses, rel=1e-5)
    assert {row["layer"]: row["grad_norm"] for row in found["layers"]} == pytest.approx(norms, rel=1e-4)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    _, loss, norms = plain(crashed, 4, left_out)
    other = found["other"]
    assert other["loss"] == pytest.approx(loss, rel=1e-5) and other["loss"] != found["loss"]
    assert {row["layer"]: row["grad_norm"] for row in other["layers"]} == pytest.approx(norms, rel=1e-4)
    gained = {row["row"]: row["without"] - row["after"] for row in found["rows"]}
    assert max(gained, key=lambda row: gained[row]) == left_out, "the model has not learned this row"


def plain(run: Path, index: int, left_out: str = "") -> tuple[dict[str, float], float, dict[str, float]]:
    """Return the loss of each row of step `index` (from 0) by the model of checkpoint step-4, and the step's
    loss and gradient norm by layer without a row."""
    export_checkpoint(run / "checkpoints" / "step-4", run.parent / "plain")
    model = AutoModelForCausalLM.from_pretrained(run.parent / "plain")
    data, steps = train_steps(run / "spec.yaml")
    losses, total, targets = {}, torch.zeros(()), 0
    for id in steps.step(index).example_ids:
        row = data[id]
        ids, trained_on = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.trained)
        logits = model(input_ids=ids[None]).logits[0, :-1][trained_on[1:]]
        loss = F.cross_entropy(logits, ids[1:][trained_on[1:]], reduction="sum")
        losses[data.source(id)] = float(loss.detach() / len(logits))
        if data.source(id) != left_out:
            total, targets = total + loss, targets + len(logits)
    (total / targets).backward()
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = ".".join(parts[:3] if "layers" in parts else parts[:-1])
        squares[layer] = squares.get(layer, 0.0) + float(parameter.grad.double().square().sum())
    return losses, float(total / targets), {layer: square**0.5 for layer, square in squares.items()}


@pytest.mark.parametrize(("zero_stage", "processes"), [(3, 2), (0, 1)])
def test_on_another_layout(
    crashed: Path, zero_stage: int, processes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replay(crashed, 5, f"parallel.zero_stage={zero_stage}", processes=processes)
    assert found["record"] == pytest.approx(found["recorded"], rel=1e-5)
    norms = plain(crashed, 4)[2]
    assert {row["layer"]: row["grad_norm"] for row in found["layers"]} == pytest.approx(norms, rel=1e-4)
    assert "; the run had 2 processes, zero_stage 2, so" in capsys.readouterr().out


def test_steps_from_before_the_run_was_made_longer(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their learning rates were other ones, and no checkpoint has the run's state after them."""
    monkeypatch.setenv("COLUMNS", "250")
    run = Path(shutil.copytree(crashed, tmp_path / "moved"))
    shutil.rmtree(run / "checkpoints")
    spec = run / "spec.yaml"
    assert (text := spec.read_text(encoding="utf-8")).count("max_steps: 8\n") == 1
    spec.write_text(text.replace("max_steps: 8\n", "max_steps: 16\n"), encoding="utf-8")
    step, then, rate = replay(run, 4)["other_rate"].values()
    assert then == records(run, "train/learning_rate")[step] and abs(rate - then) > 1e-5
    assert f"in step {step} the run's learning rate was {then:.6g}, here" in capsys.readouterr().out
    spec.write_text(text, encoding="utf-8")
    assert replay(run, 4)["other_rate"] is None
    assert "this is not the step" not in capsys.readouterr().out


def test_of_a_run_without_a_checkpoint(crashed: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(crashed, tmp_path / "moved"))
    shutil.rmtree(run / "checkpoints")
    found = replay(run, 2)
    same_as_recorded(found, run, 2)
    assert found["layout"]["world_size"] == 2


# --- other tasks and layouts ------------------------------------------------------------------------------


def test_of_pairs_whose_record_is_a_mean_of_two_steps(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    base = write_model(tmp_path / "base")
    overrides = (
        f"model={{name_or_path: {base}, lora: {{rank: 4, alpha: 8}}}}", "task=dpo",
        "dpo={reference: adapter}",
        f"data.train=[{{path: {tmp_path / 'pairs.jsonl'}}}]", "data.eval=[]", "train.max_steps=4",
        "train.log_every=2", "train.eval_every=null",
    )  # fmt: skip
    trained(write_spec(tmp_path), *overrides)
    run = tmp_path / "runs" / "small"
    for step in (1, 2, 3):
        found = replay(run, step)
        same_as_recorded(found, run, step + step % 2)
        losses = [row["before"] for row in found["rows"]]
        assert len(losses) == 12 and sum(losses) / 12 == pytest.approx(found["loss"], rel=1e-6)
    assert found["since"] == 2 and found["end"] == 4 and found["loss"] != found["record"]["loss"]


def test_of_a_step_that_was_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_spec(tmp_path)
    result = train(spec, "optim.learning_rate=1e30", "train.max_consecutive_nonfinite=2", nproc=1)
    assert "the gradient was not finite" in result.stderr
    found = replay(tmp_path / "runs" / "small", 3)
    assert not found["applied"] and found["record"] == found["recorded"]
    assert found["record"]["grad_norm"] == "Infinity" and not found["layers"]
    assert all(row["after"] == row["before"] for row in found["rows"])
    assert "so the step was skipped" in capsys.readouterr().out


def test_of_a_pipeline(tmp_path: Path) -> None:
    trained(write_spec(tmp_path), "parallel.pipeline_stages=2", "train.max_steps=5", "train.eval_every=null")
    run = tmp_path / "runs" / "small"
    for step in (2, 4, 5):
        found = replay(run, step)
        same_as_recorded(found, run, step)
    alone = replay(run, 5, "parallel.pipeline_stages=1", processes=1)
    for name, key in (("rows", "before"), ("rows", "after"), ("layers", "grad_norm")):
        expected = sorted(one[key] for one in alone[name])
        assert sorted(one[key] for one in found[name]) == pytest.approx(expected, rel=1e-4)


BF16 = "train.precision=bf16"
SMALL = (
    "data.eval=[]",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "model={name_or_path: BASE}",
)
KINDS: dict[str, tuple[str, ...]] = {
    "zero-0": (BF16, "parallel.zero_stage=0"),
    "zero-3-offloaded": (BF16, "parallel.zero_stage=3", "parallel.offload_optimizer.device=cpu"),
    "adamw-8bit": ("optim.name=adamw_8bit", "parallel.zero_stage=2"),
    "muon": ("optim.name=muon", "parallel.zero_stage=1"),
    "split-rows": ("parallel.sequence_parallel=2", "data.packing=true"),
    "dropout": ("model.from_config.attention_dropout=0.2", "train.neftune_alpha=5"),
    "joined": ("task=pretrain", "data.packing=true", *SMALL, "data.train=[{path: texts.jsonl}]"),
    "pairs-packed": ("task=dpo", "dpo={share_prompts: true}", "data.packing=true", *SMALL),
    "reward": ("task=reward", *SMALL),
    "kto": ("task=kto", "data.packing=true", *SMALL),
    "classify": ("task=classify", "classify.labels=[even, odd]", "data.packing=true", *SMALL)
    + ("data.train=[{path: texts.jsonl}]",),
    "distill": ("task=distill", "distill={reference_model: BASE, top_k: 8}", *SMALL[1:]),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--without`, which restores the state before the step, the step is still that of the run."""
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl")
    texts = [json.dumps({"text": f"word {n} " * (5 + n % 9), "label": n % 2}) for n in range(80)]
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    base = write_model(tmp_path / "base")
    rows = (
        ["data.train=[{path: pairs.jsonl}]"]
        if {"task=dpo", "task=reward", "task=kto"} & {*KINDS[kind]}
        else []
    )
    steps = ("train.max_steps=3", "train.eval_every=null", "checkpoint.every=2", "checkpoint.keep_last=null")
    trained(write_spec(tmp_path), *rows, *(one.replace("BASE", str(base)) for one in KINDS[kind]), *steps)
    run = tmp_path / "runs" / "small"
    left_out = replay(run, 3)["rows"][1]["row"]
    found = replay(run, 3, without=[left_out])
    same_as_recorded(found, run, 3)
    assert found["other"]["loss"] != found["loss"]
    losses = [row["before"] for row in found["rows"]]
    mean = sum(losses) / len(losses) if rows else weighted(found, "before")
    assert kind == "dropout" or mean == pytest.approx(found["loss"], rel=1e-6)


# --- what cannot be replayed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "change", "overrides", "error", "message"),
    [
        (0, None, (), SpecError, "STEP: 0, but RUN has steps 1 to 6"),
        (7, None, (), SpecError, "STEP: 7, but RUN has steps 1 to 6"),
        (1, lambda run: shutil.rmtree(run), (), MissingInputError, "neither the folder of a run"),
        (1, lambda run: forget(run), (), MissingInputError, "ranks.json cannot be read"),
        (5, lambda run: damage(run), (), AssertionError, "the checkpoint is damaged"),
        (5, None, ("data.max_length=24",), CheckpointError, "cannot replay from RUN/checkpoints/step-"),
        (5, None, ("data.max_length=24",), CheckpointError, "data.max_length was 256, now 24. To replay"),
        (5, None, ("train.max_steps=9",), SpecError, "train: the number of steps decides the learning rates"),
        (5, None, ("train.micro_batch_size=4",), SpecError, "nearest values of global_batch_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed(
    crashed: Path, tmp_path: Path, step: int, change: Callable[[Path], object] | None,
    overrides: Sequence[str], error: type[Exception], message: str,
) -> None:  # fmt: skip
    run = Path(shutil.copytree(crashed, tmp_path / "small"))
    if change is not None:
        change(run)
    with pytest.raises(error) as raised:
        command.replay(str(run), step, overrides, (), None, blame=False, as_json=True)
    assert message.replace("RUN", str(run)) in str(raised.value)


def forget(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "ranks.json").unlink()


def damage(run: Path) -> None:
    path = next((run / "checkpoints" / "step-4").glob("rank-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_rows_that_are_not_in_the_step_are_named_before_any_training(crashed: Path) -> None:
    spec = load_spec(crashed / "spec.yaml")
    batch = batch_on(spec, layout_of(spec.parallel, 1))
    run: Any = SimpleNamespace(spec=spec, batch=batch, world=SimpleNamespace(data_rank=0))
    model: Any = None  # the first step would fail
    inputs = read_inputs(spec, lambda text: None)
    asked = {"step": 5, "since": 4, "end": 5, "without": ["absent.jsonl:1"], "rates": []}
    with pytest.raises(SpecError, match=r"absent\.jsonl:1 is not among the rows of the step"):
        Replay(run, inputs, model).result(Progress(), asked)


def test_changed_rows_and_rows_that_are_not_in_the_step(crashed: Path) -> None:
    rows = crashed.parents[1] / "rows.jsonl"
    with pytest.raises(AssertionError, match=r"absent.jsonl:1 is not among the rows of the step"):
        replay(crashed, 5, without=["absent.jsonl:1"])
    text = rows.read_text()
    rows.write_text(text.replace("sum", "total", 1))
    try:
        with pytest.raises(AssertionError, match=r"72 rows of .* Put|put the rows back as they were"):
            replay(crashed, 2)
    finally:
        rows.write_text(text)


@pytest.mark.parametrize(
    ("losses", "weights", "shares"),
    [
        ([1.0, 2.0, 4.0], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]),
        ([1.0, 2.0, 3.0, 5.0], [0.1, 0.1, 0.6, 0.2], [0.0, 0.0, 0.375, 0.625]),
        ([1.0, float("nan"), float("inf")], [0.5, 0.25, 0.25], [0.0, 0.5, 0.5]),
        ([3.0], [1.0], [0.0]),
    ],
)
def test_shares_of_the_loss_above_the_median(
    losses: Sequence[float], weights: Sequence[float], shares: Sequence[float]
) -> None:
    assert shares_of_loss(losses, weights) == pytest.approx(shares)
