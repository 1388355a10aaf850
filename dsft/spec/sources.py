"""Interpret the path of a source by its name alone, without reading the disk or the network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import PurePath

BUILTIN_PREFIX = "builtin:"
BUILTIN = {
    f"{BUILTIN_PREFIX}quickstart": "messages",
    f"{BUILTIN_PREFIX}quickstart-heldout": "messages",
    f"{BUILTIN_PREFIX}quickstart-pairs": "preference",
    f"{BUILTIN_PREFIX}quickstart-pairs-heldout": "preference",
}
"""Builtin sources -> the format of their rows."""
KINDS: Mapping[str, str] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
COMPRESSED = ("jsonl", "json", "text", "csv", "tsv")
"""Kinds that are also read from .gz; Parquet and Arrow have their own compression."""
READ = ".jsonl, .ndjson, .json, .txt, .csv, .tsv (each also .gz), .parquet and .arrow"
HUB_FORM = "owner/name[@revision][:[subset:]split]"

_HUB = re.compile(
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?(?::(?P<subset>[\w.-]+)(?=:))?(?::(?P<split>[\w.-]+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class HubData:
    """A data set of the hub. revision: None for the newest; subset: None for the only one."""

    id: str
    revision: str | None = None
    subset: str | None = None
    split: str = "train"


def kind_of(name: str) -> str | None:
    """Return the kind of a data file by its ending; None if such files are not read."""
    path = PurePath(name.lower())
    if path.suffix != ".gz":
        return KINDS.get(path.suffix)
    kind = KINDS.get(PurePath(path.stem).suffix)
    return kind if kind in COMPRESSED else None


def is_pattern(name: str) -> bool:
    """Return whether the name is a shell pattern, with *, ? or [."""
    return any(character in name for character in "*?[")


def hub_data(name: str) -> HubData | None:
    """Parse owner/name[@revision][:[subset:]split]; None if it has another form or is the name of a data
    file."""
    found = _HUB.fullmatch(name)
    if found is None or kind_of(name) is not None:
        return None
    return HubData(found["id"], found["revision"], found["subset"], found["split"] or "train")


def short_name(name: str) -> str:
    """Derive a source's name from its path: file, folder or hub id without parent folders and ending; for a
    pattern, the folder before it. Characters that a metric's name cannot have become `_`."""
    parts = [part for part in PurePath(name.removeprefix(BUILTIN_PREFIX)).parts if part.strip("./")]
    if is_pattern(name):
        parts = list(takewhile(lambda part: not is_pattern(part), parts))
    last = parts[-1] if parts else "data"
    if kind_of(last) is not None:
        last = PurePath(last[:-3] if last.lower().endswith(".gz") else last).stem
    return re.sub(r"[^A-Za-z0-9._-]", "_", last)
