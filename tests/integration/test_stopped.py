"""A run under a launcher that was typed by hand is stopped, or has a process killed, again and again: each
time all of its processes end soon, and the next start resumes, at last bit for bit as without a break."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.runs import records, trained, write_spec
from tests.launching import LATE, ROOT, allowed, end_group, forked, free_port

SLOW = ROOT / "tests" / "integration" / "slow.py"
STEPS = 30
LIMIT = 5.0  # seconds from a kill to the end of the last process
SAVES = 30.0  # seconds, as long as launchers wait for ranks that they have asked to end


class Typed:
    """A launcher's command with two ranks in `folder`, which has a spec."""

    def __init__(self, launcher: str, folder: Path, words: Sequence[str] = ()) -> None:
        program = Path(sys.executable).parent / launcher
        port = ["--master_port", str(free_port())]
        ranks = {"deepspeed": ["--num_gpus", "2"], "torchrun": ["--nproc_per_node", "2"]}[launcher]
        self.output = folder / f"output-{len(list(folder.glob('output-*')))}"
        with self.output.open("w") as out:
            self.process = subprocess.Popen(
                [str(program), *ranks, *port, str(SLOW), str(folder / "small.yaml"), *words],
                cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "HF_TOKEN": "canary-token"},
            )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        command = psutil.Process(self.process.pid)
        return [command, *command.children(recursive=True)]

    def rank(self, number: int) -> psutil.Process:
        for each in self.processes():
            with suppress(psutil.Error):
                if "--world_info" not in " ".join(each.cmdline()) and each.environ().get("RANK") == str(
                    number
                ):
                    return each
        raise LookupError(f"rank {number}: {self.output.read_text()}")

    def launch(self) -> psutil.Process:
        return next(each for each in self.processes() if "deepspeed.launcher.launch" in each.cmdline())

    def wait_for_steps(self, number: int) -> None:
        deadline = time.monotonic() + LATE
        while self.output.read_text().count(f"/{STEPS}  loss") < number:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)

    def end_after(self, fault: Callable[[], object]) -> tuple[float, int]:
        """Return seconds to the end of the last process, and the command's exit code."""
        all_of_it = self.processes()
        began = time.monotonic()
        fault()
        code = self.process.wait(LATE)
        alive = psutil.wait_procs(all_of_it, timeout=LATE)[1]
        assert not alive, f"{alive} live on: {self.output.read_text()}"
        return time.monotonic() - began, code


@contextmanager
def typed(launcher: str, folder: Path, *words: str) -> Iterator[Typed]:
    run = Typed(launcher, folder, words)
    ranks: list[psutil.Process] = []
    try:
        run.wait_for_steps(3)
        ranks = run.processes()
        yield run
    finally:
        end_group(run.process.pid)
        for each in ranks:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        run.process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_spec(tmp_path)
    text = path.read_text().replace("max_steps: 10, eval_every: 5", f"max_steps: {STEPS}, eval_every: 10")
    path.write_text(text.replace("{every: 4}", f"{{every: {STEPS}}}"))
    (tmp_path / "own.json").write_text('{"train_batch_size": 16}')
    return tmp_path


def latest(folder: Path) -> int:
    return int(
        (folder / "runs" / "small" / "checkpoints" / "latest").read_text().strip().removeprefix("step-")
    )


def goes_on_from(run: Typed, step: int) -> bool:
    return f"going on from step {step}: " in run.output.read_text()


FAULTS: dict[str, tuple[str, Callable[[Typed], object], int | None, float, bool]] = {
    # one rank is asked: all save the same step
    "a rank is asked": ("deepspeed", lambda run: run.rank(1).terminate(), 75, SAVES, True),
    # launch.py alone: deepspeed itself says 0
    "launch.py is killed": ("deepspeed", lambda run: run.launch().kill(), None, LIMIT, False),
    # Ctrl-C: a terminal signals the whole group
    "Ctrl-C": ("torchrun", lambda run: os.killpg(run.process.pid, signal.SIGINT), 1, SAVES, True),
    # raw ranks train on, nobody's children, and save
    "deepspeed is asked": ("deepspeed", lambda run: run.process.terminate(), -signal.SIGTERM, LIMIT, True),
    "a rank is killed": ("torchrun", lambda run: run.rank(1).kill(), 1, LIMIT, False),
}
"""What happens to the command: its launcher, the fault, its exit code, seconds to the end of all processes,
whether the run saves."""
OPTIONS = {"deepspeed": ("--deepspeed_config", "own.json")}
"""What is typed behind the spec: a JSON whose one key the run does not use, and says so."""
ALWAYS = ("Ctrl-C", "deepspeed is asked")
"""test_killed.py always asks and kills a rank, tests/unit/rank/test_ancestors.py kills launch.py in a tree of
processes."""


@pytest.mark.parametrize(
    "faults", [ALWAYS, pytest.param(tuple(FAULTS), marks=pytest.mark.long)], ids=["two", "all"]
)
def test_stopped_and_killed_run_resumes_bit_for_bit(folder: Path, faults: tuple[str, ...]) -> None:
    saved = None
    for name in faults:
        launcher, fault, expected, within, saves = FAULTS[name]
        with typed(launcher, folder, *OPTIONS.get(launcher, ())) as run:
            assert saved is None or goes_on_from(run, saved), name
            seconds, code = run.end_after(lambda: fault(run))  # noqa: B023  called at once
            assert seconds < allowed(within) and expected in (None, code), (name, seconds, code)
            assert saves or latest(folder) == saved, name
            assert not saves or saved is None or saved < latest(folder), name
            saved = latest(folder)
            output = run.output.read_text()
            assert ("own.json: train_batch_size 16" in output) == (launcher in OPTIONS)
            assert "canary" not in output and all(
                f"{how}: (hidden)\n" in output for how in ("printed", "logged", "warned")
            )
            if name == "Ctrl-C":
                assert f"stopped at step {saved} of {STEPS} by Ctrl-C, and saved" in output
            if name == "a rank is asked":
                assert f"stopped at step {saved} of {STEPS} by SIGTERM, and saved" in output
    assert saved is not None

    # Its time is over before its first step, and it gets somewhere all the same.
    limited = forked(
        SLOW, 2, [str(folder / "small.yaml"), "cluster.hosts={localhost: 2}", "cluster.time_limit=1"]
    )
    assert limited.returncode != 0 and "by cluster.time_limit, and saved" in limited.stderr
    assert saved < latest(folder) < STEPS

    trained(folder / "small.yaml")
    whole = folder / "whole"
    trained(folder / "small.yaml", f"output_dir={whole}")
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert records(folder / "runs" / "small", key) == records(whole / "small", key), key
    assert (folder / "runs" / "small" / "export" / "model.safetensors").read_bytes() == (
        whole / "small" / "export" / "model.safetensors"
    ).read_bytes()
