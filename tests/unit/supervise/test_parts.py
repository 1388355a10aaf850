"""What each host is to run: ranks, commands, variables, addresses; messages carry arguments byte for byte."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.spec.schema import Cluster
from dsft.supervise.aside import Voice
from dsft.supervise.part import part_environment
from dsft.supervise.parts import World, address_of, forwarded, launcher_argv, orders
from dsft.supervise.wire import Inbox, Order, Outbox, order_of

WORLD = World("deepspeed", {"a": 2, "b": 1}, ("train.py", "x.yaml", "k=$(id)"), "/w", "/w/runs/x/logs", "j")


def test_orders() -> None:
    made = orders(WORLD, "10.0.0.1", 1234, {"HF_TOKEN": "hidden"})
    assert {host: order.ranks for host, order in made.items()} == {"a": (0, 1), "b": (2,)}
    assert [order.job for order in made.values()] == ["j.0", "j.1"]  # hosts may share their processes
    words = made["b"].argv
    info = next(word for word in words if word.startswith("--world_info=")).removeprefix("--world_info=")
    assert json.loads(base64.urlsafe_b64decode(info)) == {"a": [0, 1], "b": [0]}
    assert words[-3:] == WORLD.program and "--node_rank=1" in words
    assert not any("hidden" in word for order in made.values() for word in order.argv)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_torchrun(launcher: str) -> None:
    words = launcher_argv(World(launcher, WORLD.hosts, ("t",), "/", "/", "j"), 0, "h", 1)
    assert words[2:] == [
        "-m", "torch.distributed.run", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--nnodes=2", "--nproc_per_node=2", "--node_rank=0",
        "--master_addr=h", "--master_port=1", "t",
    ]  # fmt: skip


def test_what_is_forwarded() -> None:
    here = {"HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3",
            "DSFT_SSH_ARGS": "-F x", "AWS_SECRET_ACCESS_KEY": "s"}  # fmt: skip
    cluster = Cluster(hosts={"a": 1}, interface="e0", env={"NCCL_DEBUG": "WARN"})
    assert forwarded(here, cluster) == {
        "HF_TOKEN": "t", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "e0", "GLOO_SOCKET_IFNAME": "e0",
    }  # fmt: skip


def test_a_parts_environment() -> None:
    order = Order("a", "j.0", ("x",), {"HF_HOME": "/h"}, "/", "/logs", (0,))
    own = {"RANK": "3", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "HF_HOME": "/other", "PATH": "/usr/bin"}
    made = part_environment(order, own)
    assert made.pop("PATH").endswith(":/usr/bin")
    assert made == {"SLURM_JOB_ID": "7", "HF_HOME": "/h", "DSFT_JOB": "j.0", "DSFT_LOGS": "/logs"}


def test_the_address_of_rank_0() -> None:
    addresses = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "e0": ["10.0.0.1", "fe80::1%e0"]}
    assert address_of("a", addresses, "e0") == "10.0.0.1"
    assert address_of("10.0.0.1", addresses, None) == "10.0.0.1"
    assert address_of("a", {"lo": ["127.0.0.1"]}, None) == "127.0.0.1"


@given(st.lists(st.binary(max_size=40).filter(lambda word: b"\0" not in word), max_size=6))
def test_arguments_travel_byte_for_byte(words: list[bytes]) -> None:
    argv = tuple(os.fsdecode(word) for word in words)
    readable, writable = os.pipe()
    inbox, outbox = Inbox(readable), Outbox(writable)
    outbox.put(Order("h", "j", argv, {"A": "\udcff\n"}, "/", "/logs", (0, 1)).message())
    outbox.close()
    (message,) = inbox.read()
    os.close(readable)
    assert isinstance(message, dict)
    order = order_of(message)
    assert tuple(os.fsencode(word) for word in order.argv) == tuple(words)
    assert order.environ == {"A": "\udcff\n"} and order.ranks == (0, 1)


def test_a_message_behind_one_that_ends_the_reading_is_read_by_the_next(tmp_path: Path) -> None:
    """An agent gets its order and, in the same bytes, that it is to stop."""
    path = tmp_path / "said"
    path.write_bytes(b'{"order": 1}\n{"signal": 15}\n{"end"')
    with path.open("rb") as file:
        inbox = Inbox(file.fileno())
        assert next(inbox.read()) == {"order": 1}
        assert next(inbox.read()) == {"signal": 15}


def test_lines_that_are_no_messages(tmp_path: Path) -> None:
    path = tmp_path / "said"
    path.write_bytes(b'Welcome to a!\r\n{"end": 0}\n[1]\nhalf')
    with path.open("rb") as file:
        inbox = Inbox(file.fileno())
        assert list(inbox.read()) == ["Welcome to a!", {"end": 0}, "[1]", "half"]
        assert inbox.ended


def test_what_ranks_print_cannot_steer_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "launch.log").open("a") as log:
        voice = Voice(log)
        voice("error: \x1b]0;x\x07 \x1b[2J \x1b[31mred\x1b[0m")
        voice("10%\r50%\r100%\r")
        voice.close()
    shown = "error: \\x1b]0;x\\x07 \\x1b[2J \x1b[31mred\x1b[0m\n100%\n"
    assert capfd.readouterr().out == (tmp_path / "launch.log").read_text() == shown
