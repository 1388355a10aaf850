"""The files that a source means, the blocks that a file is read in, and the lines of a block.

Takes a source of the spec. Blocks of one file can be read by several processes at once, in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsft.data import builtin
from dsft.data.read.json_rows import JsonRows, read_json_rows
from dsft.data.rows import Line
from dsft.errors import MissingInputError
from dsft.spec.files import SUFFIXES


class Source(Protocol):
    """What is read of a `data.train` or `data.eval` entry here."""

    @property
    def path(self) -> Any: ...


@dataclass(frozen=True)
class DataFile:
    """`name` is what messages call it."""

    name: str


@dataclass(frozen=True)
class Block:
    """A part of a file that is read by itself; `index` counts from 0."""

    file: DataFile
    index: int = 0


def data_files(source: Source) -> tuple[DataFile, ...]:
    """In the order in which their rows stand. Raises MissingInputError for what is not there."""
    name = str(source.path)
    if not name.startswith(builtin.PREFIX):
        _check_file(name)
    return (DataFile(name),)


def blocks(file: DataFile) -> tuple[Block, ...]:
    return (Block(file),)


def read_block(block: Block) -> Iterator[Line]:
    """Its lines, numbered from 1 in the block. Raises MissingInputError where the file cannot be read."""
    read = _objects(block.file.name)
    lines = [Line(number, row=row) for number, row in read.objects]
    lines += [Line(number, mistake=reason) for number, reason in read.mistakes]
    lines += [Line(0) for _ in range(read.blank_lines)]
    return iter(sorted(lines, key=lambda line: line.number))


def file_notes(file: DataFile) -> tuple[str, ...]:
    """A sentence for each thing that a reader of the run should know of the file."""
    if file.name.startswith(builtin.PREFIX):
        return ()
    with Path(file.name).open("rb") as opened:
        has_mark = opened.read(3) == b"\xef\xbb\xbf"
    return (f"{file.name}: a byte order mark at the start was skipped",) if has_mark else ()


def _check_file(name: str) -> None:
    path = Path(name)
    if not path.exists():
        raise MissingInputError(
            f"data {name}: there is no such file; paths are relative to the working folder"
        )
    if not path.is_file():
        raise MissingInputError(f"data {name}: this is a folder; name the files in it one by one")
    if path.suffix.lower() not in SUFFIXES:
        raise MissingInputError(
            f"data {name}: {path.suffix or 'no ending'} is not read; give a .jsonl or .json file"
        )


def _objects(name: str) -> JsonRows:
    """The rows of a file or of dsft's own code, not yet looked into."""
    if name.startswith(builtin.PREFIX):
        return _builtin_objects(name)
    try:
        return read_json_rows(Path(name))
    except OSError as error:
        raise MissingInputError(
            f"data {name}: cannot be read ({error.strerror}); check its rights"
        ) from error


def _builtin_objects(name: str) -> JsonRows:
    try:
        rows = builtin.builtin_rows(name.removeprefix(builtin.PREFIX))
    except KeyError as error:
        known = " and ".join(builtin.PREFIX + known for known in builtin.NAMES)
        raise MissingInputError(f"data {name}: there are no such rows in dsft; it has {known}") from error
    return JsonRows(tuple(enumerate(rows, start=1)), (), 0, False)
