"""What a rank reports of itself, by a real process to a real socket."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

RANK = """
import os, sys, time
from dsft.rank.heartbeat import LOGS, SOCKET, Heartbeat, begin_log
begin_log(os.environ.get(LOGS), 3, 4)
heartbeat = Heartbeat(3, 1, os.environ.get(SOCKET))
heartbeat.start()
heartbeat.mark("step", 7)
print("trains", flush=True)
os.write(2, b"a library's word\\n")
def waits_in_a_collective():
    sys.stdin.readline()
waits_in_a_collective()
heartbeat.mark("save")
heartbeat.end(75, "stopped")
"""


def start(**variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={"PYTHONPATH": str(Path.cwd()), **variables},
    )  # fmt: skip


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "heartbeat"))
        yield bound


def test_heartbeat_each_second_and_at_the_end(listener: socket.socket, tmp_path: Path) -> None:
    began = time.monotonic()
    with start(DSFT_HEARTBEAT=str(tmp_path / "heartbeat")) as rank:
        sent = 1
        while (first := json.loads(listener.recv(4096)))["phase"] != "step":
            assert (first["phase"], first["step"]) == ("start", 0)
            sent += 1
        assert {key: first[key] for key in ("rank", "local_rank", "host", "pid", "step")} == {
            "rank": 3, "local_rank": 1, "host": socket.gethostname(), "pid": rank.pid, "step": 7,
        }  # fmt: skip
        second = json.loads(listener.recv(4096))
        assert time.monotonic() - began > 0.9 * sent, "a second lies between two of them"
        assert second == first, "it lives, and does not go on"
        assert 0 < time.monotonic() - second["progress_at"] < 60, "the clock is the host's"
        rank.communicate("go on\n")
        last = json.loads(listener.recv(4096))
        while "ended" not in last:
            last = json.loads(listener.recv(4096))
    assert (last["ended"], last["message"], last["phase"], last["step"]) == (75, "stopped", "save", 7)
    assert last["progress_at"] > first["progress_at"]


@pytest.mark.parametrize(
    "variables", [{}, {"DSFT_HEARTBEAT": "/nowhere/socket"}, {"DSFT_LOGS": "/dev/null/logs"}]
)
def test_heartbeat_without_listener(variables: dict[str, str]) -> None:
    with start(**variables) as rank:
        out, err = rank.communicate("go on\n")
    assert (rank.returncode, out) == (0, "trains\n")
    output = err.removesuffix("a library's word\n")
    assert ("cannot be written" in output) == ("DSFT_LOGS" in variables)
    assert "Traceback" not in output


def test_busy_listener_does_not_delay_a_rank(listener: socket.socket, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                other.sendto(b"x", str(tmp_path / "heartbeat"))
    with start(DSFT_HEARTBEAT=str(tmp_path / "heartbeat")) as rank:
        rank.communicate("go on\n")
    assert rank.returncode == 0


def test_heading_and_stacks_of_a_rank(tmp_path: Path) -> None:
    stack = tmp_path / "runs" / "logs" / "rank-3.stack"

    def has_stack() -> bool:  # of the function in which the rank waits, once it is there
        rank.send_signal(signal.SIGUSR2)
        return "waits_in_a_collective" in stack.read_text()

    with start(DSFT_LOGS=str(stack.parent)) as rank:
        heading = rank.stdout.readline()
        wait_for(has_stack)
        rank.communicate("go on\n")
    assert rank.returncode == 0
    assert heading.startswith(f"--- rank 3 of 4 on {socket.gethostname()}, process ")


def wait_for(condition: object) -> None:
    while not condition():  # type: ignore[operator]
        time.sleep(0.05)
