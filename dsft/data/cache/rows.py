"""Present the token blocks of a source as one TokenRows, with the account of what was read.

Tokens stay in the memory-mapped files until a row is read.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data import formats
from dsft.data.cache.block import BlockAccount, DamagedBlockError, TokenBlock, open_block
from dsft.data.cache.build import MAX_BAD, BlockJob
from dsft.data.formats.values import quoted
from dsft.data.read.files import DataFile, file_notes
from dsft.data.rows import FIELDS, PLACES, Account, Rendered, printable
from dsft.errors import DamagedDataError

_MAPPED = 16  # blocks (of about 16 MB) that are memory-mapped at a time


@dataclass(frozen=True, eq=False)
class StoredRows:
    """TokenRows over the blocks of a source.

    starts       (blocks + 1,) the first row of each block, and the number of rows
    names        the data file of each block
    first_lines  lines of that file before each block
    places       the cache file of each block, or the block itself if it is in memory
    """

    account: Account
    lengths: NDArray[np.int64]
    trained: NDArray[np.int64]
    ended: NDArray[np.bool_]
    content: NDArray[np.uint64]
    values: Mapping[str, NDArray[Any]]
    digest: str
    starts: NDArray[np.int64]
    names: tuple[str, ...]
    first_lines: tuple[int, ...]
    places: tuple[Path | TokenBlock, ...]

    def source(self, row: int) -> str:
        which, block, inside = self._find(row)
        return f"{self.names[which]}:{self.first_lines[which] + block.line(inside)}"

    def spans(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = [block.spans(inside) for block, inside in self._in_blocks(rows)]
        counts, spans = [one for one, _ in found], [one for _, one in found]
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *counts]), np.concatenate([empty.reshape(0, 2), *spans])

    def first_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        found = [block.first_tokens(inside) for block, inside in self._in_blocks(rows)]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _in_blocks(self, rows: NDArray[np.int32]) -> Iterator[tuple[TokenBlock, NDArray[np.int64]]]:
        """Yield each block that holds some of the rows (k,), ascending, with their numbers in the block."""
        borders = np.searchsorted(rows, self.starts)
        for which in np.flatnonzero(np.diff(borders)):
            mine = rows[borders[which] : borders[which + 1]].astype(np.int64)
            yield self._find(int(mine[0]))[1], mine - self.starts[which]

    def read(self, row: int, start: int = 0, stop: int | None = None) -> Rendered:
        _, block, inside = self._find(row)
        return block.read(inside, start, stop)

    def _find(self, row: int) -> tuple[int, TokenBlock, int]:
        """Return the number of the row's block, the block, and the row's number in it. Raises
        DamagedDataError if the cache was removed or damaged since the run began."""
        which = int(np.searchsorted(self.starts, row, side="right")) - 1
        place = self.places[which]
        try:
            block = place if isinstance(place, TokenBlock) else _reopened(place)
        except (DamagedBlockError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DamagedDataError(
                f"{place}: {reason}. It was changed while this run read it; remove it and start again to "
                f"tokenize the rows of {self.names[which]} again."
            ) from None
        return which, block, row - int(self.starts[which])


@lru_cache(maxsize=_MAPPED)
def _reopened(path: Path) -> TokenBlock:
    return open_block(path)


@dataclass(frozen=True)
class FileHead:
    """What the first rows of a data file show.

    format   the file's format; None if it has no row, or none of a known format
    account  the blank and bad lines among the first rows
    refusal  (line, reason) if there are rows and no format fits
    unfilled  lines among the first rows that contain a placeholder such as {{name}}
    columns  those of the first rows
    """

    file: DataFile
    format: formats.Format | None
    account: BlockAccount
    refusal: tuple[int, str] | None = None
    unfilled: tuple[int, ...] = ()
    columns: Sequence[str] = ()


_COLUMNS: Mapping[str, Any] = {
    "lengths": np.int64, "trained": np.int64, "ended": np.bool_, "content": np.uint64, "digests": np.uint64,
}  # fmt: skip


@dataclass(frozen=True)
class BlockIndex:
    """The part of a block that stays in memory: everything except each row's tokens, spans and line."""

    account: BlockAccount
    columns: dict[str, NDArray[Any]]
    place: Path | TokenBlock
    num_bytes: int

    @classmethod
    def of(cls, block: TokenBlock, place: Path | TokenBlock) -> BlockIndex:
        arrays = {**block.arrays, "lengths": block.lengths}
        own = (one.column for one in FIELDS.values() if one.column in arrays)
        columns = {name: np.array(arrays[name]) for name in (*_COLUMNS, *own)}
        return cls(block.account, columns, place, block.num_bytes)

    def __len__(self) -> int:
        return len(self.columns["lengths"])

    def account_of(self, rows: int) -> BlockAccount:
        """Return what was found up to the last of the first `rows` rows, as far as line numbers are
        stored."""
        account = self.account
        if rows == len(self):
            return account
        block = self.place if isinstance(self.place, TokenBlock) else open_block(self.place)
        last = block.line(rows - 1) if rows else 0
        bad = tuple(place for place in account.bad if place[0] < last)
        spelled = tuple(line for line in account.spelled if line <= last)
        return replace(account, bad=bad, bad_rows=len(bad), spelled=spelled, spelled_rows=len(spelled))


def join_blocks(
    heads: Sequence[FileHead],
    opened: Sequence[tuple[BlockJob, BlockIndex]],
    max_rows: int | None,
    share: float,
    fields: Sequence[str],
) -> StoredRows:
    """Concatenate the blocks and keep the first `max_rows` rows. share: of the source's rows; fields: those
    that the blocks have."""

    def joined(name: str, dtype: Any) -> NDArray[Any]:
        columns = (index.columns[name] for _, index in opened)
        return np.concatenate([np.zeros(0, dtype), *columns])[:max_rows]

    columns = {name: joined(name, dtype) for name, dtype in _COLUMNS.items()}
    digest = hashlib.sha256(columns["lengths"].astype("<i8", copy=False).data)
    digest.update(columns.pop("digests").astype("<u8", copy=False).data)
    starts = np.minimum(np.cumsum([0, *(len(index) for _, index in opened)]), len(columns["lengths"]))
    first_lines = []
    accounts: dict[DataFile, list[tuple[int, BlockAccount]]] = defaultdict(list)
    lines: dict[DataFile, int] = defaultdict(int)
    for (job, index), rows in zip(opened, np.diff(starts).tolist(), strict=True):
        file = job.block.file
        first_lines.append(lines[file])
        accounts[file].append((lines[file], index.account_of(rows)))
        lines[file] += index.account.lines
    return StoredRows(
        account=_account(heads, accounts, share),
        **columns,
        values={name: joined(FIELDS[name].column, FIELDS[name].dtype) for name in fields},
        digest=digest.hexdigest(),
        starts=starts,
        names=tuple(job.block.file.name for job, _ in opened),
        first_lines=tuple(first_lines),
        places=tuple(index.place for _, index in opened),
    )


def _account(
    heads: Sequence[FileHead],
    accounts: Mapping[DataFile, Sequence[tuple[int, BlockAccount]]],
    share: float,
) -> Account:
    """Return the account of a source. accounts: (lines of the file before the block, what was found in the
    block), for the blocks of each file."""
    notes: list[str] = []
    bad: list[tuple[str, str]] = []
    found: list[BlockAccount] = []
    for head in heads:
        name = head.file.name
        notes += file_notes(head.file)
        if head.format is not None:
            blocks = accounts.get(head.file, ())
            notes.append(f"{name}: {head.format.reason}")
        else:
            blocks = [(0, head.account)]
            notes += [f"{name}: has no rows"] if head.refusal is None else []
        if head.unfilled:
            lines = f"{', '.join(map(str, head.unfilled[:PLACES]))}{', …' * (len(head.unfilled) > PLACES)}"
            notes.append(
                f"warning: {name}: {len(head.unfilled)} of its first rows contain a placeholder such as "
                f"{{{{name}}}} (line {lines}), and are trained on as they are"
            )
        notes += _spelled(name, blocks)
        bad += [(f"{name}:{first + n}", printable(why)) for first, block in blocks for n, why in block.bad]
        found += [block for _, block in blocks]
    unread = [(f"{one.file.name}:{one.refusal[0]}", one.refusal[1]) for one in heads if one.refusal]
    blocks_read = [set(block.absent) for blocks in accounts.values() for _, block in blocks]
    absent = sorted(set.intersection(*blocks_read)) if blocks_read and share == 1 else []
    if absent:
        first = next(head for head in heads if head.format)
        has = f"the first have {quoted(first.columns)}; correct the name, or leave it out"
        mistake = f"columns names {quoted(absent)}, which no row of the source has; {has}"
        unread.append((first.file.name, mistake))
        bad.insert(0, unread[-1])
    return Account(
        share=share,
        blank_lines=sum(block.blank_lines for block in found),
        bad_rows=sum(block.bad_rows for block in found) + bool(absent),
        bad=tuple(bad[:MAX_BAD]),
        notes=tuple(notes),
        formats=tuple((one.file.name, one.format.name, one.format.reason) for one in heads if one.format),
        unread=tuple(unread),
    )


def _spelled(name: str, blocks: Sequence[tuple[int, BlockAccount]]) -> list[str]:
    """Return a note if rows spell tokens of the chat template, else nothing. blocks: as in `_account`."""
    count = sum(block.spelled_rows for _, block in blocks)
    if not count:
        return []
    lines = [first + line for first, block in blocks for line in block.spelled]
    where = ", ".join(map(str, lines[:3])) + (", …" if count > 3 else "")
    rows = "row spells" if count == 1 else "rows spell"
    return [
        f"{name}: {count:,} {rows} tokens of the chat template (line {where}); these are tokenized as plain "
        "text and end no turn"
    ]
