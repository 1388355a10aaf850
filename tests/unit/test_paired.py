"""Variants are run in turn and compared round by round."""

import argparse
import mmap
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import paired
from benchmarks.paired import Sample
from tests.launching import LATE

pytestmark = pytest.mark.long  # of the benchmarks, on which no run depends


def printing(number: float) -> list[str]:
    return [sys.executable, "-c", f'print("noise"); print(\'{{"x": {number}}}\')']


def test_variants_take_turns_and_each_round_starts_with_another(capfd: pytest.CaptureFixture[str]) -> None:
    samples = paired.measure({"a": printing(6), "b": printing(3)}, rounds=2)
    assert {name: paired.column(taken, "x") for name, taken in samples.items()} == {"a": [6, 6], "b": [3, 3]}
    order = [line.split(": ")[1] for line in capfd.readouterr().err.splitlines()]
    assert order == ["a", "b", "b", "a"]


def test_existing_result_is_not_overwritten(tmp_path: Path) -> None:
    assert paired.new_file(str(tmp_path / "new")) == tmp_path / "new"
    with pytest.raises(argparse.ArgumentTypeError, match="exists already"):
        paired.new_file(str(tmp_path))


def test_failed_variant_is_reported_with_its_output() -> None:
    with pytest.raises(RuntimeError, match="(?s)b: exit code 1.*the reason"):
        paired.measure({"b": [sys.executable, "-c", "raise SystemExit('the reason')"]}, rounds=1)


def test_hanging_variant_is_killed_with_its_children(tmp_path: Path) -> None:
    """As torchrun does, the variant starts its own process in another session."""
    starts = (
        "import pathlib, subprocess, sys\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "rank = subprocess.Popen(command, start_new_session=True)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(rank.pid))\n"
        "rank.wait()\n"
    )
    command = [sys.executable, "-c", starts, str(tmp_path / "pid")]
    with pytest.raises(RuntimeError, match="hangs: more than 3 s"):
        paired.measure({"hangs": command}, rounds=1, timeout=3)
    rank = int((tmp_path / "pid").read_text())
    _, alive = psutil.wait_procs([psutil.Process(rank)] if psutil.pid_exists(rank) else [], timeout=LATE)
    assert not alive


def test_ratio_is_computed_per_round() -> None:
    speeds = {"a": (2, 20, 200), "b": (1, 40, 100)}
    samples = {name: [Sample({"x": x}, 1, 1) for x in values] for name, values in speeds.items()}
    found = paired.ratio(samples, "x", "a", "b")
    assert (found.low, found.median, found.high) == (0.5, 2, 2)
    assert found.interval == (0.5, 2)


def test_the_interval_narrows_with_the_rounds() -> None:
    few, many = ([1 + 0.1 * (i % 5) for i in range(n)] for n in (5, 100))
    low, high = paired.bootstrap(few)
    assert (low, high) == (1, 1.4)
    assert paired.bootstrap(many)[1] - paired.bootstrap(many)[0] < 0.2


def test_a_table() -> None:
    table = paired.markdown(("what", "s"), [("a", paired.spread([3, 1, 2]))])
    assert table == "| what | s |\n| --- | --- |\n| a | 1.00 / 2.00 / 3.00 |"


def test_peak_memory_is_recorded_and_can_be_reset() -> None:
    paired.forget_peak()
    before = paired.peak_bytes()
    used = mmap.mmap(-1, 64 << 20)  # pages of their own: malloc may give and keep what was freed before
    for page in range(0, len(used), mmap.PAGESIZE):
        used[page] = 1
    assert 64 << 20 <= paired.peak_bytes() - before < 80 << 20
    used.close()
    assert paired.resident_bytes() < paired.peak_bytes() - (50 << 20)
    paired.forget_peak()
    assert paired.peak_bytes() < before + (16 << 20)
