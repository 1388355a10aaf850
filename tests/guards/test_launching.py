"""The tests' own launchers leave no process behind; properties are tried quickly."""

import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from tests import launching
from tests.conftest import QUICK, shorten
from tests.launching import LATE, alone, forked, torchrun

WORKER = """
import os, sys, time
from pathlib import Path
from typing import Any
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
os.write(1, b"rank %d\\n" % int(os.environ["RANK"]))  # one write: the ranks share the pipe
if sys.argv[2] == "hang":
    time.sleep(600)
sys.exit(3 * int(os.environ["RANK"]))
"""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.mark.parametrize("launch", [torchrun, forked])
def test_hanging_ranks_are_killed(launch, worker, tmp_path, monkeypatch) -> None:
    """The time begins once both hang, however long the machine takes to start them."""

    def once_both_hang(plain: Any) -> Any:
        def wait(*args: Any, **named: Any) -> Any:
            deadline = time.monotonic() + LATE
            while not all((tmp_path / rank).exists() for rank in "01"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return plain(*args, **named)

        return wait

    monkeypatch.setattr(subprocess.Popen, "communicate", once_both_hang(subprocess.Popen.communicate))
    monkeypatch.setattr(launching._Server, "answer", once_both_hang(launching._Server.answer))
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        launch(worker, 2, [str(tmp_path), "hang"], timeout=1.0)
    assert "rank 1" in str(raised.value.stdout)
    pids = [int((tmp_path / rank).read_text()) for rank in "01"]
    deadline = time.monotonic() + LATE
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} are still running"
        time.sleep(0.1)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("launch", "message"), [(torchrun, "exitcode  : 3"), (forked, "rank 1 ended with exit code 3")]
)
def test_failed_rank_fails_the_launch(launch: Any, message: str, worker: Path, tmp_path: Path) -> None:
    done = launch(worker, 2, [str(tmp_path), "fail"])
    assert done.returncode != 0
    assert message in done.stderr


def test_gpu_ranks_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setattr(launching, "torchrun", lambda *arguments: arguments)
    monkeypatch.setattr(launching, "_server", None)
    launched: Any = forked(Path("worker.py"), 2, ["word"], 5.0)
    assert launched == (Path("worker.py"), 2, ["word"], 5.0)


def test_dead_fork_server_is_reported_at_once() -> None:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    its.close()
    with ours, pytest.raises(RuntimeError, match=r"forked\.py has ended"):
        launching._Server(ours).answer("pid", LATE)


def test_script_without_ranks_keeps_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(os.environ.get('RANK'), sys.argv[1:])\nsys.exit(70)\n")
    done = alone(script, ["a b"])
    assert (done.returncode, done.stdout) == (70, "None ['a b']\n")


def test_a_property_has_few_examples() -> None:
    tried: list[int] = []

    @settings(max_examples=10 * QUICK, database=None)
    @given(integers())
    def collects(number: int) -> None:
        tried.append(number)

    item: Any = SimpleNamespace(obj=collects)
    shorten(item)
    collects()
    assert len(tried) == QUICK
