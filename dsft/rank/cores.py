"""Bind each rank to its share of the host's cores where the optimizer steps in host memory. Reads /sys and
/proc; without torch, which counts its threads on import.

All ranks of a host step at the same time. By default each would use one thread per core of the host (under
torchrun a single thread: torch/distributed/run.py:872), and the kernel would move the threads between cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from dsft.generate.scripts import environment
from dsft.rank.environment import Launched
from dsft.spec.schema import Spec
from dsft.system.host import cores, physical_cores

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class Share:
    """One rank's share of the host's cores.

    cpus     numbers of the logical processors that only this rank uses
    threads  one per physical core: its two hardware threads share the units that an optimizer step needs
    ranks    number of ranks on this host
    """

    cpus: frozenset[int]
    threads: int
    ranks: int

    def bind(self) -> str:
        """Bind all threads of this process to its cores. Returns a log line that says so, or that the host
        forbids it."""
        each = f"each of the {self.ranks} ranks of a host updates its offloaded optimizer states with"
        count = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        try:
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):  # it has just ended
                    os.sched_setaffinity(int(thread), self.cpus)
        except OSError as error:
            return f"cores: {each} {count}, which cannot be bound to separate cores ({error.strerror})"
        return f"cores: {each} {count} on cores that no other rank uses"


def share_of(spec: Spec, launched: Launched, environ: Mapping[str, str]) -> Share | None:
    """Return this rank's share of the cores; None where no optimizer steps on the CPU, where the rank is
    alone on the host, where there are fewer cores than ranks, and where the caller has already chosen threads
    or cores."""
    ranks = launched.local_world_size or 1
    if spec.parallel.offload_optimizer.device == "none" or ranks == 1 or _is_chosen(spec, launched, environ):
        return None
    found = physical_cores(os.sched_getaffinity(0))
    if len(found) < ranks:
        return None
    first, end = (len(found) * rank // ranks for rank in (launched.local_rank, launched.local_rank + 1))
    threads = min(end - first, max(cores() // ranks, 1))
    return Share(frozenset(cpu for core in found[first:end] for cpu in core), threads, ranks)


def _is_chosen(spec: Spec, launched: Launched, environ: Mapping[str, str]) -> bool:
    try:
        starter = psutil.Process(os.getppid())
        if set(starter.cpu_affinity()) != os.sched_getaffinity(0):
            return True
        by_torchrun = launched.launcher == "torchrun" and THREADS not in starter.environ()
    except psutil.Error:  # another user's process: its choice is unknown
        return True
    return THREADS in environment(spec.cluster) or (THREADS in environ and not by_torchrun)
