"""A rank killed with SIGKILL in the middle of a run or of a save: the next start resumes from a complete
checkpoint, bit for bit, and never from step 0."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.integration.runs import records, trained, write_spec
from tests.launching import ROOT, forked
from tests.swap_disk import why_no_swap

DYING = ROOT / "tests" / "integration" / "dying.py"
METRICS = ("train/loss", "train/grad_norm", "eval/loss")


ZERO_3 = ("parallel.zero_stage=3", "train.precision=bf16")
LARGE = (
    *ZERO_3,
    "model.from_config.hidden_size=192",  # so that sub-groups have more than 1 MiB, and some parameters
    "model.from_config.intermediate_size=5600",
    "model.from_config.num_hidden_layers=1",
    "train.max_steps=4",
    "train.eval_every=2",
    "train.global_batch_size=6",
    "checkpoint.every=2",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """(overrides) -> the folder of a run that nothing interrupted; each is made once."""

    @functools.cache
    def run(*overrides: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        trained(write_spec(folder), *overrides)
        return folder / "runs" / "small"

    return run


# instant, rank, step at which it comes, step from which the next start resumes
Kill = tuple[str, int, int, int]
KILLS: tuple[Kill, ...] = (
    ("asked", 1, 1, 2),  # by SIGTERM, one rank alone: all save the same step, this one or the next
    ("step", 1, 6, 4),
    ("part", 1, 8, 4),
    ("manifest", 0, 8, 4),
    ("rename", 0, 8, 4),
    ("latest", 0, 8, 8),  # the folder has its name: it is committed, whatever `latest` says
)


ALWAYS = tuple(kill for kill in KILLS if kill[0] not in ("manifest", "rename"))
"""tests/unit/checkpoint/test_checkpoint_save.py always kills a save before each rename and each fsync."""


@pytest.mark.parametrize(
    ("kills", "overrides"),
    [
        pytest.param(ALWAYS, (), id="zero1"),
        pytest.param(KILLS, (), id="zero1-all", marks=pytest.mark.long),
        pytest.param(  # as below with NVMe, and as z3-bf16 of tests/parity/test_state.py
            (("step", 0, 6, 4), ("part", 0, 8, 4)), ZERO_3, id="zero3-bf16", marks=pytest.mark.long
        ),
    ],
)
def test_killed_run_resumes_bit_for_bit(
    whole: Callable[..., Path], tmp_path: Path, kills: Sequence[Kill], overrides: tuple[str, ...]
) -> None:
    """One run, killed at one instant after the other."""
    goes_on(tmp_path, whole(*overrides), kills, overrides)


def test_killed_nvme_run_resumes_bit_for_bit(whole: Callable[..., Path], tmp_path: Path) -> None:
    if reason := why_no_swap():
        pytest.skip(reason)
    parts = ("optimizer", "parameters")
    in_memory = whole(*LARGE, *(f"parallel.offload_{part}={{device: cpu}}" for part in parts))
    disk = tmp_path / "disk"
    disk.mkdir()
    swapped = [f"parallel.offload_{part}={{device: nvme, nvme_path: {disk}}}" for part in parts]
    goes_on(tmp_path, in_memory, [("step", 1, 3, 2)], (*LARGE, *swapped))
    assert list(disk.iterdir()) == [], "nothing stays on the disk"


def goes_on(tmp_path: Path, expected: Path, kills: Sequence[Kill], overrides: tuple[str, ...]) -> None:
    """expected: the folder of the run without a break."""
    spec, run, saved, before = write_spec(tmp_path), tmp_path / "runs" / "small", 0, "it was never killed"
    for instant, rank, step, next_from in kills:
        killed = forked(DYING, 2, [instant, str(rank), str(step), str(spec), *overrides])
        output = killed.stdout + killed.stderr
        assert killed.returncode != 0, f"the run must have been killed: {instant}"
        assert not saved or f"going on from step {saved}: " in killed.stdout, f"{before}: {output}"
        if instant == "asked":
            stopped = re.search(r"stopped at step (\d) of 10 by SIGTERM, and saved", killed.stderr)
            assert stopped is not None and int(stopped[1]) - next_from in (0, 1), output
            next_from = int(stopped[1])
        assert latest(run) == min(next_from, 4), f"{instant}: {output}"
        if instant == "step":  # the last line torn as well, as by a kill in the middle of a write
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"train/loss": 1.2')
        saved, before = next_from, f"after {instant}"

    assert f"going on from step {saved}: " in trained(spec, *overrides), before
    for key in METRICS:
        assert records(run, key) == records(expected, key), key
    assert not list((run / "checkpoints").glob("*.tmp*")), "what the killed saves left must be gone"
    assert (run / "export" / "model.safetensors").read_bytes() == (
        expected / "export" / "model.safetensors"
    ).read_bytes()


def latest(run: Path) -> int:
    return int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
