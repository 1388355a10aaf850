"""Takes what was promised (the spec's cluster, the hostfile on the launcher's command line) and what
came (`Launched`), and stops a run in its first second where they differ. Reads parents' command lines.

DeepSpeed only warns of a hostfile that does not exist and then trains on this machine alone
(deepspeed/launcher/runner.py, fetch_hostfile), and forgets the file's name before it starts the ranks;
so the launcher's command line is looked up among the parents of this process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from dsft.errors import WorldError
from dsft.launch.environment import Launched
from dsft.plan.hostfile import parse


def check_promise(hosts: Mapping[str, int] | None, launched: Launched) -> str | None:
    """The text of the launcher's hostfile, None without one. Raises WorldError where the world's size is not
    that of the spec's hosts or of the hostfile."""
    hostfile = _check_hostfile(launched)
    if hosts is None or sum(hosts.values()) == launched.world_size:
        return hostfile
    expected = sum(hosts.values())
    promise = " + ".join(f"{host} {slots}" for host, slots in hosts.items())
    if launched.world_size == 1 and launched.launcher == "python":
        cause = "plain python starts one; use deepspeed --hostfile or torchrun"
    elif hostfile is None and launched.launcher == "deepspeed":
        cause = "its --hostfile was left out, or names other hosts or slots"
    else:
        cause = "give the launcher the same hosts and slots, or change cluster.hosts"
    raise WorldError(
        f"cluster.hosts promises {expected} processes ({promise}) but {launched.launcher} started "
        f"{launched.world_size}: {cause}."
    )


def _check_hostfile(launched: Launched) -> str | None:
    for arguments, folder in _deepspeed_commands():
        if arguments.hostfile is None:
            continue
        path = Path(folder, arguments.hostfile)
        if not path.is_file():
            raise WorldError(
                f"--hostfile {arguments.hostfile} does not exist (looked in {folder}), and deepspeed would "
                f"train on this machine alone with {launched.world_size} process(es); give one that exists, "
                "or leave --hostfile out."
            )
        text = path.read_text(encoding="utf-8")
        expected = _promised(parse(text, str(arguments.hostfile)), arguments)
        if expected != launched.world_size:
            raise WorldError(
                f"--hostfile {arguments.hostfile} promises {expected} processes but {launched.world_size} "
                "were started; check its slots and the launcher's --include, --exclude, --num_nodes and "
                "--num_gpus."
            )
        return text
    return None


def _deepspeed_commands() -> Iterator[tuple[argparse.Namespace, str]]:
    """The parsed command and working folder of each `deepspeed` launcher above this process."""
    for parent in psutil.Process().parents():
        try:
            command, folder = parent.cmdline(), parent.cwd()
        except psutil.Error:  # another user's process, or one that has just ended
            continue
        arguments = deepspeed_arguments(command)
        if arguments is not None:
            yield arguments, folder


def deepspeed_arguments(command: Sequence[str]) -> argparse.Namespace | None:
    """The launcher's own options in a command line such as `python …/deepspeed --hostfile F train.py …`,
    None where the command is not the `deepspeed` launcher."""
    words = [Path(word).name == "deepspeed" or word == "deepspeed.launcher.runner" for word in command[:4]]
    if not any(words):
        return None
    # Options that take a value, from deepspeed/launcher/runner.py; the others are flags, and the first
    # word that is neither is the script, behind which options are the script's.
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("-H", "--hostfile")
    parser.add_argument("-i", "--include", default="")
    parser.add_argument("-e", "--exclude", default="")
    parser.add_argument("--num_nodes", type=int, default=-1)
    parser.add_argument("--num_gpus", "--num_accelerators", type=int, default=-1)
    for option in VALUED:
        parser.add_argument(option)
    for option in FLAGS:
        parser.add_argument(option, action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    try:
        return parser.parse_known_args(list(command[words.index(True) + 1 :]))[0]
    except argparse.ArgumentError:  # deepspeed itself has refused or will refuse this command
        return None


VALUED = (
    "--master_port", "--master_addr", "--node_rank", "--launcher", "--launcher_args", "--autotuning",
    "--enable_each_rank_log", "--bind_core_list", "--ssh_port", "--venv_script", "--log_level",
)  # fmt: skip
FLAGS = (
    "--module", "--no_python", "--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid",
    "--bind_cores_to_rank",
)  # fmt: skip


def _promised(hosts: Mapping[str, int], arguments: argparse.Namespace) -> int:
    """How many processes the launcher starts for these hosts: include or exclude (`host:0,2@host2`), else
    the first num_nodes hosts with num_gpus slots each."""
    slots = {host: set(range(count)) for host, count in hosts.items()}
    if arguments.include or arguments.exclude:
        named: dict[str, set[int]] = {}
        for part in (arguments.include or arguments.exclude).split("@"):
            host, _, numbers = part.partition(":")
            chosen = {int(number) for number in numbers.split(",")} if numbers else slots.get(host, set())
            named.setdefault(host, set()).update(chosen)
        if arguments.include:
            slots = {host: named[host] for host in slots if host in named}
        else:
            slots = {host: every - named.get(host, set()) for host, every in slots.items()}
        return sum(map(len, slots.values()))
    counts = list(hosts.values())[: arguments.num_nodes if arguments.num_nodes > 0 else None]
    return sum(arguments.num_gpus if arguments.num_gpus > 0 else count for count in counts)
