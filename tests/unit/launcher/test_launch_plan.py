"""What each host runs: ranks, commands, variables, addresses; what is printed cannot steer a terminal."""

import os
import pty
import sys
from pathlib import Path

import pytest

from dsft.launcher.launch_plan import LaunchPlan, address_of
from dsft.launcher.output import LineWriter, _to

PLAN = LaunchPlan("ssh", {"a": 2, "b": 1}, ("train.py", "x.yaml", "k=$(id)"), "/w", "/w/runs/x/logs", "j")


def test_commands_of_hosts() -> None:
    made = [PLAN.command_of(host, "10.0.0.1", 1234) for host in PLAN.hosts]
    assert [command.ranks for command in made] == [(0, 1), (2,)]
    assert [command.job for command in made] == ["j.0", "j.1"]  # hosts may share their processes
    assert made[1].argv == (sys.executable, "-u", *PLAN.program)
    assert made[0].environ == {
        "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }  # fmt: skip


def test_address_of_rank_0() -> None:
    addresses = {"lo": ["127.0.0.1", "::1"], "docker0": ["172.17.0.1"], "e0": ["10.0.0.1", "fe80::1%e0"]}
    assert address_of("a", addresses, "e0") == "10.0.0.1"
    assert address_of("10.0.0.1", addresses, None) == "10.0.0.1"
    assert address_of("a", {"lo": ["127.0.0.1"]}, None) == "127.0.0.1"


def test_lines_are_escaped_and_redacted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "launch.log").open("a") as log:
        writer = LineWriter(log, {"HF_TOKEN": "canary-token"})
        writer("error: \x1b]0;x\x07 \x1b[2J \x1b[31mred\x1b[0m")
        writer("10%\r50%\r100%\r")
        writer("ssh: canary-token")
        writer.close()
    shown = "error: \\x1b]0;x\\x07 \\x1b[2J \x1b[31mred\x1b[0m\n100%\nssh: (hidden)\n"
    assert capfd.readouterr().out == (tmp_path / "launch.log").read_text() == shown


def test_steps_share_one_line_of_a_terminal() -> None:
    master, slave = pty.openpty()
    write = _to(slave)
    for line in (
        "begin", *(f"step {n}/4  loss 1.0  0:00:01 left" for n in (1, 2)), "saved", "step 4/4  loss 1",
    ):  # fmt: skip
        write(line)
    shown = ""
    while "4/4" not in shown or not shown.endswith("\n"):  # what is written arrives in parts
        shown += os.read(master, 2000).decode().replace("\r\n", "\n")
    clear = "\r\x1b[K"
    bars = ["━" * n + "─" * (20 - n) + f"  step {n // 5}/4  loss 1.0  0:00:01 left" for n in (5, 10)]
    assert shown == f"begin\n{bars[0]}{clear}{bars[1]}{clear}saved\nstep 4/4  loss 1\n"
    os.close(master)
    os.close(slave)
