"""Programs on other hosts: ssh gets host names alone; messages go both ways, and nothing outlives them."""

import asyncio
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsft.errors import WorldError
from dsft.remote import ROOT, Channel, NoAnswer, forwarded, is_this_machine, module_command
from dsft.spec.schema import Cluster
from tests.launching import LATE, allowed

PROGRAM = """
import asyncio, os, sys
from dsft.remote import own_connection

async def main():
    connection = await own_connection()
    print("printed by the module")
    while (message := await connection.receive()) is not None:
        if "to" in message:
            for number in range(message["to"]):
                connection.send({"number": number})
        elif "echo" in message:
            connection.send(message)
        else:
            connection.send({"environ": dict(os.environ), "path": sys.path, "pid": os.getpid()})

print('{"a": "banner"} and half a line', end="", flush=True)
asyncio.run(main())
"""
MODULE = [sys.executable, "-c", PROGRAM]


def wait_gone(pid: int) -> bool:
    until = time.monotonic() + allowed(5)
    while psutil.pid_exists(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_this_machine_by_name_and_address() -> None:
    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        assert is_this_machine(host)
        assert module_command(host, "dsft.cli") == [sys.executable, "-m", "dsft.cli"]
    assert not is_this_machine("192.0.2.1")  # RFC 5737: nobody's
    assert not is_this_machine("no-such-host.invalid")


def test_ssh_command_of_another_machine() -> None:
    argv = module_command("192.0.2.1", "dsft.cli", environ={"DSFT_SSH_ARGS": "-F 'my config' -p 22"})
    assert argv[0] == "ssh" and argv[-3:-1] == ["--", "192.0.2.1"]
    assert argv[-7:-3] == ["-F", "my config", "-p", "22"]
    assert shlex.split(argv[-1]) == ["cd", str(ROOT), "&&", "exec", sys.executable, "-m", "dsft.cli"]
    assert "BatchMode=yes" in argv
    argv = module_command("192.0.2.1", "dsft.cli", environ={"PDSH_SSH_ARGS_APPEND": "-p 9"})
    assert argv[-5:-3] == ["-p", "9"]


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a;id", "$(id)", "a b", "", "a\nb", "user@node1"])
def test_invalid_host_name_is_refused(host: str) -> None:
    with pytest.raises(WorldError, match="neither a host name"):
        module_command(host, "dsft.cli")


def test_invalid_ssh_options_are_refused() -> None:
    for name in ("DSFT_SSH_ARGS", "PDSH_SSH_ARGS_APPEND"):
        with pytest.raises(WorldError, match=f"{name}=.* is not a list of options"):
            module_command("192.0.2.1", "dsft.cli", environ={name: "-o 'x"})


def test_module_has_the_environment_and_ends_with_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    given = {"WANDB_API_KEY": "a\nsecret $(id)", "PYTHONPATH": f"{tmp_path}:{ROOT}"}

    async def talk() -> tuple[dict[str, Any], list[str]]:
        async with await Channel.open(MODULE, given) as channel:
            found = await channel.ask({}, LATE)
            assert psutil.pid_exists(channel.pid)
            while not channel.errors:
                assert channel.code is None
                await asyncio.sleep(0.01)
        return found, [*channel.other_output, *channel.errors]

    found, output_lines = asyncio.run(talk())
    assert found["environ"]["WANDB_API_KEY"] == given["WANDB_API_KEY"]
    assert str(tmp_path) in found["path"]
    assert not {"RANK", "SLURM_PROCID"} & set(found["environ"]) and found["environ"]["SLURM_JOB_ID"] == "7"
    assert found["environ"]["PATH"].startswith(f"{Path(sys.executable).parent}{os.pathsep}")
    assert output_lines == ['{"a": "banner"} and half a line', "printed by the module"]
    assert wait_gone(found["pid"])


def test_messages_of_any_size_go_both_ways_in_order() -> None:
    async def talk() -> None:
        async with await Channel.open(MODULE, {}) as channel:
            channel.send({"to": 5000})
            assert [await channel.receive() for _ in range(5000)] == [{"number": n} for n in range(5000)]
            large = {"echo": "ü\n" * 500_000}
            assert await channel.ask(large, LATE) == large

    asyncio.run(talk())


def test_reason_of_no_answer() -> None:
    async def why(argv: list[str], seconds: float = 20) -> NoAnswer:
        with pytest.raises(NoAnswer) as caught:
            async with await Channel.open(argv, {}) as channel:
                await channel.ask({"do": "sleep"}, seconds)
                await channel.ask({"do": "sleep"}, seconds)
        return caught.value

    absent = asyncio.run(why(["/no/such/ssh"]))
    assert (str(absent), absent.code) == ("/no/such/ssh: No such file or directory", 127)
    failing = asyncio.run(why(["sh", "-c", "echo first; echo Permission denied >&2; exit 255"]))
    assert (str(failing), failing.code) == ("Permission denied", 255)
    assert set(failing.output.splitlines()) == {"first", "Permission denied"}
    assert str(asyncio.run(why(["true"]))) == "exit code 0"
    deaf = asyncio.run(why(["sleep", "60"], 0.2))
    assert (str(deaf), deaf.code) == ("no answer within 0.2 s", None)


def test_messages_to_a_stuck_host_are_dropped() -> None:
    async def talk() -> None:
        async with await Channel.open(["sleep", "60"], {}) as channel:
            began = time.monotonic()
            for _ in range(20_000):
                channel.send({"text": "x" * 1000}, may_drop=True)
            assert time.monotonic() - began < allowed(5)
            assert channel._writer.transport.get_write_buffer_size() < 2 * 2**20

    asyncio.run(talk())


def test_forwarded_variables() -> None:
    environ = {
        "HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/x", "MLFLOW_URI": "u", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0", "DSFT_SSH_ARGS": "-p 1", "HOME": "/root", "PATH": "/bin", "CCX": "no",
    }  # fmt: skip
    assert set(forwarded(environ, None)) == {
        "HF_TOKEN", "NCCL_DEBUG", "PYTHONPATH", "MLFLOW_URI", "OMP_NUM_THREADS",
    }  # fmt: skip
    cluster = Cluster(hosts={"a": 1}, interface="e0", env={"NCCL_DEBUG": "WARN", "AWS_REGION": "x"})
    assert forwarded({"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "s"}, cluster) == {
        "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "e0", "GLOO_SOCKET_IFNAME": "e0", "AWS_REGION": "x",
    }  # fmt: skip


def test_srun_command() -> None:
    argv = module_command("node1", "dsft.cli", "srun")
    assert argv[:2] == ["srun", "--nodelist=node1"] and argv[-4:] == ["--", sys.executable, "-m", "dsft.cli"]
    assert f"--chdir={ROOT}" in argv and "--overlap" in argv
