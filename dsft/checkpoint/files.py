"""Write files that are either whole or absent: streamed safetensors, JSON, digests, durable renames.

A file is flushed to the disk (fsync) when a function returns. OSErrors are not caught: the caller knows what
they mean.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsft.model.files import TENSOR_TYPES
from dsft.system.files import sync_folder

THREADS = 8
"""Files that are hashed at a time; each thread hashes about 1.5 GB/s if the disk is fast enough."""

CHUNK = 16 * 2**20
"""Elements of a tensor that are in host memory at a time."""

_TYPE_NAMES = {dtype: name for name, dtype in TENSOR_TYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a safetensors file: its name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileDigest:
    """A file's size in bytes and its SHA-256, as hex."""

    size: int
    sha256: str


def write_tensors(
    path: Path, entries: Sequence[TensorEntry], chunks: Iterable[Tensor], metadata: Mapping[str, str]
) -> FileDigest:
    """Write a safetensors file whose tensors need not all be in memory at once.

    `chunks` yields the elements of all entries in order, in pieces of any size and shape, in the type of
    their entry. Raises ValueError where there are more or fewer bytes than the entries need.
    """
    begin, end = header_of(entries, metadata)
    pieces = (chunk.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for chunk in chunks)
    written = write_bytes(path, itertools.chain([begin], pieces))
    if written.size != len(begin) + end:
        raise ValueError(f"{path}: {written.size - len(begin)} bytes of tensors where the entries need {end}")
    return written


def header_of(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Return what a safetensors file begins with, and the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {
            "dtype": _TYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pad, so that the data is aligned
    return len(text).to_bytes(8, "little") + text, end


def write_bytes(path: Path, pieces: Iterable[Any]) -> FileDigest:
    """Write the pieces one after the other, hashing them on the way, and flush them to the disk."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            file.write(view)
            digest.update(view)
            size += len(view)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(size, digest.hexdigest())


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of a folder's files by name; meant for small files, subfolders are ignored."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> dict[str, FileDigest]:
    """Create a folder with these files."""
    folder.mkdir()
    written = {name: write_bytes(folder / name, [content]) for name, content in files.items()}
    sync_folder(folder)
    return written


def write_json(path: Path, value: Any) -> FileDigest:
    """Write a JSON file as `write_aside` does."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
    return write_aside(path, text)


def write_aside(path: Path, text: bytes) -> FileDigest:
    """Write a file under a temporary name, then rename it."""
    aside = path.with_name(path.name + ".tmp")
    written = write_bytes(aside, [text])
    os.replace(aside, path)
    sync_folder(path.parent)
    return written


def digest_of(path: Path) -> FileDigest:
    """Return size and SHA-256 of a file as it is on the disk now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(file.tell(), digest.hexdigest())


def damages(folder: Path, files: Mapping[str, FileDigest]) -> Iterator[str]:
    """Yield a clause for each damaged file, saying which and how; names are relative to the folder. Reads all
    files, several at a time, since hashing releases the GIL."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from filter(None, pool.map(lambda name: damage(folder / name, files[name]), files))


def damage(path: Path, written: FileDigest) -> str | None:
    """Return a clause that begins with the path, or None where the file is undamaged."""
    try:
        size = path.stat().st_size
        if size != written.size:
            return f"{path} has {size} bytes where {written.size} were written"
        if digest_of(path) != written:
            return f"{path} has changed since it was written (SHA-256 differs)"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None
