"""What is read of a data file, as one hash, remembered from one run to the next.

Takes a DataFile and a folder for what was found. Reads the file; reads and writes the folder.
"""

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

_RACY_NS = 2_000_000_000  # a file changed so shortly before may change again within its clock's next tick


def file_digest(file: DataFile, memory: Path | None = None) -> str:
    """Return a sha256 of the content, the kind and the size of blocks: where they are equal, the blocks are.

    In the folder `memory` it is found again by path, size, times of change and inode, without reading the
    file. Raises MissingInputError where the file cannot be read, DataError where it changes meanwhile.
    """
    read_as = json.dumps([file.kind, file.is_compressed, BLOCK_BYTES])
    if file.kind == "builtin":
        rows = builtin.builtin_rows(file.name.removeprefix(BUILTIN_PREFIX))
        content = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    else:
        with readable(file):
            content = content_digest(Path(file.path), memory)
    return hashlib.sha256(f"{read_as} {content}".encode()).hexdigest()


def content_digest(path: Path, memory: Path | None) -> str:
    """sha256 of a file's bytes; found again in the folder `memory` as `file_digest` says.

    Raises OSError where the file cannot be read, DataError where it changes meanwhile.
    """
    path = path.absolute()
    state = _state(path)
    known = None if memory is None else memory / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    if known is not None:
        match cached_json(known):
            case {"state": then, "sha256": str(content)} if then == state:
                return content
    started = time.time_ns()
    with path.open("rb") as opened:
        content = hashlib.file_digest(opened, "sha256").hexdigest()
    if _state(path) != state:
        raise DataError(
            "a file changes while it is read:",
            [Problem(str(path), "has another size or time now than before; wait until it is written")],
        )
    if known is not None and started - path.stat().st_mtime_ns > _RACY_NS:
        cache_json(known, {"state": state, "sha256": content})
    return content


def _state(path: Path) -> list[object]:
    """What changes when the content does, but for a change within one tick of the clock. The time of content
    can be put back, as `cp -p` and archives do; that of the inode cannot."""
    found = path.stat()
    return [str(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
