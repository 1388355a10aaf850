"""The values of targets in the shards of a store, of which only those that are asked for are read.

A target has one row of float32 values, as `dsft.reference.teacher` has it; the rows of an example follow one
another. A shard is a safetensors file with `pairs` I64 (n,), the numbers of n examples, and `rows` F32
(N, columns), the rows of all their targets.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OPEN = 128  # shards that are mapped into memory at once


class TargetRows:
    """The rows of one dataset's targets.

    counts   (n,) targets of each example
    columns  values of a target
    """

    def __init__(self, counts: NDArray[np.int32], columns: int) -> None:
        self.counts, self.columns = counts, columns
        self._shard, self._start = np.full(len(counts), -1, np.int32), np.zeros(len(counts), np.int64)
        self._paths: list[Path] = []

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def is_missing(self) -> NDArray[np.bool_]:
        """(n,) the examples whose targets no shard has."""
        return (self._shard < 0) & (self.counts > 0)

    def add(self, path: Path, ids: NDArray[np.int64]) -> None:
        """Add a shard that has the rows of these examples."""
        ends = np.cumsum(self.counts[ids], dtype=np.int64)
        self._shard[ids], self._start[ids] = len(self._paths), ends - self.counts[ids]
        self._paths.append(path)

    def __getitem__(self, ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the rows of some examples, (N, columns). Raises OSError."""
        found = [np.zeros((0, self.columns), np.float32)]
        for number in map(int, ids):
            if count := int(self.counts[number]):
                start = int(self._start[number])
                found.append(mapped(self._paths[self._shard[number]]).rows[start : start + count])
        return np.concatenate(found)


class Shard(NamedTuple):
    """A shard of rows. about: its metadata; ids (n,); rows (N, columns), in the file until they are read."""

    about: dict[str, str]
    ids: NDArray[np.int64]
    rows: NDArray[np.float32]


@lru_cache(OPEN)
def mapped(path: Path) -> Shard:
    """Return a shard, mapped into memory. Raises OSError, and ValueError or KeyError where it has another
    form."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))

    def tensor(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        begin, shape = 8 + size + header[name]["data_offsets"][0], tuple(header[name]["shape"])
        return np.zeros(shape, dtype) if 0 in shape else np.memmap(path, dtype, "r", begin, shape)

    return Shard(header["__metadata__"], np.array(tensor("pairs", np.int64)), tensor("rows", np.float32))


def is_whole(path: Path) -> bool:
    """Return whether a shard's bytes have the digest in its name, reading each file once. Raises OSError."""
    status = path.stat()
    return _is_whole(path, status.st_size, status.st_mtime_ns)


@lru_cache(None)
def _is_whole(path: Path, size: int, changed: int) -> bool:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return path.stem.removeprefix("shard-") == digest[: len(path.stem) - len("shard-")]
