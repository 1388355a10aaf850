"""The rows of a source over its token blocks, and the account of what was read.

Takes opened blocks. Gives TokenRows, whose tokens stay in the memory-mapped files until a row is read.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data import formats
from dsft.data.cache.block import DamagedBlockError, Found, TokenBlock, reopen_block
from dsft.data.cache.build import MAX_BAD, Job
from dsft.data.read.files import DataFile, file_notes
from dsft.data.rows import Account, Rendered, printable
from dsft.errors import DamagedDataError

_MAPPED = 16  # blocks of about 16 MB whose tokens are mapped at a time
_LONG = 1 << 16  # tokens of a row


@dataclass(frozen=True, eq=False)
class StoredRows:
    """TokenRows over blocks. starts: (blocks + 1,) the first row of each, and how many there are; names and
    first_lines: each block's file, and its lines before the block; places: the file of each block's tokens,
    or the block itself where it is in memory."""

    account: Account
    lengths: NDArray[np.int64]
    trained: NDArray[np.int64]
    ended: NDArray[np.bool_]
    content: NDArray[np.uint64]
    desirable: NDArray[np.bool_]
    digest: str
    starts: NDArray[np.int64]
    names: tuple[str, ...]
    first_lines: tuple[int, ...]
    places: tuple[Path | TokenBlock, ...]
    _proven: set[int] = field(default_factory=set, init=False)  # long rows that this process has checked

    def source(self, row: int) -> str:
        which, block, inside = self._find(row)
        return f"{self.names[which]}:{self.first_lines[which] + block.line(inside)}"

    def spans(self, row: int) -> NDArray[np.int64]:
        _, block, inside = self._find(row)
        return block.spans(inside)

    def spans_of(self, rows: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found = [block.spans_of(inside) for block, inside in self._in_blocks(rows)]
        counts, spans = [one for one, _ in found], [one for _, one in found]
        empty = np.zeros(0, np.int64)
        return np.concatenate([empty, *counts]), np.concatenate([empty.reshape(0, 2), *spans])

    def first_tokens(self, rows: NDArray[np.int32]) -> NDArray[np.int64]:
        found = [block.first_tokens(inside) for block, inside in self._in_blocks(rows)]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _in_blocks(self, rows: NDArray[np.int32]) -> Iterator[tuple[TokenBlock, NDArray[np.int64]]]:
        """The block of each run of rows (k,), ascending, and their numbers in it."""
        borders = np.searchsorted(rows, self.starts)
        for which in np.flatnonzero(np.diff(borders)):
            mine = rows[borders[which] : borders[which + 1]].astype(np.int64)
            yield self._find(int(mine[0]))[1], mine - self.starts[which]

    def read(self, row: int) -> Rendered:
        """Raises DamagedDataError where the disk does not give back what was written; the block's file is
        removed then, and made anew by the next start."""
        which, block, inside = self._find(row)
        try:
            return block.read(inside)
        except DamagedBlockError as error:
            raise self._damaged(which, error) from None

    def read_part(self, row: int, start: int, stop: int) -> Rendered:
        """As `read`. A row of more than _LONG tokens is checked at its first part: each of them would read it
        whole."""
        if self.lengths[row] <= _LONG:
            whole = self.read(row)
            return Rendered(whole.input_ids[start:stop], whole.trained[start:stop], whole.ended)
        if row not in self._proven:
            self.read(row)
            self._proven.add(row)
        _, block, inside = self._find(row)
        return block.read_part(inside, start, stop)

    def _find(self, row: int) -> tuple[int, TokenBlock, int]:
        which = int(np.searchsorted(self.starts, row, side="right")) - 1
        place = self.places[which]
        if isinstance(place, TokenBlock):
            return which, place, row - int(self.starts[which])
        try:
            return which, _reopened(place), row - int(self.starts[which])
        except (DamagedBlockError, OSError) as error:
            raise self._damaged(which, error) from None

    def _damaged(self, which: int, error: DamagedBlockError | OSError) -> DamagedDataError:
        path = self.places[which]
        assert isinstance(path, Path), "what is in memory is not damaged"
        reason = error.strerror if isinstance(error, OSError) else str(error)
        with suppress(OSError):
            path.unlink(missing_ok=True)
        _reopened.cache_clear()
        return DamagedDataError(
            f"{path}: {reason}; the file, made of {self.names[which]}, is removed and will be made anew: "
            "start again, and look at the disk's health if it happens again."
        )


@lru_cache(maxsize=_MAPPED)
def _reopened(path: Path) -> TokenBlock:
    return reopen_block(path)


@dataclass(frozen=True)
class Look:
    """What a file's first rows say. format: None where they have none, and `refusal` why, of which line;
    found: what was met on the way."""

    file: DataFile
    has_rows: bool
    format: formats.Format | None
    found: Found
    refusal: tuple[int, str] | None = None


@dataclass(frozen=True)
class Index:
    """What stays in memory of a block: of each row all but its tokens, spans and line."""

    found: Found
    columns: dict[str, NDArray[Any]]
    place: Path | TokenBlock
    num_bytes: int

    @classmethod
    def of(cls, block: TokenBlock, place: Path | TokenBlock) -> Index:
        kept = ("trained", "ended", "content", "desirable", "digests")
        columns = {name: np.array(block.arrays[name]) for name in kept} | {"lengths": block.lengths}
        return cls(block.found, columns, place, block.num_bytes)

    def __len__(self) -> int:
        return len(self.columns["lengths"])


def joined(read: Sequence[Look], opened: Sequence[tuple[Job, Index]], max_rows: int | None) -> StoredRows:
    """The blocks as one, the first `max_rows` rows of them."""
    columns = {
        name: np.concatenate([np.zeros(0, dtype), *(index.columns[name] for _, index in opened)])[:max_rows]
        for name, dtype in _COLUMNS.items()
    }
    digest = hashlib.sha256(columns["lengths"].astype("<i8", copy=False).data)
    digest.update(columns["digests"].astype("<u8", copy=False).data)
    starts = np.minimum(np.cumsum([0, *(len(index) for _, index in opened)]), len(columns["lengths"]))
    first_lines = []
    lines = 0
    for before, (job, index) in zip([None, *(job for job, _ in opened)], opened, strict=False):
        lines = lines if before is not None and before.block.file == job.block.file else 0
        first_lines.append(lines)
        lines += index.found.lines
    return StoredRows(
        account=_account(read, _as_far_as(opened, max_rows), first_lines),
        **{name: column for name, column in columns.items() if name != "digests"},
        digest=digest.hexdigest(),
        starts=starts,
        names=tuple(job.block.file.name for job, _ in opened),
        first_lines=tuple(first_lines),
        places=tuple(index.place for _, index in opened),
    )


def _as_far_as(opened: Sequence[tuple[Job, Index]], max_rows: int | None) -> list[tuple[Job, Found]]:
    """What was found up to the last row that is taken, as far as it is known by line."""
    found, left = [], max_rows
    for job, index in opened:
        one = index.found
        if left is not None and left < len(index):
            block = index.place if isinstance(index.place, TokenBlock) else reopen_block(index.place)
            last = block.line(left - 1) if left > 0 else 0
            bad = tuple(place for place in one.bad if place[0] < last)
            spelled = tuple(line for line in one.spelled if line <= last)
            one = replace(one, bad=bad, bad_rows=len(bad), spelled=spelled, spelled_rows=len(spelled))
        found.append((job, one))
        left = None if left is None else left - len(index)
    return found


_COLUMNS: Mapping[str, Any] = {
    "lengths": np.int64,
    "trained": np.int64,
    "ended": np.bool_,
    "content": np.uint64,
    "desirable": np.bool_,
    "digests": np.uint64,
}


def _spelled(name: str, blocks: Sequence[tuple[int, Found]]) -> list[str]:
    """A note where contents spell tokens of the chat template. blocks: (lines before it, what was found)."""
    count = sum(found.spelled_rows for _, found in blocks)
    lines = [before + line for before, found in blocks for line in found.spelled]
    if not count:
        return []
    where = ", ".join(map(str, lines[:3])) + (", …" if count > 3 else "")
    rows = "row spells" if count == 1 else "rows spell"
    return [
        f"{name}: {count:,} {rows} tokens of the chat template (line {where}); what is said is read as plain "
        "text, and ends no turn"
    ]


def _account(
    read: Sequence[Look], opened: Sequence[tuple[Job, Found]], first_lines: Sequence[int]
) -> Account:
    notes: list[str] = []
    bad: list[tuple[str, str]] = []
    found = []
    of_file = defaultdict(list)
    for (job, met), first in zip(opened, first_lines, strict=True):
        of_file[job.block.file].append((first, met))
    for look in read:
        notes += file_notes(look.file)
        mine = of_file[look.file] if look.format is not None else [(0, look.found)]
        if look.format is not None:
            notes.append(f"{look.file.name}: {look.format.reason}")
        elif not look.has_rows:
            notes.append(f"{look.file.name}: holds no row")
        notes += _spelled(look.file.name, mine)
        bad += [
            (f"{look.file.name}:{first + line}", printable(reason))
            for first, one in mine
            for line, reason in one.bad
        ]
        found += [one for _, one in mine]
    return Account(
        blank_lines=sum(one.blank_lines for one in found),
        bad_rows=sum(one.bad_rows for one in found),
        bad=tuple(bad[:MAX_BAD]),
        notes=tuple(notes),
        formats=tuple((look.file.name, look.format.name, look.format.reason) for look in read if look.format),
        unread=tuple(
            (f"{look.file.name}:{look.refusal[0]}", look.refusal[1]) for look in read if look.refusal
        ),
    )
