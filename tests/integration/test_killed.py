"""A rank killed with SIGKILL in the middle of a run or of a save: the next start goes on from a whole
checkpoint, bit for bit, and never from step 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import records, trained, write_spec
from tests.launching import ROOT, torchrun

DYING = ROOT / "tests" / "integration" / "dying.py"
METRICS = ("train/loss", "train/grad_norm", "eval/loss")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trained(write_spec(folder))
    return folder / "runs" / "small"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("instant", "rank", "step", "goes_on_from"),
    [
        ("step", 1, 6, 4),
        ("part", 1, 8, 4),
        ("manifest", 0, 8, 4),
        ("rename", 0, 8, 4),
        ("latest", 0, 8, 8),  # the folder has its name: it is committed, whatever `latest` says
    ],
)
def test_the_next_start_goes_on_bit_for_bit(
    whole: Path, tmp_path: Path, instant: str, rank: int, step: int, goes_on_from: int
) -> None:
    spec = write_spec(tmp_path)
    killed = torchrun(DYING, 2, [instant, str(rank), str(step), str(spec)])
    assert killed.returncode != 0, "the run must have been killed"
    run = tmp_path / "runs" / "small"
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-4"
    if instant == "step":  # the last line torn as well, as by a kill in the middle of a write
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"train/loss": 1.2')

    said = trained(spec)

    assert f"going on from step {goes_on_from}: " in said
    for key in METRICS:
        assert records(run, key) == records(whole, key), key
    assert not list((run / "checkpoints").glob("*.tmp*")), "what the killed save left must be gone"
    assert (run / "export" / "model.safetensors").read_bytes() == (
        whole / "export" / "model.safetensors"
    ).read_bytes()
