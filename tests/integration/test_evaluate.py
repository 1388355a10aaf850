"""`dsft eval`: the numbers are those of the run's own evaluation, on any ranks and in any layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsft.commands import evaluate as command
from dsft.commands import on_ranks
from dsft.errors import DsftError, MissingInputError, SpecError
from tests.integration import test_classify
from tests.integration.runs import dsft, records, run_forked, trained, write_model, write_spec
from tests.integration.test_preference import write_pairs

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = "model.lora={rank: 4, alpha: 8, modules_to_save: [lm_head]}"
PAIRS = (
    "task=dpo",
    "dpo={reference: adapter}",
    "data.eval_fraction=0.2",
    "data.eval=[]",
    "data.max_length=128",
)


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ranks, "run", run_forked)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("base"))


def run_of(folder: Path, *overrides: str) -> Path:
    """Train and return the run's folder."""
    trained(write_spec(folder), "train.max_steps=4", "train.eval_every=2", "checkpoint.every=2", *overrides)
    return folder / "runs" / "small"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a packed run over ZeRO 2 and two ranks."""
    overrides = (
        "parallel.zero_stage=2", "data.packing=true", "checkpoint.keep_last=null",
        "data.eval=[{path: 'builtin:quickstart-heldout'}]",
    )  # fmt: skip
    return run_of(tmp_path_factory.mktemp("run"), *overrides)


def result(
    target: Path | str, *overrides: str, data: Sequence[str] = (), processes: int = 1
) -> dict[str, Any]:
    assert command.evaluate(str(target), overrides, data, processes, as_json=False) == 0
    where = Path(target).parent / f"{Path(target).name}-eval.json"
    found: dict[str, Any] = json.loads(where.read_text(encoding="utf-8"))
    assert not list(where.parent.glob("eval-*")), "the ranks' folder is removed"
    return found


def same(found: Mapping[str, float], run: Path, step: int) -> None:
    """Check that all metrics are those of the run."""
    assert "eval/loss" in found
    for name, value in found.items():
        assert value == pytest.approx(records(run, name)[step], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize(("processes", "zero_stage"), [(1, 2), (2, 3)])
def test_metrics_are_those_of_the_run(
    run: Path, processes: int, zero_stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(run, f"parallel.zero_stage={zero_stage}", processes=processes)
    same(found["metrics"], run, 4)
    assert (
        found["checkpoint"].endswith("step-4")
        and found["task"] == "sft"
        and found["rows"]["held out"]["examples"] > 0
    )
    shown = capsys.readouterr().out
    assert f"{found['metrics']['eval/loss']:.6g}" in shown and "perplexity" in shown


def test_of_an_older_checkpoint_and_of_the_exported_model(run: Path, tmp_path: Path) -> None:
    older = run / "checkpoints" / "step-2"
    without_moments = ("optim.name=muon",)  # whose moments the checkpoint does not have
    assert command.evaluate(str(older), without_moments, (), 1, as_json=False) == 0
    written = json.loads((run.parent / "small-eval.json").read_text(encoding="utf-8"))
    same(written["metrics"], run, 2)
    held_out = ["builtin:quickstart-heldout"]
    out = ("data.max_length=256", f"output_dir={tmp_path}", "name=of")
    assert command.evaluate(str(run / "export"), out, held_out, 1, as_json=False) == 0
    found = json.loads((tmp_path / "of-eval.json").read_text(encoding="utf-8"))
    assert found["metrics"]["eval/loss"] == pytest.approx(records(run, "eval/loss")[4], rel=1e-6)


def test_of_pairs_with_an_adapter(base: Path, tmp_path: Path) -> None:
    """The run's reference is the model without its adapter."""
    write_pairs(tmp_path / "pairs.jsonl")
    model = f"model={{name_or_path: {base}}}"
    rows = f"data.train=[{{path: {tmp_path / 'pairs.jsonl'}}}]"
    run = run_of(tmp_path, model, LORA, *PAIRS, rows)
    found = result(run)["metrics"]
    same(found, run, 4)
    assert {"eval/rewards/accuracies", "eval/rewards/margins"} <= set(found)
    out = ("data.max_length=256", f"output_dir={tmp_path}", "name=of")
    chats = ["builtin:quickstart-heldout"]
    losses = []
    for target in (str(run / "export"), str(base)):
        assert command.evaluate(target, out, chats, 1, as_json=False) == 0
        losses.append(json.loads((tmp_path / "of-eval.json").read_text())["metrics"]["eval/loss"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-4), "the folder's adapter is evaluated"
    (run / "export" / "dsft_export.json").write_text(
        '{"quantization_config": {"bnb_4bit_quant_type": "nf4"}}'
    )
    with pytest.raises(SpecError, match="adapter of weights in 4 bits"):
        command.evaluate(str(run / "export"), out, chats, 1, as_json=False)
    checkpoint = run / "checkpoints" / "step-4"
    damaged = next(checkpoint.glob("rank-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(AssertionError, match="damaged"):
        command.evaluate(str(run), (), (), 1, as_json=False)


def test_of_a_classifier(base: Path, tmp_path: Path) -> None:
    """By its run, and by the folder of its adapter, which does not have the labels."""
    trained(test_classify.write_spec(tmp_path, base, "labels"), test_classify.LORA, nproc=1)
    run, rows = tmp_path / "runs" / "labels", [str(tmp_path / "rows.jsonl")]
    found = result(run)["metrics"]
    same(found, run, test_classify.STEPS)
    labels = f"classify.labels=[{', '.join(test_classify.LABELS)}]"
    out = "task=classify", labels, f"output_dir={tmp_path}", "name=of", "train.precision=fp32"
    assert command.evaluate(str(run / "export"), out, rows, 1, as_json=False) == 0
    again = json.loads((tmp_path / "of-eval.json").read_text(encoding="utf-8"))["metrics"]
    assert again == pytest.approx(found, rel=1e-6)


@pytest.mark.long
def test_of_a_pipeline(tmp_path: Path) -> None:
    run = run_of(tmp_path, "parallel.pipeline_stages=2")
    same(result(run, processes=2)["metrics"], run, 4)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", "{}"),
        ("adapter_config.json", "[]"),
        ("config.json", "[]"),
        ("x.yaml", b"\xff"),
    ],
)
def test_damaged_files_get_a_sentence(name: str, content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    target = tmp_path / name if name.endswith(".yaml") else tmp_path
    with pytest.raises(DsftError):
        command.evaluate(str(target), (), ["builtin:quickstart"], 1, as_json=False)


def test_json_alone_is_on_standard_output(run: Path) -> None:
    done = dsft("--fork", "eval", str(run), "--processes", "1", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    same(json.loads(done.stdout)["metrics"], run, 4)


@pytest.mark.parametrize(
    ("target", "overrides", "data", "error", "message"),
    [
        ("nothing", (), (), DsftError, "is neither a checkpoint"),
        ("missing.yaml", (), (), MissingInputError, "'missing.yaml' does not exist"),
        ("BASE", (), (), SpecError, "give --data FILE"),
        ("RUN", ("data.eval=[]",), (), SpecError, "no rows are held out"),
        ("RUN", (), ("absent.jsonl",), SpecError, "--data: data.eval.0.path: 'absent.jsonl' does not"),
        ("RUN", ("optim.lr=1",), (), SpecError, "optim.lr"),
    ],
)
def test_what_cannot_be_evaluated(
    target: str, overrides: Sequence[str], data: Sequence[str], error: type[DsftError], message: str,
    run: Path, base: Path,
) -> None:  # fmt: skip
    named = {"RUN": str(run), "BASE": str(base)}.get(target, target)
    with pytest.raises(error) as raised:
        command.evaluate(named, overrides, data, 1, as_json=False)
    assert message in str(raised.value)
