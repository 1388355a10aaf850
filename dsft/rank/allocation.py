"""Read the hosts of a Slurm allocation from the variables that Slurm sets in it. Asks no daemon, starts
nothing.

Format of the variables: https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsft.errors import Problem, SpecError, WorldError
from dsft.spec.document import quote
from dsft.spec.hosts import duplicates, expand

NODES = "SLURM_JOB_NODELIST"
_GPUS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
_TASKS = "SLURM_TASKS_PER_NODE"
_EACH = "SLURM_NTASKS_PER_NODE"
_TIMES = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")


@dataclass(frozen=True)
class Allocation:
    """The hosts of a Slurm job.

    hosts   host -> slots, in Slurm's order
    source  where the slots come from: `--slots N`, or `NAME=value` of a variable
    """

    hosts: Mapping[str, int]
    source: str


def allocation(environ: Mapping[str, str], slots: int | None = None) -> Allocation:
    """Return the hosts of this Slurm job. slots: slots per host; None: the GPUs of a node, else its tasks.

    Raises WorldError outside a job and where Slurm sets no number of slots; SpecError where a variable has
    another format than Slurm's.
    """
    nodes = environ.get(NODES)
    if not nodes:
        raise WorldError(
            f"{NODES} is not set, so this is not a Slurm job; run this inside one (salloc, sbatch), or give "
            "the hosts as node[01-16]:8."
        )
    try:
        names = expand(nodes)
    except ValueError as error:
        raise _wrong(NODES, str(error)) from None
    again = next(duplicates(names), None)
    if again is not None:
        raise _wrong(NODES, f"{again} is in {quote(nodes)} more than once; name each host once")
    if slots is not None:
        return Allocation(dict.fromkeys(names, slots), f"--slots {slots}")
    for name in _GPUS:
        gpus = _gpus(name, environ.get(name, ""))
        if gpus:
            return Allocation(dict.fromkeys(names, gpus), f"{name}={environ[name]}")
    return _of_tasks(names, environ)


def _of_tasks(names: list[str], environ: Mapping[str, str]) -> Allocation:
    name = next((name for name in (_TASKS, _EACH) if environ.get(name)), None)
    if name is None:
        raise WorldError(
            f"Slurm sets neither the GPUs ({_GPUS[1]}) nor the tasks ({_TASKS}) of a node; give --slots N, "
            "the number of processes on each host."
        )
    counts = _counts(name, environ[name])
    if name == _EACH and len(counts) == 1:
        counts *= len(names)
    if len(counts) != len(names):
        message = (
            f"{quote(environ[name])} is for {len(counts)} hosts, {NODES} has {len(names)}; give --slots N"
        )
        raise _wrong(name, message)
    return Allocation(dict(zip(names, counts, strict=True)), f"{name}={environ[name]}")


def _gpus(name: str, value: str) -> int:
    """Return the number of GPUs in `8`, `a100:8` or `a100:4,h100:4`; 0 for an empty value."""
    total = 0
    for part in value.split(",") if value else ():
        number = part.rpartition(":")[2]
        if not re.fullmatch(r"[0-9]{1,6}", number):
            raise _wrong(name, f"{quote(value)} is not a number of GPUs; give --slots N")
        total += int(number)
    return total


def _counts(name: str, value: str) -> list[int]:
    """Expand `2(x3),1` to [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in value.split(","):
        match = _TIMES.fullmatch(part)
        if match is None or int(match[1]) == 0 or int(match[2] or 1) > 10_000:
            raise _wrong(
                name, f"{quote(value)} is not a list of tasks per host such as 2(x3),1; give --slots N"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _wrong(name: str, message: str) -> SpecError:
    return SpecError("The allocation cannot be read.", [Problem(name, message)])
