"""What each host runs: ranks, commands, variables, addresses; what is printed cannot steer a terminal."""

from __future__ import annotations

import base64
import json
import os
import pty
import sys
from pathlib import Path

import pytest

from dsft.launcher.launch_plan import LaunchPlan, address_of
from dsft.launcher.output import LineWriter, _to

PLAN = LaunchPlan("dsft", {"a": 2, "b": 1}, ("train.py", "x.yaml", "k=$(id)"), "/w", "/w/runs/x/logs", "j")


def plan(launcher: str) -> LaunchPlan:
    return LaunchPlan(launcher, PLAN.hosts, PLAN.program, PLAN.folder, PLAN.logs, PLAN.job)


@pytest.mark.parametrize("launcher", ["dsft", "slurm"])
def test_an_order_of_ranks(launcher: str) -> None:
    made = [plan(launcher).command_of(host, "10.0.0.1", 1234) for host in PLAN.hosts]
    assert [(command.ranks, command.starts_ranks) for command in made] == [((0, 1), False), ((2,), False)]
    assert [command.job for command in made] == ["j.0", "j.1"]  # hosts may share their processes
    assert made[1].argv == (sys.executable, "-u", *PLAN.program)
    assert made[0].environ == {
        "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }  # fmt: skip


def test_an_order_of_deepspeeds_launcher() -> None:
    command = plan("deepspeed").command_of("b", "10.0.0.1", 1234)
    info = next(word for word in command.argv if word.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(info.partition("=")[2])) == {"a": [0, 1], "b": [0]}
    assert command.argv[-3:] == PLAN.program and "--node_rank=1" in command.argv
    assert command.starts_ranks and command.environ == {}


def test_an_order_of_torchrun() -> None:
    command = plan("torchrun").command_of("a", "h", 1)
    assert command.argv[2:] == (
        "-m", "torch.distributed.run", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--nnodes=2", "--nproc_per_node=2", "--node_rank=0",
        "--master_addr=h", "--master_port=1", *PLAN.program,
    )  # fmt: skip
    assert command.starts_ranks


def test_the_address_of_rank_0() -> None:
    addresses = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "e0": ["10.0.0.1", "fe80::1%e0"]}
    assert address_of("a", addresses, "e0") == "10.0.0.1"
    assert address_of("10.0.0.1", addresses, None) == "10.0.0.1"
    assert address_of("a", {"lo": ["127.0.0.1"]}, None) == "127.0.0.1"


def test_what_ranks_print_cannot_steer_the_terminal_and_shows_no_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "launch.log").open("a") as log:
        voice = LineWriter(log, {"HF_TOKEN": "canary-token"})
        voice("error: \x1b]0;x\x07 \x1b[2J \x1b[31mred\x1b[0m")
        voice("10%\r50%\r100%\r")
        voice("ssh: canary-token")
        voice.close()
    shown = "error: \\x1b]0;x\\x07 \\x1b[2J \x1b[31mred\x1b[0m\n100%\nssh: (hidden)\n"
    assert capfd.readouterr().out == (tmp_path / "launch.log").read_text() == shown


def test_the_steps_share_one_line_of_a_terminal() -> None:
    master, slave = pty.openpty()
    write = _to(slave)
    for line in (
        "begin",
        *(f"step {n}/4  loss 1.0  0:00:01 left" for n in (1, 2)),
        "saved",
        "step 4/4  loss 1",
    ):
        write(line)
    shown = ""
    while "4/4" not in shown or not shown.endswith("\n"):  # what is written arrives in parts
        shown += os.read(master, 2000).decode().replace("\r\n", "\n")
    clear = "\r\x1b[K"
    bars = ["━" * n + "─" * (20 - n) + f"  step {n // 5}/4  loss 1.0  0:00:01 left" for n in (5, 10)]
    assert shown == f"begin\n{bars[0]}{clear}{bars[1]}{clear}saved\nstep 4/4  loss 1\n"
    os.close(master)
    os.close(slave)
