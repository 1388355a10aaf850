"""The files that a source means, the blocks that a file is read in, and the lines of a block.

Takes a source of the spec. Blocks of one file can be read by several processes at once, in any order; every
process finds the same ones. Rows stand in the order of the files, of their blocks, and of the lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dsft.data.read import builtin
from dsft.data.read.columns import arrow_rows, arrow_starts, parquet_rows, parquet_starts
from dsft.data.read.csv_rows import csv_rows
from dsft.data.read.hub import hub_files
from dsft.data.read.json_rows import is_list, json_lines, json_list
from dsft.data.read.lines import BYTE_ORDER_MARK, cuts, first_bytes, is_blank, lines
from dsft.data.rows import Line
from dsft.errors import MissingInputError
from dsft.spec.listing import NoDataFileError, local_files
from dsft.spec.sources import BUILTIN_PREFIX, hub_data, kind_of


class Source(Protocol):
    """What is read of a `data.train` or `data.eval` entry here."""

    @property
    def path(self) -> Any: ...


@dataclass(frozen=True)
class DataFile:
    """`name` is what messages call it; `path` where it lies, "" for rows of dsft's own; `kind` as in
    `dsft.spec.sources.KINDS`, or "builtin". `notes`: what is to be said of the source it is the first of."""

    name: str
    path: str = ""
    kind: str = "builtin"
    notes: tuple[str, ...] = ()

    @property
    def is_compressed(self) -> bool:
        return self.path.lower().endswith(".gz")


@dataclass(frozen=True)
class Block:
    """A part of a file that is read by itself; `index` counts from 0. `start`, `stop`: bytes, rows or record
    batches, by the file's kind; without `stop`: to the end."""

    file: DataFile
    index: int = 0
    start: int = 0
    stop: int | None = None


@contextmanager
def readable(file: DataFile) -> Iterator[None]:
    """Says which file it was that the system would not give."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingInputError(f"data {file.name}: cannot be read ({reason}); check its rights") from error


def data_files(source: Source) -> tuple[DataFile, ...]:
    """In the order in which their rows stand. Raises MissingInputError for what is not there."""
    name = str(source.path)
    if name.startswith(BUILTIN_PREFIX):
        return (DataFile(name),)
    try:
        found = local_files(name)
    except NoDataFileError as error:
        raise MissingInputError(f"data {name}: {error}") from error
    hub = hub_data(name)
    if found is not None:
        paths, notes = found
        files = [DataFile(str(path), str(path), kind_of(path.name) or "") for path in paths]
    elif hub is not None:
        paths, notes = hub_files(name, hub)
        files = [DataFile(f"{hub.id}/{path.name}", str(path), "arrow") for path in paths]
    else:
        raise MissingInputError(
            f"data {name}: there is no such file; paths are relative to the working folder"
        )
    return (replace(files[0], notes=tuple(notes)), *files[1:])


def blocks(file: DataFile) -> tuple[Block, ...]:
    """The same ones for the same content, found without reading it all. Raises MissingInputError where the
    file cannot be read."""
    with readable(file):
        starts: list[int | None] = [*_starts(file), None]
    pairs = zip(starts, starts[1:], strict=False)
    return tuple(Block(file, i, start or 0, stop) for i, (start, stop) in enumerate(pairs))


def read_block(block: Block) -> Iterator[Line]:
    """Its lines, numbered from 1 in the block, blank ones too; what is no row is a Line with a mistake.
    Reads as it is asked. Raises MissingInputError where the file cannot be read."""
    with readable(block.file):
        yield from _READ[block.file.kind](block)


def file_notes(file: DataFile) -> tuple[str, ...]:
    """A sentence for each thing that a reader of the run should know of the file."""
    if file.kind in ("builtin", "parquet", "arrow"):
        return file.notes
    with readable(file):
        beginning = first_bytes(Path(file.path), compressed=file.is_compressed)
    if not beginning.startswith(BYTE_ORDER_MARK):
        return file.notes
    return (*file.notes, f"{file.name}: a byte order mark at the start was skipped")


def _starts(file: DataFile) -> list[int]:
    """Of its blocks, in bytes, rows or record batches."""
    path = Path(file.path)
    if file.kind == "parquet":
        return parquet_starts(path)
    if file.kind == "arrow":
        return arrow_starts(path)
    has_lines = file.kind in ("jsonl", "text") or (file.kind == "json" and not is_list(path))
    return cuts(path) if has_lines and not file.is_compressed else [0]


def _texts(block: Block) -> Iterator[tuple[str, str | None]]:
    file = block.file
    return lines(Path(file.path), block.start, block.stop, compressed=file.is_compressed)


def _json(block: Block) -> Iterator[Line]:
    path, compressed = Path(block.file.path), block.file.is_compressed
    if block.start == 0 and is_list(path, compressed=compressed):
        return json_list(path, compressed=compressed)
    return json_lines(_texts(block))


def _text(block: Block) -> Iterator[Line]:
    """Each line that is not blank is a row."""
    for number, (text, mistake) in enumerate(_texts(block), start=1):
        is_row = mistake is None and not is_blank(text)
        yield Line(number, {"text": text.removesuffix("\r")} if is_row else None, mistake)


def _builtin(block: Block) -> Iterator[Line]:
    name = block.file.name
    try:
        rows = builtin.builtin_rows(name.removeprefix(BUILTIN_PREFIX))
    except KeyError as error:
        known = " and ".join(BUILTIN_PREFIX + known for known in builtin.NAMES)
        raise MissingInputError(f"data {name}: there are no such rows in dsft; it has {known}") from error
    return (Line(number, row) for number, row in enumerate(rows, start=1))


_READ: Mapping[str, Callable[[Block], Iterator[Line]]] = {
    "builtin": _builtin,
    "jsonl": lambda block: json_lines(_texts(block)),
    "json": _json,
    "text": _text,
    "csv": lambda block: csv_rows(_texts(block), ","),
    "tsv": lambda block: csv_rows(_texts(block), "\t"),
    "parquet": lambda block: parquet_rows(Path(block.file.path), block.start, block.stop),
    "arrow": lambda block: arrow_rows(Path(block.file.path), block.start, block.stop),
}
