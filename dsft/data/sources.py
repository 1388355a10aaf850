"""From files of rows to rows with a meaning: text, or a conversation.

Takes the spec's sources. Gives every row with the place it stands at, and what was found out about each
file. Reads the files. Every bad row is named before any is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsft.data import builtin
from dsft.data.json_rows import JsonRows, kind, read_json_rows
from dsft.errors import DataError, MissingInputError, Problem
from dsft.spec.files import SUFFIXES

MAX_SHOWN = 20
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "alpaca": ("instruction", "output", "input", "system", "history"),
    "text": ("text",),
}
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
NOT_BUILT: Mapping[str, frozenset[str]] = {
    "preference": frozenset({"chosen", "rejected"}),
    "sharegpt": frozenset({"conversations"}),
}
"""Known by these keys, to say more than that no format fits."""
TASK_FORMATS: Mapping[str, tuple[str, ...]] = {"sft": ("messages", "alpaca", "text"), "pretrain": ("text",)}
ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, str]
"""{"role": one of ROLES, "content": text}, as chat templates take it."""


class Source(Protocol):
    """What is read of a `data.train` or `data.eval` entry."""

    @property
    def path(self) -> Any: ...
    @property
    def format(self) -> str | None: ...
    @property
    def columns(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Row:
    """`source` is "file:line"; exactly one of `text` and `messages` is there."""

    source: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Rows:
    """The rows of all sources, in the order of the spec and the files. `notes`: a sentence per finding."""

    rows: tuple[Row, ...]
    blank_lines: int
    notes: tuple[str, ...]


class _BadRowError(Exception):
    """The reason alone; whoever catches it knows the place."""


def read_sources(sources: Sequence[Source], task: str) -> Rows:
    """Read and check every row of every source.

    Raises MissingInputError for a file that is not there, DataError with the bad rows of all files (the first
    20 in full), or where no row is left.
    """
    problems: list[Problem] = []
    read = [_read_source(source, task, problems) for source in sources]
    if problems:
        raise data_error(problems, "mistake in the data", "mistakes in the data")
    rows = Rows(
        rows=tuple(row for part in read for row in part.rows),
        blank_lines=sum(part.blank_lines for part in read),
        notes=tuple(note for part in read for note in part.notes),
    )
    if not rows.rows:
        names = ", ".join(str(source.path) for source in sources) or "no file given"
        raise DataError("no rows to train on:", [Problem(names, "holds no row; give a file with rows")])
    return rows


def data_error(problems: Sequence[Problem], one: str, many: str) -> DataError:
    """All problems up to MAX_SHOWN in full, the rest as a number."""
    title = f"{len(problems)} {one if len(problems) == 1 else many}:"
    shown = list(problems[:MAX_SHOWN])
    rest = len(problems) - len(shown)
    if rest:
        shown.append(Problem(f"… and {rest} more", f"the first {MAX_SHOWN} are shown"))
    return DataError(title, shown)


def _read_source(source: Source, task: str, problems: list[Problem]) -> Rows:
    name = str(source.path)
    read = _objects(name)
    mistakes = list(read.mistakes)
    notes = [f"{name}: a byte order mark at the start was skipped"] if read.has_byte_order_mark else []
    rows: list[Row] = []
    if read.objects:
        try:
            found = _format(source, read.objects, task)
            notes.append(f"{name}: {found.reason}")
            rows = _convert(name, read.objects, found, source.columns, mistakes)
        except _BadRowError as error:
            mistakes.append((read.objects[0][0], str(error)))
    else:
        notes.append(f"{name}: holds no row")
    problems += [Problem(f"{name}:{line}", reason) for line, reason in sorted(mistakes)]
    return Rows(tuple(rows), read.blank_lines, tuple(notes))


def _convert(
    name: str,
    objects: Sequence[tuple[int, dict[str, Any]]],
    found: _Format,
    columns: Mapping[str, str],
    mistakes: list[tuple[int, str]],
) -> list[Row]:
    rows = []
    for line, row in objects:
        renamed = _renamed(row, columns)
        try:
            _check_keys(row, renamed, found, columns)
            rows.append(_CONVERT[found.name](f"{name}:{line}", renamed))
        except _BadRowError as error:
            mistakes.append((line, str(error)))
    return rows


def _objects(name: str) -> JsonRows:
    """The rows of a file or of dsft's own code, not yet looked into."""
    if name.startswith(builtin.PREFIX):
        return _builtin_objects(name)
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
    try:
        return read_json_rows(path)
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


# --- which format -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Format:
    """`reason` says why the format was taken, `by` what decided it."""

    name: str
    reason: str
    by: str


def _check_columns(source: Source) -> None:
    names = COLUMNS.get(source.format or "", sum(COLUMNS.values(), ()))
    for ours in source.columns:
        if ours not in names:
            raise _BadRowError(
                f'columns has "{ours}"; what can be renamed is {_listed(names)} (ours: theirs)'
            )


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names. A column that `columns` takes from elsewhere never stands for itself."""
    kept = {key: value for key, value in row.items() if key not in columns}
    return kept | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def _format(source: Source, objects: Sequence[tuple[int, dict[str, Any]]], task: str) -> _Format:
    """The format of a file and why, checked against what the task takes."""
    _check_columns(source)
    found = _named(source.format) if source.format is not None else _detected(objects, source.columns)
    taken = TASK_FORMATS[task]
    if found.name not in taken:
        raise _BadRowError(
            f"{found.name} rows, and task {task} takes {', '.join(taken)}; change the task or the file"
        )
    return found


def _named(name: str) -> _Format:
    if name not in COLUMNS:
        raise _BadRowError(f'format "{name}" is not read; the formats are {", ".join(COLUMNS)}')
    return _Format(name, f"read as {name}, as the spec says", f"the spec says format: {name}")


def _matches(row: Mapping[str, Any]) -> list[str]:
    return [name for name, required in REQUIRED.items() if all(key in row for key in required)]


def _detected(objects: Sequence[tuple[int, dict[str, Any]]], columns: Mapping[str, str]) -> _Format:
    """The format of the first row that has one; the other rows are held to it."""
    for line, row in objects:
        matches = _matches(_renamed(row, columns))
        if len(matches) > 1:
            raise _BadRowError(f"fits {' and '.join(matches)}; say which with format: {matches[0]}")
        if matches:
            name = matches[0]
            keys = [columns.get(key, key) for key in REQUIRED[name]]
            reason = f"detected {name}: every row has {' and '.join(_listed([key]) for key in keys)}"
            return _Format(name, reason, f"line {line} is {name}")
    first = objects[0][1]
    for name, needed in NOT_BUILT.items():
        if needed <= first.keys():
            raise _BadRowError(
                f"{name} rows ({_listed(sorted(needed))}) are not built yet; write them as messages"
            )
    unfound = [theirs for theirs in columns.values() if theirs not in first]
    if unfound:
        raise _BadRowError(f"columns names {_listed(unfound)}, and the row has {_listed(first) or 'no keys'}")
    formats = "; ".join(f"{name} needs {_listed(required)}" for name, required in REQUIRED.items())
    raise _BadRowError(
        f"no format fits the keys {_listed(first)}: {formats}; name yours with columns: {{ours: theirs}}"
    )


def _check_keys(
    row: Mapping[str, Any], renamed: Mapping[str, Any], found: _Format, columns: Mapping[str, str]
) -> None:
    """A row that lacks what its file's format needs."""
    missing = [key for key in REQUIRED[found.name] if key not in renamed]
    others = [name for name in _matches(renamed) if name != found.name]
    if missing and others:
        raise _BadRowError(f"a row of {others[0]}, and {found.by}; a file holds rows of one format")
    if missing:
        theirs = [columns.get(key, key) for key in missing]
        raise _BadRowError(f"{_listed(theirs)} is missing; the row has {_listed(row) or 'no keys'}")


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# --- from an object to a row ------------------------------------------------------------------------------


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _BadRowError(f'"{name}" is {kind(value)}; it must be a string')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRowError(
            f'"{name}" holds half of a surrogate pair at character {error.start + 1}, which is no text'
        ) from None
    return value


def _text(source: str, row: Mapping[str, Any]) -> Row:
    return Row(source, text=_string(row["text"], "text"))


def _conversation(source: str, row: Mapping[str, Any]) -> Row:
    listed = row["messages"]
    if not isinstance(listed, list):
        raise _BadRowError(f'"messages" is {kind(listed)}; it must be a list of role and content')
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(listed))
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadRowError('"messages" has no assistant turn, so there is nothing to train on')
    return Row(source, messages=messages)


def _message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise _BadRowError(f'"{name}" is {kind(message)}; it must be an object with role and content')
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        has = _listed(message) or "no keys"
        raise _BadRowError(f'"{missing[0]}" is missing in "{name}", which has {has}')
    unknown = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
    if unknown:
        raise _BadRowError(f'"{name}" has "{unknown[0]}"; only role and content are read so far')
    role = _string(message["role"], f"{name}.role")
    if role not in ROLES:
        raise _BadRowError(f'"{name}.role" is "{role[:40]}"; the roles are {", ".join(ROLES)}')
    return {"role": role, "content": _string(message["content"], f"{name}.content")}


def _alpaca(source: str, row: Mapping[str, Any]) -> Row:
    if row.get("history"):
        raise _BadRowError('"history" is not read yet; put the earlier turns into "messages"')
    given = {key: _string(row[key], key) for key in COLUMNS["alpaca"][:4] if row.get(key) is not None}
    for key in REQUIRED["alpaca"]:
        if key not in given:
            raise _BadRowError(f'"{key}" is null; it must be a string')
    question = given["instruction"]
    if given.get("input"):
        question = f"{question}\n\n{given['input']}"
    system: tuple[Message, ...] = (
        ({"role": "system", "content": given["system"]},) if given.get("system") else ()
    )
    turns: tuple[Message, ...] = (
        {"role": "user", "content": question},
        {"role": "assistant", "content": given["output"]},
    )
    return Row(source, messages=system + turns)


_CONVERT: Mapping[str, Callable[[str, Mapping[str, Any]], Row]] = {
    "messages": _conversation,
    "alpaca": _alpaca,
    "text": _text,
}
