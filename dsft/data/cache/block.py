"""Read and write token blocks: the tokens of one part of a data file, cached in one file that is either
complete or absent.

A safetensors file (https://github.com/huggingface/safetensors#format) of n rows, T tokens and S spans:

ends        I64 (n,)    where each row's tokens end in `tokens`
span_ends   I64 (n,)    where each row's spans end in `spans`
content     U64 (n,)    a hash of the row's content
digests     U64 (n,)    a checksum of the row's tokens and spans, verified whenever the row is read
trained     I32 (n,)    the number of targets of the row
lines       U32 (n,)    the row's line number in the block, from 1
spans       I32 (S, 2)  start and stop of each run of targets, counted from the row's first token
tokens      U16 or I32 (T,)
ended       BOOL (n,)   as in `Rendered`
desirable   BOOL (n,)   as in `TokenRows`

The metadata are one JSON text: a checksum of everything but the tokens, verified when the file is opened, the
block's key and index, and its `BlockAccount`.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import re
import tempfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dsft.data.rows import Rendered
from dsft.system.files import TEMPORARY

VERSION = 6
"""Version of the cache. Increase it when the same file, format, chat template and tokenizer give different
rows, tokens or masks, or when the arrays of a block change: blocks of other versions are not read.
tests/unit/data/test_data_version.py checks it."""
_METADATA = "dsft"
_SPILL = 64 << 20  # bytes of tokens collected in memory; a larger block goes to a temporary file
_TYPES = {"I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4", "U16": "<u2", "BOOL": "|b1"}
_COLUMNS = {
    "ends": "q", "span_ends": "q", "content": "Q", "digests": "Q", "trained": "i", "lines": "I", "spans": "i",
    "ended": "?", "desirable": "?",
}  # fmt: skip
"""Array name -> numpy type code, for all arrays except the tokens."""


class DamagedBlockError(Exception):
    """A cache file is damaged or belongs to another block. The message gives the reason."""


@dataclass(frozen=True)
class BlockAccount:
    """Counts and line numbers of a block's lines, besides its rows.

    lines         number of lines, blank ones included
    bad           (line, reason) of the first of the `bad_rows`
    spelled_rows  rows whose content spells special tokens of the chat template
    spelled       line numbers of the first of them
    """

    lines: int = 0
    blank_lines: int = 0
    bad_rows: int = 0
    bad: tuple[tuple[int, str], ...] = ()
    spelled_rows: int = 0
    spelled: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenBlock:
    """The arrays of a block, in memory or in a memory-mapped file."""

    account: BlockAccount
    arrays: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.arrays["ends"])

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.arrays.values())

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.arrays["ends"], prepend=0)

    def line(self, row: int) -> int:
        return int(self.arrays["lines"][row])

    def spans(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of spans of each of the rows (k,), (k,), and all their spans concatenated."""
        stops = self.arrays["span_ends"]
        firsts = np.where(rows > 0, stops[rows - 1], 0).astype(np.int64)
        counts = stops[rows] - firsts
        inside = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        return counts, self.arrays["spans"][np.repeat(firsts, counts) + inside].astype(np.int64)

    def first_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first token of each of the rows (k,), (k,). No row may be empty."""
        firsts = np.where(rows > 0, self.arrays["ends"][rows - 1], 0)
        return self.arrays["tokens"][firsts].astype(np.int64)

    def read(self, row: int) -> Rendered:
        """Return a row. Raises DamagedBlockError if the checksum of its tokens and spans does not match."""
        ids = self._of("ends", "tokens", row).astype(np.int32)
        spans = self._of("span_ends", "spans", row)
        if _digest(ids, spans) != int(self.arrays["digests"][row]):
            raise DamagedBlockError("the checksum of a row does not match its tokens")
        trained = np.zeros(len(ids), dtype=np.bool_)
        for start, stop in spans:
            trained[start:stop] = True
        return Rendered(ids, trained, bool(self.arrays["ended"][row]))

    def read_part(self, row: int, start: int, stop: int) -> Rendered:
        """Return tokens `start` to `stop` of a row, without verifying its checksum."""
        ids = self._of("ends", "tokens", row)[start:stop].astype(np.int32)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for first, last in self._of("span_ends", "spans", row):
            trained[max(0, first - start) : max(0, last - start)] = True
        return Rendered(ids, trained, bool(self.arrays["ended"][row]))

    def _of(self, ends: str, what: str, row: int) -> NDArray[Any]:
        stops = self.arrays[ends]
        return self.arrays[what][int(stops[row - 1]) if row else 0 : int(stops[row])]


class BlockBuilder:
    """Collects the rows of a block while it is tokenized.

    dtype   numpy type of the tokens, <u2 or <i4
    folder  folder of the temporary file that tokens spill to beyond _SPILL bytes; None: they stay in memory
    """

    def __init__(self, dtype: str, folder: Path | None = None) -> None:
        self._dtype, self._limit = dtype, _SPILL if folder is not None else 0
        self._tokens = tempfile.SpooledTemporaryFile(self._limit, dir=str(folder) if folder else None)
        self._columns: dict[str, array[Any]] = {
            name: array(code.replace("?", "B")) for name, code in _COLUMNS.items()
        }
        self._num_tokens = 0

    def close(self) -> None:
        self._tokens.close()

    def __len__(self) -> int:
        return len(self._columns["ends"])

    def add(self, rendered: Rendered, *, line: int, content: int, desirable: bool) -> None:
        ids, columns = rendered.input_ids, self._columns
        edges = np.flatnonzero(np.diff(rendered.trained.astype(np.int8), prepend=0, append=0))
        spans = edges.astype(np.int32)
        self._tokens.write(ids.astype(self._dtype).tobytes())
        self._num_tokens += len(ids)
        columns["spans"].frombytes(spans.tobytes())
        columns["ends"].append(self._num_tokens)
        columns["span_ends"].append(len(columns["spans"]) // 2)
        columns["content"].append(content)
        columns["digests"].append(_digest(ids, spans))
        columns["trained"].append(int(np.count_nonzero(rendered.trained[1:])))
        columns["lines"].append(line)
        columns["ended"].append(rendered.ended)
        columns["desirable"].append(desirable)

    def block(self, account: BlockAccount) -> TokenBlock:
        arrays = {name: np.array(self._columns[name], code) for name, code in _COLUMNS.items()}
        arrays["spans"] = arrays["spans"].reshape(-1, 2)
        self._tokens.seek(0)
        buffer: bytes | mmap.mmap
        if 0 < self._limit < self._num_tokens * np.dtype(self._dtype).itemsize:
            buffer = mmap.mmap(self._tokens.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            buffer = self._tokens.read()
        return TokenBlock(account, arrays | {"tokens": np.frombuffer(buffer, self._dtype)})


def _digest(ids: NDArray[np.int32], spans: NDArray[np.int32]) -> int:
    digest = hashlib.blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=8)
    digest.update(spans.astype("<i4", copy=False).tobytes())
    return int.from_bytes(digest.digest(), "little")


# --- the file ---------------------------------------------------------------------------------------------


def save_block(path: Path, block: TokenBlock, key: str, index: int) -> None:
    """Write block `index` of `key` to a temporary file, fsync it and rename it. Raises OSError."""
    about = [key, index, vars(block.account)]
    metadata = {_METADATA: json.dumps([_checksum(about, block.arrays), *about])}
    aside = path.with_name(path.name + TEMPORARY)
    try:
        aside.touch()
        mode = aside.stat().st_mode
        save_file(dict(block.arrays), aside, metadata)
        aside.chmod(mode)  # safetensors leaves a file that only its owner can read
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else error) from error
    finally:
        aside.unlink(missing_ok=True)


def open_block(path: Path, key: str, index: int) -> TokenBlock:
    """Memory-map a file and verify everything but the tokens.

    Raises FileNotFoundError if it does not exist, DamagedBlockError if it is not block `index` of `key` or is
    incomplete, OSError if it cannot be read.
    """
    block, checksum, about = _parse(_mapped(path))
    if about[:2] != [key, index]:
        raise DamagedBlockError("it belongs to other rows")
    if _checksum(about, block.arrays) != checksum:
        raise DamagedBlockError("its checksum does not match its header or index")
    return block


def reopen_block(path: Path) -> TokenBlock:
    """Memory-map a file that `open_block` has verified. Raises the same errors."""
    return _parse(_mapped(path))[0]


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise DamagedBlockError("it is empty") from None


def _parse(buffer: mmap.mmap) -> tuple[TokenBlock, str, list[Any]]:
    """Return the block, its stored checksum, and [key, index, found], which that covers besides the arrays.
    Raises DamagedBlockError if the header is damaged."""
    try:
        start = 8 + int.from_bytes(buffer[:8], "little")
        header = json.loads(buffer[8:start])
        checksum, *about = json.loads(header["__metadata__"][_METADATA])
        arrays: dict[str, NDArray[Any]] = {}
        for name in (*_COLUMNS, "tokens"):
            dtype, shape = np.dtype(_TYPES[header[name]["dtype"]]), header[name]["shape"]
            first, last = header[name]["data_offsets"]
            arrays[name] = np.frombuffer(buffer, dtype, math.prod(shape), start + first).reshape(shape)
            if last - first != arrays[name].nbytes:
                raise ValueError
        bad, spelled = tuple(map(tuple, about[2]["bad"])), tuple(about[2]["spelled"])
        block = TokenBlock(BlockAccount(**about[2] | {"bad": bad, "spelled": spelled}), arrays)
        if start + block.num_bytes != len(buffer):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, IndexError):
        raise DamagedBlockError("it is truncated, or its header is damaged") from None
    return block, checksum, about


def _checksum(about: list[Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a hash of everything but the values of the tokens."""
    digest = hashlib.blake2b(json.dumps(about).encode(), digest_size=32)
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
        if name != "tokens":
            digest.update(values.data)
    return digest.hexdigest()
