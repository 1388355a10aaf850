"""Start torchrun from one command per host: from train.py's flags or the environment, build the argument
vector of the torchrun that this process becomes (exec).

python dsft/train.py --num_nodes 2 --node_rank 0 --master_addr node1 --master_port 29500 --num_gpus 8 SPEC
NPROC_PER_NODE=8 NNODES=2 NODE_RANK=0 ADDR=node1 PORT=29500 python dsft/train.py SPEC
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsft.errors import WorldError
from dsft.generate.scripts import PORT
from dsft.generate.torchrun import SIGNALS
from dsft.rank import openmpi, slurm
from dsft.rank.launched import counted, optional_number
from dsft.spec.hosts import is_host


@dataclass(frozen=True)
class _Settings:
    """The settings from one of the two styles; None: not set. names: the five settings' names in that
    style."""

    processes: int | None
    hosts: int | None
    host_rank: int | None
    address: str | None
    port: int | None
    names: tuple[str, str, str, str, str]


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
    train.py's.

    Raises WorldError where the settings are incomplete, contradict each other or the launcher that started
    this process.
    """
    given, rest = flags().parse_known_args(list(arguments))
    by_flags = _Settings(
        given.num_gpus, given.num_nodes, given.node_rank, given.master_addr, given.master_port,
        ("--num_gpus", "--num_nodes", "--node_rank", "--master_addr", "--master_port"),
    )  # fmt: skip
    has_flags = any(value is not None for value in vars(given).values())
    started = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if environ.get(name)]
    if started:
        if has_flags:
            raise WorldError(
                f"{_first(by_flags)} is given after dsft/train.py, but a launcher has started this process "
                f"({', '.join(started)} are set); give the launcher's options before dsft/train.py."
            )
        return None
    if not has_flags and not any(environ.get(name) for name in ("NPROC_PER_NODE", "NNODES", "NODE_RANK")):
        return None
    chosen = _by_variables(environ)
    if has_flags:
        _check_same(by_flags, chosen)
        chosen = _filled(by_flags, chosen)
    options = _options(chosen)
    _check_task(chosen, environ)
    return [sys.executable, "-m", "torch.distributed.run", *options, script, *rest]


def _by_variables(environ: Mapping[str, str]) -> _Settings:
    """Read the variables: ADDR and PORT as users of XTuner set them, else MASTER_ADDR and MASTER_PORT."""
    for one, other in (("ADDR", "MASTER_ADDR"), ("PORT", "MASTER_PORT")):
        if environ.get(one) and environ.get(other) and environ[one] != environ[other]:
            raise WorldError(
                f"{one}={environ[one]} and {other}={environ[other]} contradict each other; unset one of them."
            )
    return _Settings(
        optional_number(environ, "NPROC_PER_NODE"),
        optional_number(environ, "NNODES"),
        optional_number(environ, "NODE_RANK"),
        environ.get("ADDR") or environ.get("MASTER_ADDR") or None,
        optional_number(environ, "PORT", "MASTER_PORT"),
        ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "ADDR", "PORT"),
    )


def _check_same(one: _Settings, other: _Settings) -> None:
    """Check that settings given in both styles are equal; for address and port the flags take precedence."""
    numbers = zip(_values(one)[:3], _values(other)[:3], one.names[:3], other.names[:3], strict=True)
    for left, right, name, variable in numbers:
        if left is not None and right is not None and left != right:
            raise WorldError(f"{name} {left} and {variable}={right} contradict each other; leave one out.")


def _filled(one: _Settings, other: _Settings) -> _Settings:
    """Return `one` with its unset fields taken from `other`."""
    names = ("processes", "hosts", "host_rank", "address", "port")
    return replace(one, **{name: getattr(other, name) for name in names if getattr(one, name) is None})


def _values(chosen: _Settings) -> tuple[Any, ...]:
    return chosen.processes, chosen.hosts, chosen.host_rank, chosen.address, chosen.port


def _options(chosen: _Settings) -> list[str]:
    """Return torchrun's options for a static rendezvous."""
    processes, hosts, rank, address, port = chosen.names
    if chosen.processes is None or (chosen.hosts is None and chosen.host_rank is not None):
        missing = processes if chosen.processes is None else hosts
        raise WorldError(
            f"{_first(chosen)} is given but not {missing}; each host needs {processes}, and several hosts "
            f"{hosts}, {rank} and {address} too."
        )
    count = chosen.hosts or 1
    for name, value in ((processes, chosen.processes), (hosts, chosen.hosts)):
        if value is not None and value < 1:
            raise WorldError(f"{name} is {value}, but it must be at least 1.")
    if count > 1 and (chosen.host_rank is None or chosen.address is None):
        absent = [
            name for name, value in ((rank, chosen.host_rank), (address, chosen.address)) if value is None
        ]
        raise WorldError(
            f"{hosts} is {count} but {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing; "
            "each host needs its own number and the name of host 0."
        )
    if chosen.host_rank is not None and not 0 <= chosen.host_rank < count:
        raise WorldError(
            f"{rank} is {chosen.host_rank}, but {counted(count, 'host')} are numbered from 0; correct it."
        )
    if chosen.address is not None and not is_host(chosen.address):
        raise WorldError(
            f"{address} is {chosen.address!r}, which is neither a host name nor an IP address; correct it."
        )
    if chosen.port is not None and not 0 < chosen.port < 2**16:
        raise WorldError(f"{port} is {chosen.port}, which is not a port; give one from 1 to 65535.")
    alone = count == 1
    return [
        SIGNALS, "--nnodes", str(count), "--nproc_per_node", str(chosen.processes),
        *(("--standalone", "--local_addr", "127.0.0.1") if alone and not chosen.port else (
            "--node_rank", str(chosen.host_rank or 0),
            "--master_addr", "127.0.0.1" if alone else str(chosen.address),
            "--master_port", str(chosen.port or PORT),
        )),
    ]  # fmt: skip


def _check_task(chosen: _Settings, environ: Mapping[str, str]) -> None:
    """Check that a process of srun or mpirun that becomes torchrun is the only one on its host."""
    around: tuple[str, str] | None = None
    if openmpi.is_process(environ):
        around = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    elif slurm.is_task(environ):
        around = ("SLURM_NTASKS", "SLURM_PROCID")
    if around is None:
        return
    for name, ours, value in zip(
        around, chosen.names[1:3], (chosen.hosts or 1, chosen.host_rank or 0), strict=True
    ):
        theirs = optional_number(environ, name)
        if theirs is not None and theirs != value:
            raise WorldError(
                f"{ours} says {value} and {name}={theirs}, which contradict each other: each process becomes "
                "torchrun for a whole host; start one process on each host, or leave "
                f"{', '.join(chosen.names)} out."
            )


def _first(chosen: _Settings) -> str:
    return next(name for name, value in zip(chosen.names, _values(chosen), strict=True) if value is not None)
