"""Read Slurm's variables: the place in the world of a task of `srun`. Calls no Slurm program: the environment
contains all that is needed (srun(1), "OUTPUT ENVIRONMENT VARIABLES").

A task has SLURM_STEP_ID. The script that sbatch runs and salloc's shell have SLURM_NTASKS, and even
SLURM_PROCID=0, but are not tasks: a run started in them without srun would be a single process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsft.errors import WorldError
from dsft.rank.launched import (
    Launched,
    check_complete,
    check_ranks,
    master_port,
    optional_number,
    port_of_job,
    whole_number,
)
from dsft.spec.hosts import expand

TASK = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


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
    slots = tasks_per_node(environ)
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
    told_by = [*TASK, "MASTER_ADDR" if environ.get("MASTER_ADDR") else _nodelist(environ)[0]]
    address = environ.get("MASTER_ADDR") or first_host(environ)
    port = master_port(environ)
    if port is None:
        check_complete(environ, ("SLURM_JOB_ID",), "srun")
        job, step = whole_number(environ, "SLURM_JOB_ID"), optional_number(environ, "SLURM_STEP_ID") or 0
        port = port_of_job(31 * job + step)
    return Launched("srun", rank, world_size, local_rank, address, port, local, hosts, slots, tuple(told_by))


def tasks_per_node(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Parse SLURM_STEP_TASKS_PER_NODE, such as `2(x3),1`; None if it is not set or has another format."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


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
