"""A rank killed with SIGKILL in the middle of a run or of a save: the next start goes on from a whole
checkpoint, bit for bit, and never from step 0."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
    "model.from_config.hidden_size=256",  # so that sub-groups have more than 1 MiB, and some parameters
    "model.from_config.intermediate_size=4200",
    "model.from_config.num_hidden_layers=1",
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


@pytest.mark.parametrize(
    ("instant", "rank", "step", "goes_on_from", "overrides"),
    [
        ("step", 1, 6, 4, ()),
        ("part", 1, 8, 4, ()),
        ("manifest", 0, 8, 4, ()),
        ("rename", 0, 8, 4, ()),
        ("latest", 0, 8, 8, ()),  # the folder has its name: it is committed, whatever `latest` says
        ("step", 0, 6, 4, ZERO_3),
        ("part", 0, 8, 4, ZERO_3),
    ],
)
def test_the_next_start_goes_on_bit_for_bit(
    whole: Callable[..., Path],
    tmp_path: Path,
    instant: str,
    rank: int,
    step: int,
    goes_on_from: int,
    overrides: tuple[str, ...],
) -> None:
    goes_on(tmp_path, whole(*overrides), (instant, rank, step), goes_on_from, overrides)


def test_so_it_does_with_all_on_a_disk_as_in_host_memory(whole: Callable[..., Path], tmp_path: Path) -> None:
    if reason := why_no_swap():
        pytest.skip(reason)
    parts = ("optimizer", "parameters")
    in_memory = whole(*LARGE, *(f"parallel.offload_{part}={{device: cpu}}" for part in parts))
    disk = tmp_path / "disk"
    disk.mkdir()
    swapped = [f"parallel.offload_{part}={{device: nvme, nvme_path: {disk}}}" for part in parts]
    goes_on(tmp_path, in_memory, ("step", 1, 6), 4, (*LARGE, *swapped))
    assert list(disk.iterdir()) == [], "nothing stays on the disk"


def goes_on(
    tmp_path: Path,
    expected: Path,
    killed_at: tuple[str, int, int],
    goes_on_from: int,
    overrides: tuple[str, ...],
) -> None:
    """killed_at: instant, rank and step; expected: the folder of the run without a break."""
    (instant, rank, step), spec = killed_at, write_spec(tmp_path)
    killed = forked(DYING, 2, [instant, str(rank), str(step), str(spec), *overrides])
    assert killed.returncode != 0, "the run must have been killed"
    run = tmp_path / "runs" / "small"
    assert (run / "checkpoints" / "latest").exists(), killed.stdout + killed.stderr
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-4"
    if instant == "step":  # the last line torn as well, as by a kill in the middle of a write
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"train/loss": 1.2')

    said = trained(spec, *overrides)

    assert f"going on from step {goes_on_from}: " in said
    for key in METRICS:
        assert records(run, key) == records(expected, key), key
    assert not list((run / "checkpoints").glob("*.tmp*")), "what the killed save left must be gone"
    assert (run / "export" / "model.safetensors").read_bytes() == (
        expected / "export" / "model.safetensors"
    ).read_bytes()
