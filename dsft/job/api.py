"""What a run is, before torch is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsft.launch.cores import Share
from dsft.launch.environment import Launched
from dsft.launch.promise import Promise
from dsft.launch.pulse import Pulse
from dsft.launch.stopping import Stopping
from dsft.plan.batch import BatchSizes
from dsft.plan.cut import Cut
from dsft.plan.layout import Layout
from dsft.spec.schema import Spec

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What is known before torch is imported. notes: how the configuration came about, a line each;
    promise: of hosts and slots, and the launcher's hostfile; command: argv; kept: the keys of
    zero_optimization that a DeepSpeed JSON of the user's decides; profile: the step to trace, 0 for one of
    dsft's choice; cut: of the layers into stages, once the model is counted; cores: what this rank keeps to
    once its rows are read; stopping and pulse: what this process is asked, and tells, by default nothing."""

    spec: Spec
    batch: BatchSizes
    config: Mapping[str, Any]
    notes: Sequence[str]
    launched: Launched
    layout: Layout
    promise: Promise | None
    command: Sequence[str]
    kept: frozenset[str] = frozenset()
    profile: int | None = None
    cores: Share | None = None
    cut: Cut | None = None
    stopping: Stopping = field(default_factory=Stopping)
    pulse: Pulse = field(default_factory=lambda: Pulse(0, 0, None))

    @property
    def folder(self) -> Path:
        return Path(self.spec.output_dir, self.spec.name)

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"
