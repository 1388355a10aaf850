"""What a task carries from step to step, here the running mean of `weighted.py`: it is the same after a kill
and a resume, in a step computed again and in an evaluation of a checkpoint."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from dsft.checkpoint.read import CheckpointReader
from dsft.commands import evaluate, on_ranks, replay
from dsft.data.rows import FIELDS
from dsft.spec import task
from dsft.tasks import registry
from tests.integration.runs import records, train, write_spec
from tests.integration.test_killed import DYING
from tests.launching import alone, forked

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).with_name("weighted.py")
STEPS = 6


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Know the task in this process, and on the ranks of commands."""
    tables: list[dict[str, object]] = [FIELDS, task.TASKS, registry.TASKS]  # type: ignore[list-item]
    before = [dict(table) for table in tables]
    runpy.run_path(str(SCRIPT))

    def on_ranks_of_the_task(
        argv: Sequence[str], environ: Mapping[str, str], ranks: int, *, quiet: bool
    ) -> int:
        done = forked(SCRIPT, ranks, argv[2:]) if ranks > 1 else alone(SCRIPT, argv[2:])
        assert done.returncode == 0, done.stderr[-3000:]
        return 0

    monkeypatch.setattr(on_ranks, "run", on_ranks_of_the_task)
    yield
    for table, was in zip(tables, before, strict=True):
        table.clear()
        table.update(was)


def run_of(folder: Path) -> tuple[Path, list[str]]:
    """Return the folder of a run that is not there yet, and the words that start it."""
    folder.mkdir()
    rows = [{"text": "fox " * (1 + 7 * n % 5) + str(n), "weight": 0.25 * (n % 7)} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "runs" / "small", [
        str(write_spec(folder)), "task=weighted", f"data.train=[{{path: {folder}/rows.jsonl}}]",
        f"data.eval=[{{path: {folder}/rows.jsonl}}]", f"train.max_steps={STEPS}", "train.eval_every=2",
        "checkpoint.every=2", "checkpoint.keep_last=null", "train.global_batch_size=6", "train.log_every=2",
    ]  # fmt: skip


def test_a_running_mean_survives_kill_resume_replay_and_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASK", str(SCRIPT))
    whole, words = run_of(tmp_path / "whole")
    done = train(Path(words[0]), *words[1:], script=SCRIPT)
    assert done.returncode == 0, done.stderr
    run, words = run_of(tmp_path / "killed")
    assert forked(DYING, 2, ["step", "1", "5", *words]).returncode != 0
    resumed = train(Path(words[0]), *words[1:], script=SCRIPT)
    assert "going on from step 4" in resumed.stdout, resumed.stderr
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert records(run, key) == records(whole, key) and len(records(run, key)) > 2, key

    losses, before = records(run, "train/loss"), {"losses": 0.0, "targets": 0.0}
    for step in (2, 4, STEPS):
        carried = CheckpointReader.open(run / "checkpoints" / f"step-{step}").state["carried"]
        added = {name: carried[name] - before[name] for name in before}
        assert added["losses"] / added["targets"] == pytest.approx(losses[step], rel=1e-12)
        before = carried

    step = STEPS - 1  # the first of the two of a record
    assert replay.replay(str(run), step, (), (), None, blame=False, as_json=False) == 0
    found = json.loads((run.parent / f"{run.name}-step-{step}.json").read_text())
    assert found["record"]["loss"] == losses[STEPS]
    row = Path(found["rows"][0]["row"]).name
    assert replay.replay(str(run), step, (), (row,), None, blame=False, as_json=False) == 0
    without = json.loads((run.parent / f"{run.name}-step-{step}.json").read_text())
    assert without["record"] == found["record"], "the step without a row is undone"

    for step in (2, STEPS):
        checkpoint = run / "checkpoints" / f"step-{step}"
        assert evaluate.evaluate(str(checkpoint), (), (), 2, as_json=False) == 0
        (path,) = run.parent.rglob("*-eval.json")
        metrics = json.loads(path.read_text())["metrics"]
        assert metrics["eval/loss"] == records(run, "eval/loss")[step]
        path.unlink()
