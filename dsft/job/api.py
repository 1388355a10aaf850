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
from dsft.plan.layout import Layout
from dsft.spec.schema import Spec

Say = Callable[[str], None]
Config = Mapping[str, Any]
"""A DeepSpeed configuration."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process of a run is told at its start.

    config    DeepSpeed's, as the spec or a JSON of the user's gives it; `resolve` completes it
    decided   the keys of zero_optimization that such a JSON decides
    notes     how the configuration came about, a line each
    promise   of hosts and slots, and the launcher's hostfile
    command   argv
    profile   the step to trace, 0 for one of dsft's choice, None for none
    cores     what this rank keeps to once its rows are read
    stopping  what this process is asked
    pulse     what it reports of itself
    """

    spec: Spec
    batch: BatchSizes
    config: Config
    launched: Launched
    layout: Layout
    decided: frozenset[str] = frozenset()
    notes: Sequence[str] = ()
    promise: Promise | None = None
    command: Sequence[str] = ()
    profile: int | None = None
    cores: Share | None = None
    stopping: Stopping = field(default_factory=Stopping)
    pulse: Pulse = field(default_factory=lambda: Pulse(0, 0, None))

    @property
    def folder(self) -> Path:
        return Path(self.spec.output_dir, self.spec.name)

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"
