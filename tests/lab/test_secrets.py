"""Canary secrets in the environment of a real run over two hosts, with W&B's own process, through a crash,
a restart and its end: no list of processes shows one, and no file that is left holds one."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.hosts import Lab
from tests.lab.test_supervised_faults import SLOW, dsft, running, until

MARK = secrets.token_hex(16)
"""What all of them begin with."""


def canary(number: int) -> str:
    return f"{MARK}{number:08x}"  # 40 characters of hex, as a key of W&B's


CANARIES = {
    "WANDB_API_KEY": canary(1),
    "HF_TOKEN": canary(2),
    "HUGGING_FACE_HUB_TOKEN": canary(3),
    "AWS_ACCESS_KEY_ID": canary(4),
    "AWS_SECRET_ACCESS_KEY": canary(5),
    "AWS_SESSION_TOKEN": canary(6),
    "OPENAI_API_KEY": canary(7),
    "DATABASE_PASSWORD": canary(8),
    "SWANLAB_API_KEY": canary(9),
    "HTTPS_PROXY": f"http://user:{canary(10)}@127.0.0.1:9",
}


@contextmanager
def process_lists() -> Iterator[set[bytes]]:
    """Command lines that held a canary, of all processes of all hosts, looked at twenty times a second."""
    shown: set[bytes] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for entry in os.listdir("/proc"):
                try:
                    words = Path("/proc", entry, "cmdline").read_bytes() if entry.isdigit() else b""
                except OSError:
                    continue
                if MARK.encode() in words:
                    shown.add(words)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield shown
    finally:
        over.set()
        thread.join()


def holding(*folders: Path) -> list[str]:
    """Files, and names of files, that hold a canary."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    found = [str(path) for path in paths if MARK in path.name]
    return found + [
        str(path)
        for path in paths
        if path.is_file() and not path.is_symlink() and MARK.encode() in path.read_bytes()
    ]


def test_planted_secrets_are_found(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\0" + CANARIES["HTTPS_PROXY"].encode())
    (tmp_path / canary(1)).mkdir()
    assert len(holding(tmp_path)) == 2
    with process_lists() as shown:
        lab.run("node2", ["sh", "-c", "sleep 1", canary(2)])
    assert shown


@pytest.mark.long  # a run with W&B's process, a crash and a restart
def test_no_secret_is_left(lab: Lab, tmp_path: Path) -> None:
    words = ["launch", "small.yaml", "train.max_steps=60", "train.eval_every=null", "checkpoint.every=5"]
    words += ["cluster.hang_timeout=null", "wandb.mode=offline", "--restarts", "1"]
    environ = CANARIES | {"WANDB_MODE": "offline"}
    agents = set(Path("/tmp").glob("dsft-agent-*"))
    with process_lists() as shown, running(lab, tmp_path, [*dsft(SLOW), *words], env=environ) as run:
        until(lambda: run.stepping(6))
        rank = run.status()["ranks"]["1"]
        inside = Path("/proc", str(lab.outside("node2", rank["pid"])), "environ").read_bytes()
        for name in ("HF_TOKEN", "WANDB_API_KEY", "HTTPS_PROXY"):  # the ranks of the other host have them
            assert f"{name}={CANARIES[name]}".encode() in inside.split(b"\0")
        run.signal_rank(1, signal.SIGKILL)
        until(lambda: run.stepping(7, attempt=2))
        assert holding(tmp_path, lab.folder) == []
        code = run.command.wait(240)
        output = (tmp_path / "out").read_text()
        assert code == 0, output
    assert not shown
    logs = output + (tmp_path / "runs/small/logs/rank-1.log").read_text()
    assert all(
        logs.count(f"{how}: (hidden)\n") >= 2 for how in ("printed", "logged", "warned", "not by Python")
    )
    assert list((tmp_path / "runs/small").rglob("*.wandb")), "W&B has written nothing"
    left = set(Path("/tmp").glob("dsft-agent-*")) - agents
    assert holding(tmp_path, lab.folder, *left) == []
