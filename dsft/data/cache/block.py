"""Read and write token blocks: the tokens of one part of a data file, cached in one folder that is either
complete or absent.

rows.npy    row_type (n,)   what is stored of each row, and its fields
spans.npy   <i4 (S, 2)      start and stop of each run of targets, counted from the row's first token
tokens.npy  <u2 or <i4 (T,)
block.json  the block's key and index, its `BlockAccount`, and a checksum of all but the values of the tokens,
            verified when the block is opened

The values of the tokens are not verified: a bit that the disk flips in them is trained on (docs/limits.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import FIELDS, Rendered
from dsft.system.files import TEMPORARY, sync_folder

VERSION = 9
"""Version of the cache. Increase it when the same file, format, chat template and tokenizer give different
rows, tokens or masks, or when the arrays of a block change: blocks of other versions are not read.
tests/unit/data/test_data_version.py checks it."""
_COLUMNS = {
    "ends": "<i8",  # where the row's tokens end in `tokens`
    "span_ends": "<i8",  # where its spans end in `spans`
    "content": "<u8",  # a hash of its content
    "digests": "<u8",  # a hash of its tokens and spans, of which a run's fingerprint of its data is made
    "trained": "<i4",  # the number of its targets
    "lines": "<u4",  # its line number in the block, from 1
    "ended": "?",  # as in `Rendered`
}
_INDEX = "block.json"


def row_type(fields: Sequence[str]) -> np.dtype[Any]:
    """Return the type of the rows of a block that stores these of FIELDS."""
    own = ((FIELDS[name].column, FIELDS[name].dtype) for name in fields)
    return np.dtype([*_COLUMNS.items(), *own])


class DamagedBlockError(Exception):
    """A block is damaged or belongs to other rows. The message gives the reason."""


@dataclass(frozen=True)
class BlockAccount:
    """Counts and line numbers of a block's lines, besides its rows.

    lines         number of lines, blank ones included
    bad           (line, reason) of the first of the `bad_rows`
    spelled_rows  rows whose content spells special tokens of the chat template
    spelled       line numbers of the first of them
    absent        columns that the spec renames and that no line has
    """

    lines: int = 0
    blank_lines: int = 0
    bad_rows: int = 0
    bad: tuple[tuple[int, str], ...] = ()
    spelled_rows: int = 0
    spelled: tuple[int, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenBlock:
    """A block in memory, or memory-mapped. arrays: `spans`, `tokens` and each column of `row_type`."""

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

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Rendered:
        """Return tokens `start` to `stop` of a row, by default all."""
        ids = self._of("ends", "tokens", row)[start:stop].astype(np.int32)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for first, last in self._of("span_ends", "spans", row):
            trained[max(0, first - start) : max(0, last - start)] = True
        return Rendered(ids, trained, bool(self.arrays["ended"][row]))

    def _of(self, ends: str, what: str, row: int) -> NDArray[Any]:
        stops = self.arrays[ends]
        return self.arrays[what][int(stops[row - 1]) if row else 0 : int(stops[row])]


class BlockBuilder:
    """Collects the rows of a block in memory while it is tokenized. dtype: of the tokens, <u2 or <i4; fields:
    names of FIELDS that are stored."""

    def __init__(self, dtype: str, fields: Sequence[str]) -> None:
        self._dtype, self._tokens, self._spans = dtype, bytearray(), bytearray()
        self._fields, self._type = fields, row_type(fields)
        self._columns: dict[str, array[Any]] = {
            name: array(self._type[name].char.replace("?", "B")) for name in self._type.names or ()
        }

    def add(self, rendered: Rendered, *, line: int, content: int, own: Mapping[str, float]) -> None:
        ids = rendered.input_ids
        edges = np.flatnonzero(np.diff(rendered.trained.astype(np.int8), prepend=0, append=0))
        spans = edges.astype("<i4").tobytes()
        self._tokens += ids.astype(self._dtype).tobytes()
        self._spans += spans
        digest = hashlib.blake2b(ids.astype("<i4", copy=False).tobytes() + spans, digest_size=8).digest()
        values: dict[str, float] = {
            "ends": len(self._tokens) // np.dtype(self._dtype).itemsize,
            "span_ends": len(self._spans) // 8,
            "content": content,
            "digests": int.from_bytes(digest, "little"),
            "trained": int(np.count_nonzero(rendered.trained[1:])),
            "lines": line,
            "ended": rendered.ended,
        }
        values |= {FIELDS[name].column: own.get(name, FIELDS[name].missing) for name in self._fields}
        for name, value in values.items():
            self._columns[name].append(value)

    def block(self, account: BlockAccount) -> TokenBlock:
        columns = {name: np.array(values, self._type[name]) for name, values in self._columns.items()}
        spans = np.frombuffer(self._spans, "<i4").reshape(-1, 2)
        return TokenBlock(
            account, columns | {"spans": spans, "tokens": np.frombuffer(self._tokens, self._dtype)}
        )


# --- the folder -------------------------------------------------------------------------------------------


def save_block(path: Path, block: TokenBlock, key: str, index: int) -> None:
    """Write block `index` of `key` to a temporary folder, fsync it and rename it. Raises OSError."""
    aside = path.with_name(path.name + TEMPORARY)
    of_rows = {name: values for name, values in block.arrays.items() if name not in ("spans", "tokens")}
    rows = np.empty(len(block), [(name, values.dtype) for name, values in of_rows.items()])
    for name, values in of_rows.items():
        rows[name] = values
    about = [key, index, asdict(block.account)]
    arrays = {"rows": rows, "spans": block.arrays["spans"], "tokens": block.arrays["tokens"]}
    try:
        aside.mkdir()
        for name, values in arrays.items():
            with (aside / f"{name}.npy").open("wb") as file:
                header = np.lib.format.header_data_from_array_1_0(values)
                np.lib.format.write_array_header_1_0(file, header)
                file.write(values.data)  # the error of np.save for a full disk has no errno
                file.flush()
                os.fsync(file.fileno())
        with (aside / _INDEX).open("w", encoding="utf-8") as text:
            json.dump([_checksum(about, **arrays), *about], text)
            text.flush()
            os.fsync(text.fileno())
        sync_folder(aside)
        remove_block(path)  # a damaged one
        aside.rename(path)
    finally:
        remove_block(aside)


def remove_block(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def open_block(
    path: Path, key: str | None = None, index: int = 0, fields: Sequence[str] = ("label",)
) -> TokenBlock:
    """Memory-map a block. key, index: that it must have, with all but the values of its tokens as they were
    written; None for a block that this process has verified. fields: those of its rows.

    Raises FileNotFoundError if it does not exist, DamagedBlockError if it is incomplete or not block `index`
    of `key`, OSError if it cannot be read.
    """
    try:
        checksum, *about = json.loads((path / _INDEX).read_bytes())
        rows, spans, tokens = (_mapped(path / f"{name}.npy") for name in ("rows", "spans", "tokens"))
        if key is not None and about[:2] != [key, index]:
            raise DamagedBlockError("it belongs to other rows")
        if key is not None and _checksum(about, rows, spans, tokens) != checksum:
            raise DamagedBlockError("its checksum does not match its index")
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in about[2].items()}
        account = BlockAccount(**known | {"bad": tuple(map(tuple, known["bad"]))})
        columns = {name: rows[name] for name in row_type(fields).names or ()}
    except (OSError, DamagedBlockError):
        raise
    except Exception:  # errors of numpy and json for damaged files have no common class
        raise DamagedBlockError("it is truncated, or damaged") from None
    return TokenBlock(account, columns | {"spans": spans, "tokens": tokens})


def _mapped(path: Path) -> NDArray[Any]:
    found = np.load(path, mmap_mode="r")
    if found.offset + found.nbytes != path.stat().st_size:
        raise ValueError
    return np.asarray(found)  # np.memmap is slower to slice


def _checksum(about: list[Any], rows: NDArray[Any], spans: NDArray[np.int32], tokens: NDArray[Any]) -> str:
    """Return a hash of everything but the values of the tokens."""
    digest = hashlib.blake2b(json.dumps([about, tokens.dtype.str, tokens.shape]).encode(), digest_size=32)
    for values in (rows, spans):
        digest.update(f"{values.dtype.str} {values.shape}".encode())
        digest.update(values.data)
    return digest.hexdigest()
