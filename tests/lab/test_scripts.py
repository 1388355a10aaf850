"""The generated sbatch script under a real Slurm on two hosts, where it is stopped by USR1 ahead of its
limit, comes back to the queue and goes on. torchrun's script is one of the ways of test_ways_in.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsft.generate.files import generate_files
from tests.integration.runs import SPEC
from tests.lab.hosts import Lab
from tests.lab.slurm import why_not
from tests.launching import LATE

CLUSTER = "cluster: {hosts: {'node[1-2]': 1}, interface: e0, accelerator: {name: cpu}, time_limit: 3600}\n"


def prepared(folder: Path, name: str, *overrides: str) -> None:
    """The files of a small run over both hosts, below `folder`."""
    spec = folder / "small.yaml"
    spec.write_text(SPEC + CLUSTER + f"output_dir: {folder / 'runs'}\n")
    assert generate_files(spec, [f"name={name}", *overrides], folder, check=False)


def until(look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LATE
    while not look():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.1)


STAND_IN = """
import os, signal, sys, time
rank = os.environ["SLURM_PROCID"]
def save(number, frame):
    time.sleep(int(rank) / 2)  # the others go on saving when the first has ended
    print("saved", rank, flush=True)
    os._exit(75)
signal.signal(signal.SIGUSR1, save)
signal.signal(signal.SIGTERM, lambda number, frame: None)
time.sleep(1)  # Slurm may lose a signal to a step that its daemon is still starting
print("began", rank, os.environ["SLURM_NTASKS"], sys.argv[1:], flush=True)
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    time.sleep(600)
    time.sleep(600)
print("done", rank, flush=True)
"""


def test_job_stopped_before_its_limit_is_requeued(lab: Lab, tmp_path: Path) -> None:
    """USR1 is sent as Slurm sends it at the end of the time (`scancel --signal`), for which one would wait a
    minute. A job that its user cancels does not come back. What trains stands in for a run: it costs nothing,
    and ends as runs do."""
    if reason := why_not():
        pytest.skip(reason)
    prepared(tmp_path, "job")
    path = tmp_path / "scripts/launch/job.slurm.sh"
    lines = path.read_text().splitlines()
    there = next(number for number, line in enumerate(lines) if line.startswith("train="))
    lines[there] = "train=dsft/train.py"
    path.write_text("\n".join(lines))
    (tmp_path / "dsft").mkdir()
    (tmp_path / "dsft/train.py").write_text(STAND_IN)
    with lab.slurm() as slurm:

        def began() -> tuple[str, Path]:
            done = lab.run("node1", ["sbatch", "--parsable", str(path), "name=a  b"], cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            job = done.stdout.strip()
            out = tmp_path / f"job-{job}.out"
            until(lambda: out.exists() and out.read_text().count("began") == 2)
            return job, out

        job, out = began()
        assert lab.run("node1", ["scancel", "--signal=USR1", job]).returncode == 0
        until(lambda: slurm.state(job).get("Restarts") == "1")
        assert {"saved 0", "saved 1"} <= set(out.read_text().splitlines())
        cancelled, beside = began()
        assert lab.run("node1", ["scancel", cancelled]).returncode == 0
        assert slurm.wait(cancelled, LATE)["JobState"] == "CANCELLED"
        ended = slurm.wait(job, LATE)
        output = out.read_text()
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), output
        assert slurm.state(cancelled)["Restarts"] == "0" and beside.read_text().count("began") == 2
    assert "'name=job', 'name=a  b']" in output and "Exited with exit code 75" in output
    assert output.count("began") == 4 and output.count("done") == 2
