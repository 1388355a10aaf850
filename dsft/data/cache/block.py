"""The tokens of one block of a file, and what tells its rows apart: one file, whole or not there.

A safetensors file (https://github.com/huggingface/safetensors#format) of n rows, T tokens, S trained spans:

ends        I64 (n,)     tokens of the block up to the row's last
span_ends   I64 (n,)     spans up to the row's last
content     U64 (n,)     a hash of what the row says
digests     U64 (n,)     a hash of the row's tokens and spans, compared whenever it is read
trained     I32 (n,)     targets
lines       U32 (n,)     of the block, from 1
spans       I32 (S, 2)   start and stop of each run of trained tokens, from the row's first
tokens      U16 or I32 (T,)
ended       BOOL (n,)
desirable   BOOL (n,)
seal        U8 (32,)     a hash of all bytes before it but the tokens, compared when the file is opened

Its metadata hold one text: JSON of what else was found, and which block of which key it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import shutil
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Rendered

VERSION = 4
"""Raise it when the same file, format, chat template and tokenizer give other rows, tokens or masks, or when
a block's file has other arrays: blocks of another version are not read.
tests/unit/data/test_data_version.py compares."""
_METADATA = "dsft"
_TYPES: Mapping[str, str] = {
    "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4", "U16": "<u2", "BOOL": "|b1", "U8": "|u1",
}  # fmt: skip
_ARRAYS: Mapping[str, tuple[str, str]] = {
    "ends": ("I64", "q"),
    "span_ends": ("I64", "q"),
    "content": ("U64", "Q"),
    "digests": ("U64", "Q"),
    "trained": ("I32", "i"),
    "lines": ("U32", "I"),
    "spans": ("I32", "i"),
    "tokens": ("", ""),
    "ended": ("BOOL", "B"),
    "desirable": ("BOOL", "B"),
}
"""In the order of the file, wide types first, so that each array is aligned: type there, and of `array`."""
_SEAL_BYTES = 32


class DamagedBlockError(Exception):
    """Why a file is not the block that it should be."""


@dataclass(frozen=True)
class Found:
    """What a block's lines held besides rows. lines: of the block, blank ones among them; bad: (line, reason)
    of the first of `bad_rows`; spelled: lines of the first of `spelled_rows`."""

    lines: int = 0
    blank_lines: int = 0
    bad_rows: int = 0
    bad: tuple[tuple[int, str], ...] = ()
    spelled_rows: int = 0
    spelled: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenBlock:
    """The arrays of a block, as they stand in a mapped file or in memory."""

    found: Found
    arrays: Mapping[str, NDArray[Any]]
    num_bytes: int

    def __len__(self) -> int:
        return len(self.arrays["ends"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.arrays["ends"], prepend=0)

    def line(self, row: int) -> int:
        return int(self.arrays["lines"][row])

    def spans(self, row: int) -> NDArray[np.int64]:
        return self._of("span_ends", "spans", row).astype(np.int64)

    def spans_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of rows (k,): how many spans each has, (k,), and the spans, one row's after the other's."""
        stops = self.arrays["span_ends"]
        firsts = np.where(rows > 0, stops[rows - 1], 0).astype(np.int64)
        counts = stops[rows] - firsts
        inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return counts, self.arrays["spans"][np.repeat(firsts, counts) + inside].astype(np.int64)

    def first_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """(k,): of rows (k,), each with a token."""
        firsts = np.where(rows > 0, self.arrays["ends"][rows - 1], 0)
        return self.arrays["tokens"][firsts].astype(np.int64)

    def read(self, row: int) -> Rendered:
        """Raises DamagedBlockError where tokens or spans are not what was written."""
        ids = self._of("ends", "tokens", row).astype(np.int32)
        spans = self._of("span_ends", "spans", row)
        if _digest(ids, spans) != int(self.arrays["digests"][row]):
            raise DamagedBlockError("the tokens of a row are not what was written")
        trained = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            trained[start:stop] = True
        return Rendered(ids, trained, bool(self.arrays["ended"][row]))

    def read_part(self, row: int, start: int, stop: int) -> Rendered:
        """Tokens `start` to `stop`, not checked."""
        ids = self._of("ends", "tokens", row)[start:stop].astype(np.int32)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for first, last in self._of("span_ends", "spans", row):
            trained[max(0, first - start) : max(0, last - start)] = True
        return Rendered(ids, trained, bool(self.arrays["ended"][row]))

    def _of(self, ends: str, what: str, row: int) -> NDArray[Any]:
        stops = self.arrays[ends]
        return self.arrays[what][int(stops[row - 1]) if row else 0 : int(stops[row])]


@dataclass
class Gathered:
    """The rows of a block that is being made. Tokens wait in `spill`, one file-like place for all of them."""

    token_type: str
    """U16 or I32."""
    spill: IO[bytes]
    columns: dict[str, array[Any]] = field(
        default_factory=lambda: {name: array(code) for name, (_, code) in _ARRAYS.items() if code}
    )
    num_tokens: int = 0

    def __len__(self) -> int:
        return len(self.columns["ends"])

    def add(self, rendered: Rendered, *, line: int, content: int, desirable: bool) -> None:
        ids = rendered.input_ids
        spans = spans_of(rendered.trained)
        self.spill.write(ids.astype(_TYPES[self.token_type]).tobytes())
        self.num_tokens += len(ids)
        columns = self.columns
        columns["spans"].frombytes(spans.tobytes())
        columns["ends"].append(self.num_tokens)
        columns["span_ends"].append(len(columns["spans"]) // 2)
        columns["content"].append(content)
        columns["digests"].append(_digest(ids, spans))
        columns["trained"].append(int(np.count_nonzero(rendered.trained[1:])))
        columns["lines"].append(line)
        columns["ended"].append(rendered.ended)
        columns["desirable"].append(desirable)

    def write(self, out: IO[bytes], found: Found, key: str, index: int) -> None:
        """The file, from its first byte to its seal."""
        header = self._header(found, key, index)
        seal = hashlib.blake2b(header, digest_size=_SEAL_BYTES)
        out.write(header)
        for name, column in self.columns.items():
            if name == "ended":
                self.spill.seek(0)
                shutil.copyfileobj(self.spill, out, 1 << 20)
            seal.update(column)
            out.write(column)
        out.write(seal.digest())

    def _header(self, found: Found, key: str, index: int) -> bytes:
        about = {"version": VERSION, "key": key, "block": index, **vars(found)}
        header: dict[str, Any] = {"__metadata__": {_METADATA: json.dumps(about)}}
        end = 0
        for name, (dtype, _) in _ARRAYS.items():
            dtype = dtype or self.token_type
            column = self.columns.get(name)
            size = self.num_tokens if column is None else len(column)
            start, end = end, end + size * np.dtype(_TYPES[dtype]).itemsize
            shape = [size // 2, 2] if name == "spans" else [size]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        header["seal"] = {"dtype": "U8", "shape": [_SEAL_BYTES], "data_offsets": [end, end + _SEAL_BYTES]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def spans_of(trained: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(k, 2): start and stop of each run of True."""
    edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
    return edges.astype(np.int32).reshape(-1, 2)


def _digest(ids: NDArray[np.int32], spans: NDArray[np.int32]) -> int:
    digest = hashlib.blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=8)
    digest.update(spans.astype("<i4", copy=False).tobytes())
    return int.from_bytes(digest.digest(), "little")


# --- the file ---------------------------------------------------------------------------------------------


def open_block(path: Path, key: str, index: int) -> TokenBlock:
    """Map a file and prove all of it but the tokens. Raises FileNotFoundError; DamagedBlockError where it is
    not block `index` of `key`, whole; OSError where it cannot be read."""
    with path.open("rb") as file:
        return parse(_mapped(file), key, index)


def reopen_block(path: Path) -> TokenBlock:
    """Map a file that `open_block` proved. Raises as it does."""
    with path.open("rb") as file:
        return _parts(_mapped(file)).block


def parse(buffer: mmap.mmap | bytes, key: str, index: int) -> TokenBlock:
    """As `open_block`, of bytes in memory."""
    parts = _parts(buffer)
    if parts.belongs != (VERSION, key, index):
        raise DamagedBlockError("it belongs to other rows")
    view, (first, last), end = memoryview(buffer), parts.tokens, len(buffer) - _SEAL_BYTES
    seal = hashlib.blake2b(view[:first], digest_size=_SEAL_BYTES)
    seal.update(view[last:end])
    if seal.digest() != view[end:]:
        raise DamagedBlockError("its header or index is not what was written")
    return parts.block


@dataclass(frozen=True)
class _Parts:
    block: TokenBlock
    belongs: tuple[Any, Any, Any]
    tokens: tuple[int, int]


def _mapped(file: IO[bytes]) -> mmap.mmap:
    try:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise DamagedBlockError("it is empty") from None


def _parts(buffer: mmap.mmap | bytes) -> _Parts:
    """By the header alone, which any change of the file may have reached."""
    try:
        start = 8 + int.from_bytes(buffer[:8], "little")
        header = json.loads(buffer[8:start])
        about = json.loads(header["__metadata__"][_METADATA])
        places = {name: header[name] for name in (*_ARRAYS, "seal")}
        end = start
        arrays: dict[str, NDArray[Any]] = {}
        for name, place in places.items():
            dtype, shape = np.dtype(_TYPES[place["dtype"]]), place["shape"]
            arrays[name] = np.frombuffer(buffer, dtype, math.prod(shape), end).reshape(shape)
            end += arrays[name].nbytes
        found = Found(
            about["lines"],
            about["blank_lines"],
            about["bad_rows"],
            tuple((n, why) for n, why in about["bad"]),
            about["spelled_rows"],
            tuple(about["spelled"]),
        )
        belongs = about["version"], about["key"], about["block"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DamagedBlockError("it is cut off, or its header is not what was written") from None
    if end != len(buffer) or len(arrays["seal"]) != _SEAL_BYTES:
        raise DamagedBlockError("it has not the size that its header says")
    last = end - sum(arrays[name].nbytes for name in ("ended", "desirable", "seal"))
    tokens = last - arrays["tokens"].nbytes, last
    del arrays["seal"]
    return _Parts(TokenBlock(found, arrays, len(buffer)), belongs, tokens)
