"""The rows of Parquet and Arrow files, as Python values; a row's number, from 1, stands for a line's.

Takes a path and a range of row groups (Parquet) or record batches (Arrow, its file and its stream format).
pyarrow is imported here alone, when such a file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.data.read.lines import BLOCK_BYTES
from dsft.data.rows import Line

if TYPE_CHECKING:
    import pyarrow

_AT_ONCE = 4 << 20  # bytes of rows made Python values together
_MAX_AT_ONCE = 1000


def parquet_starts(path: Path) -> list[int]:
    """Row groups with which blocks begin; of one block for a file that cannot be read."""
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = file.metadata
            sizes = [groups.row_group(i).total_byte_size for i in range(groups.num_row_groups)]
    except _damage():
        return [0]
    return _starts(sizes)


def parquet_rows(path: Path, start: int, stop: int | None) -> Iterator[Line]:
    import pyarrow.parquet

    def batches() -> Iterator[Any]:
        # with these, a row group's columns are read piece by piece, not whole
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check(file.schema_arrow.names)
            groups = range(start, file.metadata.num_row_groups if stop is None else stop)
            size = sum(file.metadata.row_group(i).total_byte_size for i in groups)
            rows = sum(file.metadata.row_group(i).num_rows for i in groups)
            if rows:
                yield from file.iter_batches(_together(size, rows), list(groups), use_threads=False)

    return _lines(batches, "Parquet")


def arrow_starts(path: Path) -> list[int]:
    """Record batches with which blocks begin."""
    sizes = []
    try:
        for batch in _batches(path, 0, None):
            sizes.append(batch.get_total_buffer_size())
    except _damage():
        sizes.append(BLOCK_BYTES)  # of the one that cannot be read
    return _starts(sizes)


def arrow_rows(path: Path, start: int, stop: int | None) -> Iterator[Line]:
    return _lines(lambda: _batches(path, start, stop), "Arrow")


class _ColumnsError(ValueError):
    """Why no row can be made of any record."""


def _damage() -> tuple[type[Exception], ...]:
    """What pyarrow raises for a file that is torn or of another kind. An OSError with an errno is none."""
    import pyarrow

    return (pyarrow.ArrowException, OSError, ValueError)


def _starts(sizes: list[int]) -> list[int]:
    """Of parts with these sizes, which ones begin a block: each holds BLOCK_BYTES or one part more."""
    starts, size = [0], 0
    for index, part in enumerate(sizes):
        if size >= BLOCK_BYTES:
            starts.append(index)
            size = 0
        size += part
    return starts


def _together(size: int, rows: int) -> int:
    return max(1, min(_MAX_AT_ONCE, _AT_ONCE * rows // max(1, size)))


def _check(names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise _ColumnsError(f'the column "{name}" stands twice in the file')


def _batches(path: Path, start: int, stop: int | None) -> Iterator[pyarrow.RecordBatch]:
    """Mapped, not read: what is not looked at costs nothing."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            file = pyarrow.ipc.open_file(mapped)
            _check(file.schema.names)
            for index in range(start, file.num_record_batches if stop is None else stop):
                yield file.get_batch(index)
            return
        mapped.seek(0)
        stream = pyarrow.ipc.open_stream(mapped)
        _check(stream.schema.names)
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
    except _damage() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).split("\n")[0]
        if not isinstance(error, _ColumnsError):
            reason = f"not {kind}, or damaged: {reason}"
        yield Line(number, mistake=f"{reason}; the file is not read further")


def _numbered(batch: pyarrow.RecordBatch, number: int) -> Iterator[Line]:
    """The rows of a batch, some at a time. Where the whole cannot be read, its rows are tried one by one."""
    together = _together(batch.get_total_buffer_size(), batch.num_rows)
    is_one, is_short = batch.num_rows == 1, batch.num_rows <= _MAX_AT_ONCE
    reason = _flaw(batch)
    for start in range(0, batch.num_rows, together):
        part = batch.slice(start, together)
        rows = _values(part) if reason is None else reason
        if not isinstance(rows, str):
            yield from (Line(number + start + index, row) for index, row in enumerate(rows))
        elif is_one or not is_short:
            places = range(number + start, number + start + part.num_rows)
            yield from (Line(place, mistake=f"not to be read: {rows}") for place in places)
        else:
            for index in range(part.num_rows):
                yield from _numbered(part.slice(index, 1), number + start + index)


def _flaw(batch: pyarrow.RecordBatch) -> str | None:
    """Offsets beyond their buffers, which pyarrow would follow blindly, and strings that are no text."""
    import pyarrow

    try:
        batch.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        return str(error).split("\n")[0]
    return None


def _values(batch: pyarrow.RecordBatch) -> list[dict[str, Any]] | str:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # a date beyond Python's, and the like
        return str(error).split("\n")[0]
    return rows
