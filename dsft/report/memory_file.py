"""runs/NAME/memory.json: takes each rank's measured peaks and the plan's figures, gives both with the
error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsft.plan.memory.sizes import GIB
from dsft.report.memory import MemoryMeter, Peaks, Phase, largest, write_memory

Gather = Callable[[Any], list[Any]]
"""This rank's value -> every rank's, a collective."""


class MemoryFile:
    """Written anew by rank 0 whenever a phase ends, which costs one small collective.

    folder: the run's, on rank 0; planned: bytes per rank by phase and by the names of `Peaks`. A figure of
    the host's memory is compared after subtracting what the process had before the model: the plan counts
    no imports and no data.
    """

    def __init__(
        self, folder: Path | None, meter: MemoryMeter, gather: Gather, planned: Mapping[Phase, Peaks]
    ) -> None:
        self._path = folder / "memory.json" if folder is not None else None
        self.meter, self._gather, self._planned = meter, gather, planned
        self._pending: dict[str, float] = {}

    def enter(self, phase: Phase) -> None:
        """A collective. Raises StorageError on the rank that writes."""
        self.meter.enter(phase)
        ranks = self._gather(self.meter.peaks)
        found = largest(ranks)
        self._pending = {
            f"memory/{phase}/{name}_gib": size / GIB for phase in found for name, size in found[phase].items()
        }
        if self._path is not None:
            write_memory(self._path, self._content(found, ranks))

    def record(self) -> dict[str, float]:
        """For each logged step: this rank's memory, and what phases that ended since took at most."""
        pending, self._pending = self._pending, {}
        return self.meter.record() | pending

    def _content(
        self, found: Mapping[Phase, Peaks], ranks: Sequence[Mapping[Phase, Peaks]]
    ) -> dict[str, Any]:
        before = found["start"]["host_rss"]
        return {
            "unit": f"bytes; each figure is the largest over {len(ranks)} rank(s)",
            "host_rss": self.meter.method,
            "phases": {
                phase: {
                    name: size
                    if phase == "start"
                    else compared(size, self._planned.get(phase, {}).get(name), before * (name == "host_rss"))
                    for name, size in peaks.items()
                }
                for phase, peaks in found.items()
            },
            "ranks": list(ranks),
        }


def compared(measured: int, planned: int | None, before: int) -> dict[str, float]:
    """error: measured ÷ planned − 1, after subtracting `before` from what was measured."""
    figures: dict[str, float] = {"measured": measured}
    if before:
        figures["above_start"] = measured - before
    if planned:
        figures |= {"planned": planned, "error": round((measured - before) / planned - 1, 4)}
    return figures
