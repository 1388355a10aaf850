"""Define `Job`, the description of a run that is complete before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsft.plan.ds_entries import UserConfig
from dsft.rank.cores import Share
from dsft.rank.environment import Launched
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.promise import Promise
from dsft.rank.stopping import Stopping
from dsft.spec.batch import BatchSizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec

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
