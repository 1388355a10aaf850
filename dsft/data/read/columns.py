"""Read the rows of Parquet and Arrow files as Python values. Row numbers, from 1, serve as line numbers.

A block is a range of rows (Parquet) or of record batches (Arrow, file and stream format). Only this module
imports pyarrow, when such a file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from dsft.data.read.lines import BLOCK_BYTES, STOPS
from dsft.data.rows import Line

if TYPE_CHECKING:
    import pyarrow

_BYTES_AT_ONCE = 4 << 20  # bytes of rows converted to Python values together
_MAX_ROWS_AT_ONCE = 1000
_MAX_PARTS = 16
"""Maximum number of blocks of one row group, on average."""


def parquet_starts(path: Path) -> list[int]:
    """Return the rows at which blocks begin; [0] for a file that cannot be read. A block that begins inside a
    row group decodes the group's rows before it in vain, which costs little compared with tokenizing."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows, groups = file.metadata.num_rows, file.metadata.num_row_groups
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(groups))
    except _read_errors():
        return [0]
    count = max(1, min(size // BLOCK_BYTES, _MAX_PARTS * groups, rows))
    return [rows * part // count for part in range(count)]


def row_counts(path: Path, kind: str) -> list[int]:
    """Return the rows of each row group of a Parquet file, or of each record batch of an Arrow file; [] for a
    file that cannot be read."""
    import pyarrow.parquet

    try:
        if kind == "arrow":
            return [batch.num_rows for batch in _batches(path, 0, None)]
        with pyarrow.parquet.ParquetFile(path) as file:
            return [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
    except _read_errors():
        return []


def parquet_rows(path: Path, start: int, stop: int | None) -> Iterator[Line]:
    return _lines(lambda: _parquet_batches(path, start, stop), "Parquet")


def _parquet_batches(path: Path, start: int, stop: int | None) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow.parquet

    # these settings read a row group's columns in pieces instead of whole
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        _check_names(file.schema_arrow.names)
        all_groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        first = [0, *accumulate(group.num_rows for group in all_groups)]
        stop = first[-1] if stop is None else stop
        needed = [i for i in range(len(all_groups)) if first[i] < stop and first[i + 1] > start]
        if not needed:
            return
        groups, row = [all_groups[i] for i in needed], first[needed[0]]
        at_once = _rows_at_once(sum(g.total_byte_size for g in groups), sum(g.num_rows for g in groups))
        for batch in file.iter_batches(at_once, needed, use_threads=False):
            begin, end = max(start, row), min(stop, row + batch.num_rows)
            if begin < end:
                yield batch.slice(begin - row, end - begin)
            row += batch.num_rows
            if row >= stop:
                return


def arrow_starts(path: Path) -> list[int]:
    """Return the record batches at which blocks begin."""
    sizes = []
    try:
        for batch in _batches(path, 0, None):
            sizes.append(batch.get_total_buffer_size())
    except _read_errors():
        sizes.append(BLOCK_BYTES)  # for the record batch that cannot be read
    return _block_starts(sizes)


def arrow_rows(path: Path, start: int, stop: int | None) -> Iterator[Line]:
    return _lines(lambda: _batches(path, start, stop), "Arrow")


class _ColumnsError(ValueError):
    """The columns of a file cannot be used, so it has no valid row."""


def _read_errors() -> tuple[type[Exception], ...]:
    """Return the errors that pyarrow raises for a file that is damaged or of another kind. An OSError with an
    errno means something else."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError)


def _block_starts(sizes: list[int]) -> list[int]:
    """Return the indices of the parts that begin a block. A block ends once it has BLOCK_BYTES."""
    starts, size = [0], 0
    for index, part in enumerate(sizes):
        if size >= BLOCK_BYTES:
            starts.append(index)
            size = 0
        size += part
    return starts


def _rows_at_once(size: int, rows: int) -> int:
    return max(1, min(_MAX_ROWS_AT_ONCE, _BYTES_AT_ONCE * rows // max(1, size)))


def _check_names(names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _ColumnsError(f'the column "{name}" appears twice in the file')


def _batches(path: Path, start: int, stop: int | None) -> Iterator[pyarrow.RecordBatch]:
    """Yield record batches `start` to `stop` of a memory-mapped file; unused parts are never read."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(mapped)
            _check_names(file.schema.names)
            for index in range(start, file.num_record_batches if stop is None else stop):
                yield file.get_batch(index)
            return
        mapped.seek(0)
        stream = pyarrow.ipc.open_stream(mapped)
        _check_names(stream.schema.names)
        for index, batch in enumerate(stream):
            if stop is not None and index >= stop:
                return
            if index >= start:
                yield batch


def _lines(batches: Callable[[], Iterator[pyarrow.RecordBatch]], kind: str) -> Iterator[Line]:
    number = 1
    try:
        for batch in batches():
            yield from _numbered(batch, number)
            number += batch.num_rows
    except _read_errors() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).split("\n")[0]
        if not isinstance(error, _ColumnsError):
            reason = f"not {kind}, or damaged: {reason}"
        yield Line(number, mistake=f"{reason}{STOPS}")


def _numbered(batch: pyarrow.RecordBatch, number: int) -> Iterator[Line]:
    """Yield the rows of a batch, converting some at a time; all of these have a mistake if one cannot be
    read."""
    at_once = _rows_at_once(batch.get_total_buffer_size(), batch.num_rows)
    for start in range(0, batch.num_rows, at_once):
        part, first = batch.slice(start, at_once), number + start
        try:
            part.validate(full=True)  # pyarrow follows offsets beyond their buffers blindly
            rows = part.to_pylist()
        except (ValueError, OverflowError) as error:  # such as a date that Python cannot represent
            last, reason = first + part.num_rows - 1, str(error).split("\n")[0]
            mistake = f"rows {first} to {last} cannot be read: {reason}"
            yield from (Line(place, mistake=mistake) for place in range(first, last + 1))
        else:
            yield from (Line(place, row) for place, row in enumerate(rows, start=first))
