"""Compute the digest of a data file, and cache it in a folder across runs."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from dsft.data.read import builtin
from dsft.data.read.files import DataFile, readable
from dsft.data.read.lines import BLOCK_BYTES
from dsft.errors import DataError, Problem
from dsft.spec.sources import BUILTIN_PREFIX
from dsft.system.files import cache_json, cached_json

_RACY_NS = 2_000_000_000  # a file changed less than 2 s ago may change again within one tick of its clock


def file_digest(file: DataFile, folder: Path | None = None) -> str:
    """Return a sha256 of a file's content, kind and block size: files with equal digests have equal blocks.

    The content's digest is cached in `folder` by path, size, times of change and inode, so that an
    unchanged file is not read again. Raises MissingInputError if the file cannot be read, DataError if it
    changes while it is read.
    """
    read_as = json.dumps([file.kind, file.is_compressed, BLOCK_BYTES])
    if file.kind == "builtin":
        rows = builtin.builtin_rows(file.name.removeprefix(BUILTIN_PREFIX))
        content = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    else:
        with readable(file):
            content = content_digest(Path(file.path), folder)
    return hashlib.sha256(f"{read_as} {content}".encode()).hexdigest()


def content_digest(path: Path, folder: Path | None) -> str:
    """Return the sha256 of a file's bytes, cached in `folder` as in `file_digest`.

    Raises OSError if the file cannot be read, DataError if it changes while it is read.
    """
    path = path.absolute()
    state = _state(path)
    cached = (
        None if folder is None else folder / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    )
    if cached is not None:
        match cached_json(cached):
            case {"state": then, "sha256": str(content)} if then == state:
                return content
    started = time.time_ns()
    with path.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    if _state(path) != state:
        raise DataError(
            "a file changed while it was read:",
            [Problem(str(path), "has another size or time than before; start again when it is complete")],
        )
    if cached is not None and started - path.stat().st_mtime_ns > _RACY_NS:
        cache_json(cached, {"state": state, "sha256": content})
    return content


def _state(path: Path) -> list[object]:
    """Return values that change whenever the content does, except within one tick of the clock. mtime can be
    set back, as `cp -p` and archives do; ctime cannot."""
    found = path.stat()
    return [str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
