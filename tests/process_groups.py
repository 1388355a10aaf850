"""What an engine leaves behind, removed, so that a hundred engines fit into one process.

DeepSpeed destroys no process group. Each of gloo's has three threads, of which one wakes a hundred times a
second: after a hundred engines they took half of the process's time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import distributed_c10d as c10d


@contextmanager
def own_groups() -> Iterator[None]:
    """Around an engine, on all ranks alike. Groups that DeepSpeed keeps for the next engine stay; after an
    error everything does."""
    before = set(c10d._world.pg_map)
    yield
    groups.mpu = None
    gc.collect()  # an engine and its hooks refer to each other
    gc.freeze()  # what is left, imports and caches, is not searched again: that took an eighth of the time
    kept = {id(group) for value in vars(groups).values() for group in _held(value)}
    for group in [*c10d._world.pg_map]:
        if group not in before and id(group) not in kept:
            dist.destroy_process_group(group)


def _held(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else [value]
