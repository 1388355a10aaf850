"""A rank ends with its launcher: real processes, with a launcher's name and command line, are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dsft.rank.ancestors import launcher_of, lives, parents, watch
from dsft.rank.stopping import Stopping
from tests.launching import LATE, ROOT, allowed

LEVEL = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[sys.argv.index("--") + 1 :]).returncode)
"""
RANK = """
import os, sys, time
from pathlib import Path
from dsft.rank.ancestors import watch
from dsft.rank.stopping import Stopping

out, stage, saves = sys.argv[1:]
stopping = Stopping(prints=True)
stopping.stage = stage
watched = watch(stopping)
Path(out + ".new").write_text(f"{os.getpid()} " + " ".join(name.split()[-1] for name in watched))
os.rename(out + ".new", out)
while stopping.reason is None or saves == "no":
    time.sleep(0.02)
print("asked by", stopping.reason, file=sys.stderr, flush=True)
os._exit(75)
"""
PYTHON = os.path.realpath(sys.executable)


class Tree:
    """Processes under each other, in a folder that has programs of all names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.begun = folder, []
        package = folder / "deepspeed" / "launcher"
        package.mkdir(parents=True)
        (package / "launch.py").write_text(LEVEL)
        for name in ("deepspeed.py", "torchrun", "level.py"):
            (folder / name).write_text(LEVEL)
        (folder / "bin").mkdir()
        (folder / "bin" / "deepspeed").write_text(LEVEL)
        for name in ("sshd", "slurmstepd"):  # /proc has the name of the file that was executed
            (folder / name).symlink_to(PYTHON)
        (folder / "rank.py").write_text(RANK)
        self.python = [sys.executable]
        self.level = str(folder / "level.py")
        self.deepspeed = [*self.python, str(folder / "bin" / "deepspeed"), "--"]
        self.launch = [*self.python, "-m", "deepspeed.launcher.launch", "--"]
        self.torchrun = [*self.python, str(folder / "torchrun"), "--"]
        self.slurm = [str(folder / "slurmstepd"), self.level, "--"]

    def sshd(self) -> list[str]:
        return [str(self.folder / "sshd"), self.level, "sshd: root@notty", "--"]

    def rank(self, stage: str = "train", saves: str = "yes") -> list[str]:
        return [*self.python, str(self.folder / "rank.py"), str(self.folder / "pid"), stage, saves]

    def shell(self, argv: list[str]) -> list[str]:
        return ["bash", "-c", '"$@"; true', "bash", *argv]

    def start(self, argv: list[str]) -> subprocess.Popen[bytes]:
        environ = os.environ | {"PYTHONPATH": f"{self.folder}:{ROOT}"}
        with (self.folder / "errors").open("a") as errors:
            process = subprocess.Popen(
                argv, env=environ, stderr=errors, start_new_session=True, cwd=self.folder
            )
        self.begun.append(process)
        return process

    def ready(self) -> tuple[psutil.Process, list[str]]:
        """The rank, and what it watches."""
        path = self.folder / "pid"
        within(LATE, path.exists)
        pid, *watched = path.read_text().split()
        return psutil.Process(int(pid)), watched

    def end(self) -> None:
        path = self.folder / "pid"
        left = [child for each in self.begun for child in self.below(each.pid)]
        if path.exists():  # it may be nobody's child by now
            left += self.below(int(path.read_text().split()[0]))
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for begun in self.begun:
            with suppress(ProcessLookupError):  # what its own end has left of its group
                os.killpg(begun.pid, signal.SIGKILL)
            begun.wait()

    def below(self, pid: int) -> list[psutil.Process]:
        """With the process itself."""
        try:
            return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    made = Tree(tmp_path)
    yield made
    made.end()


def within(seconds: float, condition: Callable[[], object]) -> float:
    """The seconds that it took; the bound is for a quiet machine."""
    began = time.monotonic()
    while not condition():
        took = time.monotonic() - began
        assert took < seconds or took < allowed(seconds)
        time.sleep(0.02)
    return time.monotonic() - began


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ranks_save_when_deepspeed_is_killed(tree: Tree) -> None:
    command = tree.start([*tree.deepspeed, *tree.launch, *tree.rank()])
    rank, watched = tree.ready()
    assert watched == ["launch.py", "deepspeed"]
    command.kill()
    within(2, lambda: ended(rank))
    assert (tree.folder / "errors").read_text() == "asked by the end of its launcher\n"


@pytest.mark.parametrize(("stage", "seconds"), [("load", 2), ("train", 4.5)])
def test_ranks_that_cannot_save_end_soon(tree: Tree, stage: str, seconds: float) -> None:
    command = tree.start([*tree.deepspeed, *tree.launch, *tree.rank(stage, "no")])
    rank, _ = tree.ready()
    command.terminate()
    within(seconds, lambda: ended(rank))
    errors = (tree.folder / "errors").read_text()
    assert f"this run's launcher (process {command.pid}) has ended; stopping" in errors


def test_ranks_end_at_once_with_the_process_that_started_them(tree: Tree) -> None:
    tree.start([*tree.deepspeed, *tree.launch, *tree.rank("train", "no")])
    rank, _ = tree.ready()
    os.kill(rank.ppid(), signal.SIGKILL)
    assert within(2, lambda: ended(rank)) < allowed(0.5)


def test_end_of_slurmstepd_ends_ranks(tree: Tree) -> None:
    step = tree.start([*tree.slurm, *tree.shell(tree.rank())])
    rank, watched = tree.ready()
    assert watched == ["launcher", "slurmstepd"]
    step.kill()
    within(2, lambda: ended(rank))


def test_ssh_session_is_not_watched(tree: Tree) -> None:
    """Nor a shell: a run that was put into the background outlives both."""
    tree.start([*tree.sshd(), *tree.shell([*tree.torchrun, *tree.rank()])])
    assert tree.ready()[1] == ["torchrun"]


def test_shell_above_the_launcher_is_not_watched(tree: Tree) -> None:
    shell = tree.start(tree.shell([*tree.deepspeed, *tree.launch, *tree.rank()]))
    rank, watched = tree.ready()
    assert watched == ["launch.py", "deepspeed"]
    shell.kill()
    time.sleep(1.5)
    assert not ended(rank)


def test_without_a_launcher_nothing_is_watched(tree: Tree) -> None:
    shell = tree.start(tree.shell(tree.rank()))
    rank, watched = tree.ready()
    assert not watched
    shell.kill()
    time.sleep(1)
    assert not ended(rank)


def test_zombie_does_not_live() -> None:
    assert lives(psutil.Process())
    child = subprocess.Popen(["true"])
    process = psutil.Process(child.pid)
    within(LATE, lambda: ended(process))
    assert not lives(process)
    child.wait()
    assert not lives(process)


@pytest.mark.parametrize("error", [psutil.AccessDenied, psutil.NoSuchProcess])
def test_ancestors_that_cannot_be_read_are_left_out(
    monkeypatch: pytest.MonkeyPatch, error: type[psutil.Error]
) -> None:
    """Those of other users under hidepid, and one that is just ending."""
    nearest, original = os.getppid(), psutil.Process.parent

    def parent(process: psutil.Process) -> psutil.Process | None:
        if process.pid == nearest:
            raise error(process.pid)
        return original(process)

    monkeypatch.setattr(psutil.Process, "parent", parent)
    assert [each.pid for each in parents()] == [nearest]
    assert watch(Stopping()) == []


@pytest.mark.parametrize("name", ["mpirun", "prterun", "orterun"])
def test_mpirun_is_known_by_its_names(tmp_path: Path, name: str) -> None:
    """Open MPI 4 calls it orterun, and that of Open MPI 5 runs prterun."""
    (tmp_path / name).symlink_to("/bin/sleep")
    process = subprocess.Popen([str(tmp_path / name), "60"])
    try:
        within(LATE, lambda: psutil.Process(process.pid).name() == name)
        assert launcher_of(psutil.Process(process.pid)) == "mpirun"
    finally:
        process.kill()
        process.wait()
