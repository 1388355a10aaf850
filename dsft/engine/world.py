"""The process group: takes how this process was launched, gives a `World` to agree in.

Every method but `close` is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from torch import Tensor

from dsft.engine.op import load_everywhere
from dsft.engine.op_turn import Say
from dsft.errors import DsftError
from dsft.launch.environment import Launched
from dsft.plan.layout import Layout

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # rank 0 hashes a checkpoint while the others wait


def silent(text: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class World:
    """rank = stage × data_parallel + data_rank, as in DeepSpeed's PipeDataParallelTopology."""

    rank: int
    world_size: int
    local_rank: int
    layout: Layout
    device: torch.device

    @property
    def stage(self) -> int:
        return self.layout.stage(self.rank)

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.rank)

    def sum(self, mine: Tensor) -> Tensor:
        """The sum over all ranks; `mine` is left as it is."""
        total = mine.clone()
        dist.all_reduce(total)
        return total

    def gather(self, mine: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, mine)
        return values

    def broadcast(self, mine: T) -> T:
        """Rank 0's value on every rank."""
        box = [mine]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0's result of `work` on every rank; a DsftError that it raises is raised on every rank."""
        outcome: tuple[T | None, DsftError | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (work(), None)
            except DsftError as error:
                outcome = (None, error)
        result, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return cast(T, result)

    def each(self, work: Callable[[], T]) -> T:
        """Every rank's own result of `work`, which is local. Where it fails on some, the first one's error
        is raised on all: none is left waiting, and rank 0 can tell it."""
        outcome: tuple[T | None, DsftError | None] = (None, None)
        try:
            outcome = (work(), None)
        except DsftError as error:
            outcome = (None, error)
        for failure in self.gather(outcome[1]):
            if failure is not None:
                raise failure
        return cast(T, outcome[0])

    def hosts_first(self, work: Callable[[], object]) -> None:
        """`work`, which is local, on one rank of each host and then on the others; where it fails on one, its
        error is raised on all, and what comes after is not tried."""
        leads = self.local_rank == 0
        self.each(lambda: work() if leads else None)
        self.each(lambda: None if leads else work())

    def close(self) -> None:
        dist.destroy_process_group()


def join(launched: Launched, layout: Layout, say: Say = silent) -> World:
    """Join the process group: NCCL on GPUs, gloo on CPUs, where ranks of a host also add up in shared memory,
    by an operation that is compiled first (`say` is told). A process started alone joins itself.

    Raises BuildError or StorageError where that cannot be built.
    """
    # DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 renames; not ours to change or show.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\..* is deprecated", category=FutureWarning
    )
    launched.export(os.environ)
    accelerator = get_accelerator()
    name = accelerator.device_name()
    device = torch.device("cpu") if name == "cpu" else torch.device(name, launched.local_rank)
    if name != "cpu":
        accelerator.set_device(launched.local_rank)
    world = World(launched.rank, launched.world_size, launched.local_rank, layout, device)
    if name == "cpu":  # DeepSpeed takes this group over, and finds its operation loaded
        dist.init_process_group("gloo", timeout=TIMEOUT)
        load_everywhere(ShareMemCommBuilder(), world, say)
    backend = "gloo" if name == "cpu" else accelerator.communication_backend_name()
    with contextlib.redirect_stdout(io.StringIO()):  # it tells of its operation, on every rank
        deepspeed.init_distributed(
            dist_backend=backend, auto_mpi_discovery=False, timeout=TIMEOUT, verbose=False
        )
    if name == "cpu":
        _unname_shared_memory(world)
    return world


def _unname_shared_memory(world: World) -> None:
    """DeepSpeed never removes a rank's file, 69 MB in memory, in which ranks of a host add up under its own
    launcher (ops/csrc/cpu/comm/shm.cpp:350). All have mapped all of them now, and need the names no more."""
    world.gather(None)
    place = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{world.rank}"
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}").unlink(missing_ok=True)
