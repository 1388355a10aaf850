"""What a row means: its format, found from its keys, and the text, conversation or pair that it holds.

Takes the rows of a file as JSON-like mappings. Gives Rows. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsft.data.read.json_rows import kind
from dsft.data.rows import BadRowError, Conversation, Line, Message, Row, Text

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


class Source(Protocol):
    """What is read of a `data.train` or `data.eval` entry here."""

    @property
    def format(self) -> str | None: ...
    @property
    def columns(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Format:
    """`reason` says why the format was taken, `by` what decided it."""

    name: str
    reason: str
    by: str
    columns: Mapping[str, str]


def choose(source: Source, lines: Sequence[Line], task: str) -> Format:
    """The format of a file by its first lines, checked against what the task takes. Raises BadRowError."""
    objects = [(line.number, dict(line.row)) for line in lines if line.row is not None]
    return _format(source, objects, task)


def convert(row: Mapping[str, Any], found: Format) -> Row:
    """Raises BadRowError where the row is not what its file's format says."""
    renamed = _renamed(dict(row), found.columns)
    _check_keys(row, renamed, found, found.columns)
    return Row((_CONVERT[found.name](renamed),))


# --- which format -----------------------------------------------------------------------------------------


def _check_columns(source: Source) -> None:
    names = COLUMNS.get(source.format or "", sum(COLUMNS.values(), ()))
    for ours in source.columns:
        if ours not in names:
            raise BadRowError(f'columns has "{ours}"; what can be renamed is {_listed(names)} (ours: theirs)')


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names. A column that `columns` takes from elsewhere never stands for itself."""
    kept = {key: value for key, value in row.items() if key not in columns}
    return kept | {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}


def _format(source: Source, objects: Sequence[tuple[int, dict[str, Any]]], task: str) -> Format:
    """The format of a file and why, checked against what the task takes."""
    _check_columns(source)
    found = (
        _named(source.format, source.columns)
        if source.format is not None
        else _detected(objects, source.columns)
    )
    taken = TASK_FORMATS[task]
    if found.name not in taken:
        raise BadRowError(
            f"{found.name} rows, and task {task} takes {', '.join(taken)}; change the task or the file"
        )
    return found


def _named(name: str, columns: Mapping[str, str]) -> Format:
    if name not in COLUMNS:
        raise BadRowError(f'format "{name}" is not read; the formats are {", ".join(COLUMNS)}')
    return Format(name, f"read as {name}, as the spec says", f"the spec says format: {name}", columns)


def _matches(row: Mapping[str, Any]) -> list[str]:
    return [name for name, required in REQUIRED.items() if all(key in row for key in required)]


def _detected(objects: Sequence[tuple[int, dict[str, Any]]], columns: Mapping[str, str]) -> Format:
    """The format of the first row that has one; the other rows are held to it."""
    for line, row in objects:
        matches = _matches(_renamed(row, columns))
        if len(matches) > 1:
            raise BadRowError(f"fits {' and '.join(matches)}; say which with format: {matches[0]}")
        if matches:
            name = matches[0]
            keys = [columns.get(key, key) for key in REQUIRED[name]]
            reason = f"detected {name}: every row has {' and '.join(_listed([key]) for key in keys)}"
            return Format(name, reason, f"line {line} is {name}", columns)
    first = objects[0][1]
    for name, needed in NOT_BUILT.items():
        if needed <= first.keys():
            raise BadRowError(
                f"{name} rows ({_listed(sorted(needed))}) are not built yet; write them as messages"
            )
    unfound = [theirs for theirs in columns.values() if theirs not in first]
    if unfound:
        raise BadRowError(f"columns names {_listed(unfound)}, and the row has {_listed(first) or 'no keys'}")
    formats = "; ".join(f"{name} needs {_listed(required)}" for name, required in REQUIRED.items())
    raise BadRowError(
        f"no format fits the keys {_listed(first)}: {formats}; name yours with columns: {{ours: theirs}}"
    )


def _check_keys(
    row: Mapping[str, Any], renamed: Mapping[str, Any], found: Format, columns: Mapping[str, str]
) -> None:
    """A row that lacks what its file's format needs."""
    missing = [key for key in REQUIRED[found.name] if key not in renamed]
    others = [name for name in _matches(renamed) if name != found.name]
    if missing and others:
        raise BadRowError(f"a row of {others[0]}, and {found.by}; a file holds rows of one format")
    if missing:
        theirs = [columns.get(key, key) for key in missing]
        raise BadRowError(f"{_listed(theirs)} is missing; the row has {_listed(row) or 'no keys'}")


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in names)


# --- from an object to a row ------------------------------------------------------------------------------


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f'"{name}" is {kind(value)}; it must be a string')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRowError(
            f'"{name}" holds half of a surrogate pair at character {error.start + 1}, which is no text'
        ) from None
    return value


def _text(row: Mapping[str, Any]) -> Text:
    return Text(((_string(row["text"], "text"), True),))


def _conversation(row: Mapping[str, Any]) -> Conversation:
    listed = row["messages"]
    if not isinstance(listed, list):
        raise BadRowError(f'"messages" is {kind(listed)}; it must be a list of role and content')
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(listed))
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRowError('"messages" has no assistant turn, so there is nothing to train on')
    return Conversation(messages)


def _message(message: object, name: str) -> Message:
    if not isinstance(message, dict):
        raise BadRowError(f'"{name}" is {kind(message)}; it must be an object with role and content')
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        has = _listed(message) or "no keys"
        raise BadRowError(f'"{missing[0]}" is missing in "{name}", which has {has}')
    unknown = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
    if unknown:
        raise BadRowError(f'"{name}" has "{unknown[0]}"; only role and content are read so far')
    role = _string(message["role"], f"{name}.role")
    if role not in ROLES:
        raise BadRowError(f'"{name}.role" is "{role[:40]}"; the roles are {", ".join(ROLES)}')
    return {"role": role, "content": _string(message["content"], f"{name}.content")}


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    if row.get("history"):
        raise BadRowError('"history" is not read yet; put the earlier turns into "messages"')
    given = {key: _string(row[key], key) for key in COLUMNS["alpaca"][:4] if row.get(key) is not None}
    for key in REQUIRED["alpaca"]:
        if key not in given:
            raise BadRowError(f'"{key}" is null; it must be a string')
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
    return Conversation(system + turns)


_CONVERT: Mapping[str, Callable[[Mapping[str, Any]], Text | Conversation]] = {
    "messages": _conversation,
    "alpaca": _alpaca,
    "text": _text,
}
