"""What a run takes of its hosts before the model is built: cores, page-locked memory, disks. Takes a job that
has its model counted."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

from dsft.engine.world import World
from dsft.job.api import Job, Say
from dsft.job.swap import measured_swap
from dsft.plan.census import Census
from dsft.plan.cut import cut_of
from dsft.plan.memory.offload import SECTIONS, has_room, locked_bytes, with_pinning
from dsft.system.host import host_memory


def on_hosts(job: Job, counted: Census, world: World, say: Say) -> Job:
    """A collective. This process on its own cores, and the job with what its hosts have been asked for."""
    if job.cores is not None:
        say(job.cores.bind())
    return measured_swap(_pinned(job, counted, world, say), counted, world, say)


def _pinned(job: Job, counted: Census, world: World, say: Say) -> Job:
    """With pin_memory as all hosts have room for it."""
    open_to_choice = tuple(_open_to_choice(job))
    if not open_to_choice:
        return job
    if world.device.type == "cpu":
        value, reason = False, "there is no GPU to copy to"
    else:
        cut = job.cut or cut_of(job.spec.parallel, counted)
        mine = locked_bytes(counted, job.spec, job.layout, world.stage, cut)
        value, reason = has_room(world.gather((socket.gethostname(), mine, host_memory())))
    say(f"pin_memory: {str(value).lower()}, {reason}")
    return replace(job, config=with_pinning(job.config, dict.fromkeys(open_to_choice, value)))


def _open_to_choice(job: Job) -> Iterator[str]:
    """Sections of the configuration that keep something in the host's memory, where neither the spec nor a
    DeepSpeed JSON of the user's says whether it is locked."""
    parallel, zero = job.spec.parallel, job.config["zero_optimization"]
    stated = (parallel.offload_optimizer.pin_memory, parallel.offload_parameters.pin_memory)
    for key, of_spec in zip(SECTIONS, stated, strict=True):
        is_there = zero.get(key, {}).get("device") == "cpu"
        if is_there and of_spec is None and key not in job.kept:
            yield key
