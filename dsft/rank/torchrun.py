"""Start torchrun from one command per host: from train.py's flags or the environment, build the argument
vector of the torchrun that this process becomes (exec).

python dsft/train.py --num_nodes 2 --node_rank 0 --master_addr node1 --master_port 29500 --num_gpus 8 SPEC
NPROC_PER_NODE=8 NNODES=2 NODE_RANK=0 ADDR=node1 PORT=29500 python dsft/train.py SPEC
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dsft.errors import WorldError
from dsft.generate.scripts import PORT
from dsft.generate.torchrun import SIGNALS
from dsft.rank import openmpi, slurm
from dsft.rank.launched import counted, optional_number
from dsft.spec.hosts import is_host

SETTINGS = {
    "num_gpus": "NPROC_PER_NODE", "num_nodes": "NNODES", "node_rank": "NODE_RANK", "master_addr": "ADDR",
    "master_port": "PORT",
}  # fmt: skip
"""The flag and the variable of each setting."""


def flags() -> argparse.ArgumentParser:
    """Return the flags, as a parent of train.py's parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group(
        "one command on each host", "This process becomes torchrun for its host. NPROC_PER_NODE, NNODES, "
        "NODE_RANK, ADDR and PORT in the environment have the same effect.",
    )  # fmt: skip
    for name, kind, text in (
        ("num_nodes", int, "the number of hosts"),
        ("node_rank", int, "the number of this host, from 0"),
        ("master_addr", str, "the name or address by which all hosts reach host 0"),
        ("master_port", int, f"a free port of host 0; by default {PORT}, on one host any that is free"),
        ("num_gpus", int, "the number of processes on this host, one per GPU"),
    ):
        metavar = "N" if kind is int else "HOST"
        group.add_argument(f"--{name}", f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
    return parser


def torchrun_argv(arguments: Sequence[str], environ: Mapping[str, str], script: str) -> list[str] | None:
    """Return torchrun's argument vector; None if neither flags nor variables ask for it. arguments:
    train.py's. Flags take precedence over variables.

    Raises WorldError where the settings are incomplete, contradict each other or the launcher that started
    this process.
    """
    given, rest = flags().parse_known_args(list(arguments))
    by_flags = {name: value for name in SETTINGS if (value := getattr(given, name)) is not None}
    started = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if environ.get(name)]
    if started:
        if by_flags:
            raise WorldError(
                f"--{next(iter(by_flags))} is given after dsft/train.py, but a launcher has started this "
                f"process ({', '.join(started)} are set); give the launcher's options before dsft/train.py."
            )
        return None
    if not by_flags and not any(environ.get(name) for name in ("NPROC_PER_NODE", "NNODES", "NODE_RANK")):
        return None
    by_variables = {
        "num_gpus": optional_number(environ, "NPROC_PER_NODE"),
        "num_nodes": optional_number(environ, "NNODES"),
        "node_rank": optional_number(environ, "NODE_RANK"),
        "master_addr": environ.get("ADDR") or environ.get("MASTER_ADDR") or None,
        "master_port": optional_number(environ, "PORT", "MASTER_PORT"),
    }
    for name in ("num_gpus", "num_nodes", "node_rank"):
        flag, variable = by_flags.get(name), by_variables[name]
        if None not in (flag, variable) and flag != variable:
            raise WorldError(
                f"--{name} {flag} and {SETTINGS[name]}={variable} contradict each other; leave one out."
            )
    called = {name: f"--{name}" if by_flags else variable for name, variable in SETTINGS.items()}
    settings = {name: value for name, value in (by_variables | by_flags).items() if value is not None}
    options = _options(settings, called)
    _check_task(settings, called, environ)
    return [sys.executable, "-m", "torch.distributed.run", *options, script, *rest]


def _options(settings: Mapping[str, Any], called: Mapping[str, str]) -> list[str]:
    """Return torchrun's options for a static rendezvous. called: each setting's name in messages."""
    count, rank = settings.get("num_nodes", 1), settings.get("node_rank")
    address, port = settings.get("master_addr"), settings.get("master_port")
    needed = ["num_gpus", *(["num_nodes"] if rank is not None else [])]
    needed += ["node_rank", "master_addr"] if count > 1 else []
    absent = [called[name] for name in needed if name not in settings]
    if absent:
        raise WorldError(
            f"{called[next(name for name in SETTINGS if name in settings)]} is given but not "
            f"{' and '.join(absent)}; each host needs {called['num_gpus']}, and several hosts "
            f"{called['num_nodes']}, {called['node_rank']} and {called['master_addr']} too."
        )
    for name in ("num_gpus", "num_nodes"):
        if settings.get(name, 1) < 1:
            raise WorldError(f"{called[name]} is {settings[name]}, but it must be at least 1.")
    if rank is not None and not 0 <= rank < count:
        raise WorldError(
            f"{called['node_rank']} is {rank}, but {counted(count, 'host')} are numbered from 0; correct it."
        )
    if address is not None and not is_host(address):
        raise WorldError(
            f"{called['master_addr']} is {address!r}, which is neither a host name nor an IP address; "
            "correct it."
        )
    if port is not None and not 0 < port < 2**16:
        raise WorldError(f"{called['master_port']} is {port}, which is not a port; give one from 1 to 65535.")
    return [
        SIGNALS, "--nnodes", str(count), "--nproc_per_node", str(settings["num_gpus"]),
        *(("--standalone", "--local_addr", "127.0.0.1") if count == 1 and not port else (
            "--node_rank", str(rank or 0),
            "--master_addr", "127.0.0.1" if count == 1 else str(address),
            "--master_port", str(port or PORT),
        )),
    ]  # fmt: skip


def _check_task(settings: Mapping[str, Any], called: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Check that a process of srun or mpirun that becomes torchrun is the only one on its host."""
    around: tuple[str, str] | None = None
    if openmpi.is_process(environ):
        around = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    elif slurm.is_task(environ):
        around = ("SLURM_NTASKS", "SLURM_PROCID")
    for variable, name, default in zip(around or (), ("num_nodes", "node_rank"), (1, 0), strict=False):
        value, theirs = settings.get(name, default), optional_number(environ, variable)
        if theirs is not None and theirs != value:
            raise WorldError(
                f"{called[name]} says {value} and {variable}={theirs}, which contradict each other: each "
                "process becomes torchrun for a whole host; start one process on each host, or leave "
                f"{', '.join(called.values())} out."
            )
