"""Being asked to stop: real signals to real processes, one of them blocked in C code."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsft.rank.environment import RENDEZVOUS
from dsft.rank.stopping import REASONS, SAME_REQUEST, Stopping, name_of
from tests.launching import allowed

RANK = """
import os, signal, sys, time
from dsft.rank.stopping import Stopping

stage, blocks = sys.argv[1:]
stopping = Stopping(lambda code, message: print("lines", code, flush=True), prints=True)
stopping.listen()
stopping.stage = stage
if blocks == "forks":
    if (child := os.fork()) == 0:
        print(f"child {os.getpid()}", flush=True)
        time.sleep(60)
    print("child ended", os.waitpid(child, 0)[1], flush=True)
    os._exit(7 if stopping.reason else 0)
print("ready", flush=True)
if blocks == "in C":  # as in a collective: no instruction of Python's until it is over
    import ctypes
    mutex = ctypes.create_string_buffer(64)  # PTHREAD_MUTEX_INITIALIZER is all zeros
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
else:
    while stopping.reason is None:
        time.sleep(0.01)
    print("asked by", stopping.reason, flush=True)
    time.sleep(60 if blocks == "saves long" else 0)
os._exit(75)
"""


@pytest.fixture
def start() -> object:
    begun: list[subprocess.Popen[str]] = []

    def started(stage: str, blocks: str = "", before: Callable[[], object] | None = None) -> object:
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, stage, blocks], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=Path.cwd(), preexec_fn=before,
        )  # fmt: skip
        begun.append(process)
        return process, process.stdout.readline()

    yield started
    for process in begun:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_asks_for_a_stop(start: Callable, asked: signal.Signals) -> None:
    rank, _ = start("train")
    rank.send_signal(asked)
    out, err = rank.communicate()
    assert (rank.returncode, out) == (75, f"asked by {name_of(asked)}\n")
    assert name_of(asked) in REASONS and ("saves at the end of its step" in err) == (asked != signal.SIGUSR1)


def test_two_signals_at_once_are_one_request_and_a_later_one_ends_at_once(start: Callable) -> None:
    rank, _ = start("train", "saves long")
    rank.send_signal(signal.SIGUSR1)  # that the time is nearly over, and a while later that it is
    assert rank.stdout.readline() == "asked by SIGUSR1\n"
    rank.send_signal(signal.SIGINT)
    rank.send_signal(signal.SIGTERM)
    time.sleep(SAME_REQUEST + 1)
    assert rank.poll() is None
    rank.send_signal(signal.SIGUSR1)
    rank.send_signal(signal.SIGINT)
    out, err = rank.communicate()
    assert (rank.returncode, out) == (130, "lines 130\n")
    assert err.endswith("ended at once by a second Ctrl-C\n")


def test_a_second_one_ends_a_process_that_never_comes_back_to_python(start: Callable) -> None:
    rank, _ = start("train", "in C")
    rank.send_signal(signal.SIGTERM)
    time.sleep(SAME_REQUEST + 1)
    assert rank.poll() is None
    sent = time.monotonic()
    rank.send_signal(signal.SIGTERM)
    rank.communicate()
    assert rank.returncode == 143 and time.monotonic() - sent < allowed(1)


def test_before_the_first_step_it_ends_at_once_and_the_time_limit_waits(start: Callable) -> None:
    rank, _ = start("load", "in C")
    rank.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert rank.poll() is None
    rank.send_signal(signal.SIGINT)
    out, err = rank.communicate()
    assert (rank.returncode, out) == (75, "lines 75\n")
    assert err == "stopped by Ctrl-C before its first step; the same command starts it again\n"


def test_a_forked_process_is_not_asked_for_its_parent(start: Callable) -> None:
    rank, output = start("train", "forks")
    os.kill(int(output.split()[1]), signal.SIGTERM)
    out, _ = rank.communicate()
    assert (rank.returncode, out) == (0, f"child ended {signal.SIGTERM.value}\n")


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_during_the_imports_are_kept(tmp_path: Path, asked: signal.Signals) -> None:
    """Before a handler is installed: SIGUSR1 does not kill, and the other one ends it as afterwards."""
    with subprocess.Popen(
        [sys.executable, "dsft/train.py", "specs/quickstart.yaml", f"output_dir={tmp_path}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={name: value for name, value in os.environ.items() if name not in RENDEZVOUS},
    ) as rank:  # fmt: skip
        while "pydantic" not in Path(f"/proc/{rank.pid}/maps").read_text():
            assert rank.poll() is None
            time.sleep(0.001)
        rank.send_signal(signal.SIGUSR1)
        rank.send_signal(asked)
        _, err = rank.communicate(timeout=60)
    assert (rank.returncode, err) == (
        75,
        f"stopped by {name_of(asked)} before its first step; the same command starts it again\n",
    )


def test_nohup_is_respected(start: Callable) -> None:
    rank, _ = start("train", before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    rank.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert rank.poll() is None
    rank.send_signal(signal.SIGTERM)
    assert rank.communicate()[0] == "asked by SIGTERM\n"


def test_a_time_limit_is_a_reason_once_it_is_over() -> None:
    stopping = Stopping()
    assert stopping.reason is None
    stopping.limit(None)
    assert stopping.reason is None
    stopping.limit(0)
    assert stopping.reason == "cluster.time_limit"
    stopping.request("SIGTERM")
    assert stopping.reason == "cluster.time_limit", "the first one stays"
