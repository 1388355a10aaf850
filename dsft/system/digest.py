"""Compute the SHA-256 of files, several at a time, and keep it in a folder across runs, so that an unchanged
file is not read again. Without torch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dsft.errors import DataError, Problem
from dsft.system.files import cache_json, cached_json

THREADS = 8
"""Files that are hashed at a time; hashing releases the GIL, and a core hashes 1 to 2 GB/s."""

_PIECE = 2**20  # bytes that are read at a time
_TICK = 0.5  # seconds between two reports of the progress
_RACY_NS = 2_000_000_000  # a file changed less than 2 s ago may change again within one tick of its clock


class FileState(NamedTuple):
    """Values of a file that change whenever its content does, except within one tick of the clock. mtime can
    be set back, as `cp -p` and archives do; ctime cannot. The device is left out: hosts number that of a
    disk that they share each in its own way."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Raises OSError."""
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@dataclass(frozen=True)
class HashProgress:
    """Progress of hashing a model's files. done, total: bytes."""

    done: int
    total: int
    name: str = "model files"

    def text(self, seconds: float) -> str:
        speed = f" ({self.done / 1e9 / seconds:.2f} GB/s)" if seconds > 0 else ""
        return f"{self.name}: hashed {self.done / 1e9:.1f} GB{speed}"

    def count(self) -> str:
        return f"of {self.total / 1e9:.1f} GB"


def content_digest(
    path: Path, folder: Path | None, read: Callable[[int], object] = lambda count: None
) -> str:
    """Return the SHA-256 of a file's bytes, as hex, kept in `folder` by the file's state. read: called with
    the number of bytes of each piece that is read.

    Raises OSError if the file cannot be read, DataError if it changes while it is read.
    """
    state, seen = FileState.of(path), time.time_ns()
    if (known := known_digest(state, folder)) is not None:
        return known
    digest = _hash(path, read)
    if FileState.of(path) != state:
        raise DataError(
            "a file changed while it was read:",
            [Problem(str(path), "has another size or time than before; start again when it is complete")],
        )
    keep_digest(state, digest, folder, seen)
    return digest


def _hash(path: Path, read: Callable[[int], object]) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            read(count)
    return digest.hexdigest()


def content_digests(
    paths: Sequence[Path],
    folder: Path | None,
    threads: int = THREADS,
    report: Callable[[HashProgress], object] = lambda progress: None,
) -> list[str]:
    """Return the `content_digest` of each file, several at a time. report: called with the progress twice a
    second. Raises as it does."""
    counts = [0] * len(paths)  # bytes read of each file

    def digest_of(number: int) -> str:
        def read(count: int) -> None:
            counts[number] += count

        return content_digest(paths[number], folder, read)

    total = sum(path.stat().st_size for path in paths)
    with ThreadPoolExecutor(threads) as pool:
        found = [pool.submit(digest_of, number) for number in range(len(paths))]
        while wait(found, _TICK).not_done:
            report(HashProgress(sum(counts), total))
    return [one.result() for one in found]


def known_digest(state: FileState, folder: Path | None) -> str | None:
    """Return the digest that `keep_digest` kept; None where it kept none."""
    match cached_json(folder / _entry(state)) if folder is not None else None:
        case {"sha256": str(digest)}:
            return digest
    return None


def keep_digest(state: FileState, digest: str, folder: Path | None, seen: int) -> None:
    """Keep the digest of a file that had this state at the time `seen`, in ns, unless it was changed so
    shortly before that another change need not show in its state."""
    if folder is not None and seen - state.mtime_ns > _RACY_NS:
        cache_json(folder / _entry(state), {"sha256": digest})


def _entry(state: FileState) -> str:
    return f"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}.json"
