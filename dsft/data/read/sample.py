"""Choose rows that are spread over the files of a source, to estimate from them what all rows give."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from dsft.data.read.columns import row_counts
from dsft.data.read.files import Block, DataFile, is_in_lines, readable
from dsft.data.read.lines import MAX_LINE, block_starts

PIECES = 16  # places of a source that rows are taken from
MOST_READ = 64 << 20  # bytes of a file that has to be read whole
UNPACKED = 4  # bytes for each byte of a compressed file, about

T = TypeVar("T")


class NotSampledError(Exception):
    """The reason why a file's rows cannot be sampled."""


def sample(files: Sequence[DataFile], most: int) -> tuple[list[Block], float]:
    """Return blocks of a source's files that have about `most` bytes of rows, and the share of all rows that
    they have, if rows of all files are equally long. Raises MissingInputError if a file cannot be read,
    NotSampledError if one is too large to be read whole and has to be."""
    if files[0].kind == "builtin":
        return [Block(files[0])], 1.0
    sizes = list(map(_size, files))
    ends, total = list(accumulate(sizes)), sum(sizes)
    marks = (total * (2 * i + 1) // (2 * PIECES) for i in range(PIECES))  # in the middle of each 16th
    pieces = Counter(bisect_right(ends, mark) for mark in marks) if total else {0: 1}
    blocks: list[Block] = []
    read = 0.0
    for number, count in sorted(pieces.items()):
        with readable(files[number]):
            mine, share = _of_file(files[number], sizes[number], count, max(1, most // PIECES))
        blocks += mine
        read += share * sizes[number]
    return blocks, read / total if total else 1.0


def _size(file: DataFile) -> int:
    with readable(file):
        return Path(file.path).stat().st_size


def _of_file(file: DataFile, size: int, pieces: int, most: int) -> tuple[list[Block], float]:
    """Return blocks of a file of `size` bytes, of at most about `most` bytes each, and the share of its rows
    that they have."""
    path = Path(file.path)
    if is_in_lines(file):
        return _lines(file, size, pieces, most)
    if file.kind in ("parquet", "arrow"):
        counts, unpacked = row_counts(path, file.kind), size * (UNPACKED if file.kind == "parquet" else 1)
        rows = max(1, most * sum(counts) // max(1, unpacked))  # of a piece
        return _columns(file, counts, pieces, rows) if sum(counts) else ([Block(file)], 1.0)
    unpacked = size * UNPACKED if file.is_compressed else size
    if unpacked > MOST_READ:
        raise NotSampledError(
            f"{file.name} is too large for a look ({size >> 20} MiB, to be read from its start)"
        )
    every = max(1, unpacked // (pieces * most))
    return [Block(file, every=every)], 1 / every


def _lines(file: DataFile, size: int, pieces: int, most: int) -> tuple[list[Block], float]:
    path, blocks = Path(file.path), list[Block]()
    starts = block_starts(path, max(1, -(-size // (2 * pieces))))
    starts = starts[1::2] or starts  # a piece begins in the middle of its part of the file
    with path.open("rb") as opened:
        for start, end in zip(starts, [*starts[1:], size], strict=True):
            stop = opened.seek(start)
            while stop < min(end, start + most) and (line := opened.readline(MAX_LINE)):
                stop += len(line)
            blocks.append(Block(file, len(blocks), start, stop))
    return blocks, sum((block.stop or 0) - block.start for block in blocks) / max(1, size)


def _columns(file: DataFile, counts: Sequence[int], pieces: int, rows: int) -> tuple[list[Block], float]:
    """counts: rows of each row group or record batch; rows: of a piece."""
    blocks, taken = [], 0
    for number in _spread(range(len(counts)), pieces):
        before, here = sum(counts[:number]), counts[number]
        if file.kind == "parquet":
            stop = before + min(rows, here)
            blocks.append(Block(file, number, before, stop))
            taken += stop - before
        else:
            every = max(1, here // rows)
            blocks.append(Block(file, number, number, number + 1, every))
            taken += -(-here // every)
    return blocks, taken / sum(counts)


def _spread(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spread."""
    count = min(most, len(items))
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
