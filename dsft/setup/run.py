"""Define `Job`, what one process knows of a run at its start, and `Run`, the same once its process group is
up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsft.checkpoint.read import CheckpointReader
from dsft.dist.world import World
from dsft.plan.ds_entries import UserConfig
from dsft.rank.cores import Share
from dsft.rank.environment import Launched
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.promise import Promise
from dsft.rank.stopping import Stopping
from dsft.spec.batch import BatchSizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from dsft.system.lock import FolderLock

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The description of a run for one of its processes.

    file       the user's own DeepSpeed JSON, with which the spec is merged
    promise    the hosts and slots that the spec promises, and the launcher's hostfile
    command    argv
    profile    the step to trace; 0: dsft chooses it; None: no trace
    cores      the CPU cores that this rank is bound to once its rows are read
    stopping   the requests to stop that this process has received
    heartbeat  what this process reports each second
    """

    spec: Spec
    batch: BatchSizes
    launched: Launched
    layout: Layout
    file: UserConfig | None = None
    promise: Promise | None = None
    command: Sequence[str] = ()
    profile: int | None = None
    cores: Share | None = None
    stopping: Stopping = field(default_factory=Stopping)
    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(0, 0, None))

    @property
    def folder(self) -> Path:
        return Path(self.spec.output_dir, self.spec.name)

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


@dataclass(frozen=True, kw_only=True)
class Run(Job):
    """A run on this rank, in its process group.

    log    prints a line on rank 0
    lock   of the run's folder, which rank 0 has
    start  the checkpoint that the run resumes from; None: it starts at step 0
    """

    world: World
    log: Log
    lock: FolderLock
    start: CheckpointReader | None = None
