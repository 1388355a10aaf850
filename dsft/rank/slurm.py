"""Read Slurm's variables: the hosts of a job (`allocation`), and the rank of a task of `srun` (`task_of`).
Calls no Slurm program: the environment contains all that is needed
(https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES).

A task has SLURM_STEP_ID. The script that sbatch runs and salloc's shell have SLURM_NTASKS, and even
SLURM_PROCID=0, but are not tasks: a run started in them without srun would be a single process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsft.errors import Problem, SpecError, WorldError
from dsft.rank.launched import (
    Launched,
    check_complete,
    check_ranks,
    master_port,
    optional_number,
    port_of_job,
    whole_number,
)
from dsft.spec.document import quote
from dsft.spec.hosts import duplicates, expand

TASK = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
NODES = "SLURM_JOB_NODELIST"
_GPUS = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
_TASKS = "SLURM_TASKS_PER_NODE"
_EACH = "SLURM_NTASKS_PER_NODE"
_TIMES = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")

_NO_STEP = 0xFFFF_FFFA
"""First of the step numbers reserved for scripts and shells, which are not srun's tasks (slurm.h:
SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, …)."""


def is_task(environ: Mapping[str, str]) -> bool:
    step = optional_number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step < _NO_STEP


def task_of(environ: Mapping[str, str]) -> Launched:
    """Return the place of this task. MASTER_ADDR and MASTER_PORT, if set, override the address and port
    derived from SLURM_STEP_NODELIST and the job's number.

    Raises WorldError where variables are missing or contradict each other.
    """
    check_complete(environ, TASK, "srun")
    check_ranks(environ, *TASK)
    rank, world_size, local_rank = (whole_number(environ, name) for name in TASK)
    counts = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    slots = None if counts is None else tuple(counts)
    hosts = optional_number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    local = None
    if slots is not None:
        if sum(slots) != world_size or hosts not in (None, len(slots)):
            raise WorldError(
                f"SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE']} and "
                f"SLURM_NTASKS={world_size} on {hosts} nodes contradict each other; unset what is not "
                "srun's own."
            )
        hosts = len(slots)
        node = optional_number(environ, "SLURM_NODEID")
        local = slots[node] if node is not None and 0 <= node < len(slots) else None
    variables = [*TASK, "MASTER_ADDR" if environ.get("MASTER_ADDR") else _nodelist(environ)[0]]
    address = environ.get("MASTER_ADDR") or first_host(environ)
    port = master_port(environ)
    if port is None:
        check_complete(environ, ("SLURM_JOB_ID",), "srun")
        job, step = whole_number(environ, "SLURM_JOB_ID"), optional_number(environ, "SLURM_STEP_ID") or 0
        port = port_of_job(31 * job + step)
    return Launched(
        "srun", rank, world_size, local_rank, address, port, local, hosts, slots, tuple(variables)
    )


def _counts(text: str) -> list[int] | None:
    """Expand `2(x3),1` to [2, 2, 2, 1]; None if the text has another format."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TIMES.fullmatch(part)
        if match is None or int(match[1]) == 0 or int(match[2] or 1) > 10_000:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(environ: Mapping[str, str]) -> str:
    """Return the first host of SLURM_STEP_NODELIST, where rank 0 runs."""
    name, text = _nodelist(environ)
    if not text:
        raise WorldError(
            "srun's SLURM_STEP_NODELIST and SLURM_NODELIST are not set, so the address of rank 0 is "
            "unknown; set MASTER_ADDR to the first host's name."
        )
    try:
        return expand(re.split(r",(?![^\[]*\])", text)[0])[0]  # up to the first comma outside brackets
    except ValueError as error:
        message = f"{name}={text!r} is not a list of hosts; set MASTER_ADDR to the first host's name."
        raise WorldError(message) from error


def _nodelist(environ: Mapping[str, str]) -> tuple[str, str]:
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    return next(((name, environ[name]) for name in names if environ.get(name)), (names[0], ""))


def refuse_without_srun(environ: Mapping[str, str]) -> None:
    """Raise WorldError in an allocation of several tasks or nodes outside any task: a single process would
    train."""
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environ.get(name, "1") not in ("", "1"):
            raise WorldError(
                f"{name}={environ[name]} says that this Slurm job has more than one process, but srun has "
                "not started this one, which would train alone; put srun before the command."
            )


@dataclass(frozen=True)
class Allocation:
    """The hosts of a Slurm job.

    hosts   host -> slots, in Slurm's order
    source  where the slots come from: `--processes N`, or `NAME=value` of a variable
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
        return Allocation(dict.fromkeys(names, slots), f"--processes {slots}")
    for name in _GPUS:
        gpus = _gpus(name, environ.get(name, ""))
        if gpus:
            return Allocation(dict.fromkeys(names, gpus), f"{name}={environ[name]}")
    return _of_tasks(names, environ)


def _of_tasks(names: list[str], environ: Mapping[str, str]) -> Allocation:
    name = next((name for name in (_TASKS, _EACH) if environ.get(name)), None)
    if name is None:
        raise WorldError(
            f"Slurm sets neither the GPUs ({_GPUS[1]}) nor the tasks ({_TASKS}) of a node; give --processes "
            "N, the number of processes on each host."
        )
    counts = _counts(environ[name])
    if counts is None:
        raise _wrong(
            name,
            f"{quote(environ[name])} is not a list of tasks per host such as 2(x3),1; give --processes N",
        )
    if name == _EACH and len(counts) == 1:
        counts *= len(names)
    if len(counts) != len(names):
        message = (
            f"{quote(environ[name])} is for {len(counts)} hosts, {NODES} has {len(names)}; give --processes N"
        )
        raise _wrong(name, message)
    return Allocation(dict(zip(names, counts, strict=True)), f"{name}={environ[name]}")


def _gpus(name: str, value: str) -> int:
    """Return the number of GPUs in `8`, `a100:8` or `a100:4,h100:4`; 0 for an empty value."""
    total = 0
    for part in value.split(",") if value else ():
        number = part.rpartition(":")[2]
        if not re.fullmatch(r"[0-9]{1,6}", number):
            raise _wrong(name, f"{quote(value)} is not a number of GPUs; give --processes N")
        total += int(number)
    return total


def _wrong(name: str, message: str) -> SpecError:
    return SpecError("The allocation cannot be read.", [Problem(name, message)])
