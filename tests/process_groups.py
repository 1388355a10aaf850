"""The process groups of engines that are done with: takes what runs an engine, destroys those made meanwhile.

DeepSpeed destroys none. Each group of gloo's has three threads, of which one wakes a hundred times a second:
after a hundred engines in one process they took half of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from torch.distributed import distributed_c10d as c10d


@contextmanager
def own_groups() -> Iterator[None]:
    """On all ranks alike. Groups that DeepSpeed keeps for the next engine stay; after an error all do."""
    before = set(c10d._world.pg_map)
    yield
    kept = {id(group) for value in vars(groups).values() for group in _held(value)}
    for group in [*c10d._world.pg_map]:
        if group not in before and id(group) not in kept:
            dist.destroy_process_group(group)


def _held(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else [value]
