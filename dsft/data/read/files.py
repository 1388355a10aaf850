"""Find the files of a source, divide a file into blocks, and read the lines of a block.

Several processes can read the blocks of one file at once, in any order; every process finds the same blocks.
The order of rows is that of the files, of their blocks, and of the lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from dsft.data.read import builtin
from dsft.data.read.columns import arrow_rows, arrow_starts, parquet_rows, parquet_starts
from dsft.data.read.csv_rows import csv_rows
from dsft.data.read.json_rows import is_list, json_lines, json_list
from dsft.data.read.lines import BLOCK_BYTES, BYTE_ORDER_MARK, block_starts, first_bytes, is_blank, lines
from dsft.data.rows import Line
from dsft.errors import MissingInputError
from dsft.spec.listing import NoDataFileError, local_files
from dsft.spec.sources import BUILTIN_PREFIX, HUB_FORM, HubData, hub_data, kind_of
from dsft.system.digest import content_digest
from dsft.system.hub import hub_obstacle
from dsft.system.json_file import special_kind

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class DataFile:
    """A data file.

    name   the file's name in messages
    path   its path; "" for built-in rows
    kind   as in `dsft.spec.sources.KINDS`, or "builtin"
    notes  messages about the source, on its first file only
    """

    name: str
    path: str = ""
    kind: str = "builtin"
    notes: tuple[str, ...] = ()

    @property
    def is_compressed(self) -> bool:
        return self.path.lower().endswith(".gz")


@dataclass(frozen=True)
class Block:
    """A part of a file that is read independently. index: from 0; start, stop: in bytes, rows or record
    batches, depending on the file's kind; stop None: to the end; every: only each `every`-th row is read."""

    file: DataFile
    index: int = 0
    start: int = 0
    stop: int | None = None
    every: int = 1


@contextmanager
def readable(file: DataFile) -> Iterator[None]:
    """Turn an OSError into a MissingInputError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise MissingInputError(
            f"data {file.name}: cannot be read ({reason}); check its permissions"
        ) from error


def data_files(name: str) -> tuple[DataFile, ...]:
    """Return the files of the source `name` (`path` in the spec), in the order of their rows. Raises
    MissingInputError if there is none."""
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
        paths, notes = _hub_files(name, hub)
        files = [DataFile(f"{hub.id}/{path.name}", str(path), "arrow") for path in paths]
    else:
        special = special_kind(Path(name))
        what = f"it is {special}, not a file" if special else "there is no such file"
        raise MissingInputError(f"data {name}: {what}; paths are relative to the working folder")
    return (replace(files[0], notes=tuple(notes)), *files[1:])


def _hub_files(name: str, hub: HubData) -> tuple[list[Path], list[str]]:
    """Return the Arrow files of a data set of the hub, which `datasets` keeps in its cache and downloads if
    needed, and a note with its revision. `datasets` never runs code of the repository. Raises
    MissingInputError if it cannot be loaded or has no row."""
    hub_obstacle()  # before `datasets` reads the variables that it sets
    import datasets

    try:
        data = datasets.load_dataset(hub.id, hub.subset, split=hub.split, revision=hub.revision)
    except Exception as error:  # of many libraries: no connection, unknown id, split or subset, no access
        raise MissingInputError(_hub_refusal(name, error)) from error
    files = [Path(entry["filename"]) for entry in data.cache_files]
    if not files:
        raise MissingInputError(f"data {name}: the split {hub.split} of {hub.id} has no rows; name another")
    commits = [part for part in files[0].parts if _COMMIT.fullmatch(part)]
    revision = commits[-1] if commits else "unknown"
    if _COMMIT.fullmatch(hub.revision or "") and revision != hub.revision:  # offline, `datasets` takes any
        raise MissingInputError(
            f"data {name}: this machine's cache has only revision {revision}; name that, or download yours "
            "first"
        )
    note = f"{name}: from the hub, split {hub.split}, revision {revision}, {len(data):,} rows"
    return files, [note]


def _hub_refusal(name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    if os.environ.get("HF_DATASETS_OFFLINE", "0") not in ("", "0"):
        obstacle: str | None = "HF_DATASETS_OFFLINE=1 is set"
    else:
        obstacle = hub_obstacle()
    if obstacle is not None:
        reason, way_out = obstacle, "download it once into the cache of this machine"
    else:
        way_out = (
            f"correct the path ({HUB_FORM}), set HF_ENDPOINT to a mirror, or set HF_TOKEN if the data set is "
            "private"
        )
    return f"data {name}: there is no such file, and it cannot be loaded from the hub ({reason}); {way_out}"


def blocks(file: DataFile) -> tuple[Block, ...]:
    """Return the blocks of a file, a function of its content, without reading all of it. Raises
    MissingInputError if the file cannot be read."""
    with readable(file):
        starts: list[int | None] = [*_starts(file), None]
    pairs = zip(starts, starts[1:], strict=False)
    return tuple(Block(file, i, start or 0, stop) for i, (start, stop) in enumerate(pairs))


def read_block(block: Block) -> Iterator[Line]:
    """Yield the lines of a block, numbered from 1, blank ones included; a line that is no row has a mistake.
    Reads lazily. Raises MissingInputError if the file cannot be read."""
    with readable(block.file):
        yield from islice(_READ[block.file.kind](block), 0, None, block.every)


def file_lines(file: DataFile) -> Iterator[Line]:
    """Yield all lines of a file as `read_block` does, numbered within the file."""
    before = 0
    for block in blocks(file):
        number = 0
        for line in read_block(block):
            number = line.number
            yield replace(line, number=before + number)
        before += number


def file_digest(file: DataFile, folder: Path | None = None) -> str:
    """Return a sha256 of a file's content, kind and block size: files with equal digests have equal blocks.

    The content's digest is cached in `folder`, so that an unchanged file is not read again. Raises
    MissingInputError if the file cannot be read, DataError if it changes while it is read.
    """
    read_as = json.dumps([file.kind, file.is_compressed, BLOCK_BYTES])
    if file.kind == "builtin":
        rows = builtin.builtin_rows(file.name.removeprefix(BUILTIN_PREFIX))
        content = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    else:
        with readable(file):
            content = content_digest(Path(file.path), folder)
    return hashlib.sha256(f"{read_as} {content}".encode()).hexdigest()


def file_notes(file: DataFile) -> tuple[str, ...]:
    """Return the messages about a file: its notes, and that a byte order mark was skipped."""
    if file.kind in ("builtin", "parquet", "arrow"):
        return file.notes
    with readable(file):
        beginning = first_bytes(Path(file.path), compressed=file.is_compressed)
    if not beginning.startswith(BYTE_ORDER_MARK):
        return file.notes
    return (*file.notes, f"{file.name}: a byte order mark at the start was skipped")


def _starts(file: DataFile) -> list[int]:
    """Return where the blocks of a file start, in bytes, rows or record batches."""
    path = Path(file.path)
    if file.kind == "parquet":
        return parquet_starts(path)
    if file.kind == "arrow":
        return arrow_starts(path)
    return block_starts(path) if is_in_lines(file) else [0]


def is_in_lines(file: DataFile) -> bool:
    """Return whether a file can be read from any of its lines on."""
    if file.is_compressed or file.kind not in ("jsonl", "text", "json"):
        return False
    return file.kind != "json" or not is_list(Path(file.path))


def _texts(block: Block) -> Iterator[tuple[str, str | None]]:
    file = block.file
    return lines(Path(file.path), block.start, block.stop, compressed=file.is_compressed)


def _json(block: Block) -> Iterator[Line]:
    path, compressed = Path(block.file.path), block.file.is_compressed
    if block.start == 0 and is_list(path, compressed=compressed):
        return json_list(path, compressed=compressed)
    return json_lines(_texts(block))


def _text(block: Block) -> Iterator[Line]:
    """Yield a row per line of a text file that is not blank."""
    for number, (text, mistake) in enumerate(_texts(block), start=1):
        is_row = mistake is None and not is_blank(text)
        yield Line(number, {"text": text.removesuffix("\r")} if is_row else None, mistake)


def _builtin(block: Block) -> Iterator[Line]:
    name = block.file.name
    try:
        rows = builtin.builtin_rows(name.removeprefix(BUILTIN_PREFIX))
    except KeyError as error:
        names = ", ".join(BUILTIN_PREFIX + one for one in builtin.NAMES)
        raise MissingInputError(f"data {name}: dsft has no such built-in rows; it has {names}") from error
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
