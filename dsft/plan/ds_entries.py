"""Define what a DeepSpeed configuration is made of: its entries, and what a run knows beside its spec. A run
keeps the entries in its folder, with their reasons."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from dsft.plan.census import Elements
from dsft.system.json_file import read_json

ABSENT = object()
"""Value of an entry whose key is not written; its reason says why."""

CONFIG, REASONS = "deepspeed.json", "deepspeed.reasons.json"
"""Files in a run's folder: the configuration, and dotted key -> reason."""


@dataclass(frozen=True)
class ConfigEntry:
    """One key of the JSON: dotted name, value (ABSENT if the key is not written), reason for the value."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class HostFacts:
    """What a run knows beside its spec when it writes its configuration. None, or no entry, is what is not
    known yet, or not needed; `dsft plan` and `dsft generate` know the size of the model alone.

    elements      size of the model
    largest_part  elements of the largest parameter's shard on a rank
    pin           whether offloaded states in host memory are pinned where the spec leaves it open, and why
    swap          key of `parallel` -> the run's own folder for what is offloaded to NVMe
    cpu_adam      whether the Adam on the CPU is DeepSpeed's, not torch's
    """

    elements: Elements | None = None
    largest_part: int | None = None
    pin: tuple[bool, str] | None = None
    swap: Mapping[str, str] = field(default_factory=dict)
    cpu_adam: bool | None = None


@dataclass(frozen=True)
class UserConfig:
    """The user's own DeepSpeed JSON. values: dotted key -> value, of the keys that it decides; notes: lines
    to print on what it changes in the spec, and on what is not used."""

    name: str
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def over(self, entries: Sequence[ConfigEntry]) -> tuple[ConfigEntry, ...]:
        """Return the entries with the file's values, whose reasons name the file and what it replaces."""
        found = {entry.key: entry for entry in entries}
        for key, value in self.values.items():
            ours, reason = found.get(key), f"{self.name} sets it"
            if ours is not None and ours.value is not ABSENT:
                reason += f"; without the file {json.dumps(ours.value)}: {ours.reason}"
            if ours is None or ours.value != value:
                found[key] = ConfigEntry(key, value, reason)
        return tuple(found.values())


def nested(entries: Iterable[ConfigEntry]) -> dict[str, Any]:
    """Nest the entries by their sections, without those that are not written."""
    config: dict[str, Any] = {}
    for entry in entries:
        if entry.value is not ABSENT:
            *sections, key = entry.key.split(".")
            place = config
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = entry.value
    return config


def reasons(entries: Iterable[ConfigEntry]) -> dict[str, str]:
    """Return the content of `REASONS`."""
    return {entry.key: entry.reason for entry in entries}


def entries_of_run(folder: Path) -> tuple[ConfigEntry, ...]:
    """Return the entries that a run has kept in its folder; none where there are no such files that can be
    read."""
    try:
        config, found = read_json(folder / CONFIG), read_json(folder / REASONS)
        values = {key: reduce(operator.getitem, key.split("."), config) for key in found}
        return tuple(ConfigEntry(key, values[key], str(reason)) for key, reason in found.items())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return ()
