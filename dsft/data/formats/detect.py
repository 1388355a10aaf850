"""Which format a file's rows have, from their keys and the kind of their values, and why.

Takes the first rows of a file. Gives a Format. Raises BadRowError. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dsft.data.formats.answers import is_desirable
from dsft.data.formats.values import Fields, listed
from dsft.data.rows import BadRowError, Line
from dsft.spec.formats import NEEDS, column_names
from dsft.spec.task import TASKS

_ASKED_FOR: Mapping[str, str] = {
    "preference": "trains on the chosen answers",
    "kto": "trains on the answers labelled true",
}
"""What sft does with these, where the spec names the format."""
_CLAIMED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("conversations", "chosen", "rejected"), ("sharegpt",)),
    (("messages", "rejected_response"), ("messages",)),
    (("messages", "rejected_messages"), ("messages",)),
    (("prompt", "completion", "label"), ("prompt_completion",)),
    (("kto_tag",), ("messages", "sharegpt", "alpaca", "prompt_completion")),
)
"""Keys with which a row is not of these formats, whose keys it has."""
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")
_ANSWERS = ("completion", "response", "answer", "solution", "output")
"""What files call them, in any case."""
_MEANT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("input", "preferred_output", "non_preferred_output"),
        "columns: {prompt: input, chosen: preferred_output, rejected: non_preferred_output}",
    ),
    (("content",), "columns: {text: content}"),
)
"""Keys that files have, and what to write for them."""


class Source(Protocol):
    """What is read of a `data.train` or `data.eval` entry here."""

    @property
    def format(self) -> str | None: ...
    @property
    def columns(self) -> Mapping[str, str]: ...


@dataclass(frozen=True)
class Format:
    """`reason` says why the format was taken, `by` what decided it; columns are {ours: theirs}; of the task
    depends what of a row is trained on."""

    name: str
    reason: str
    by: str
    columns: Mapping[str, str]
    task: str


def choose(source: Source, lines: Sequence[Line], task: str) -> Format:
    """The format of a file by its first lines, checked against what the task takes. Raises BadRowError."""
    _check_columns(source)
    if source.format is not None:
        found = _named(source.format, lines, source.columns, task)
    else:
        found = _detected(lines, source.columns, task)
    taken = TASKS[task].formats
    if found.name not in taken:
        raise BadRowError(
            f"{found.name} rows, and task {task} takes {', '.join(taken)}; change the task or the file"
        )
    return found


def check_row(fields: Fields, found: Format) -> None:
    """A row that lacks what its file's format needs."""
    needs = NEEDS[found.name]
    row, columns = fields.row, fields.columns
    for keys in needs:
        for key in keys:
            if columns.get(key, key) not in row:
                break
        else:
            return
    nearest = min(needs, key=lambda keys: sum(not fields.has(key) for key in keys))
    missing = [fields.name(key) for key in nearest if not fields.has(key)]
    others = [name for name in _fitting(fields) if name != found.name]
    if others and len(missing) == len(nearest):
        raise BadRowError(f"a row of {others[0]}, and {found.by}; a file holds rows of one format")
    raise BadRowError(f"{listed(missing)} is missing; the row has {listed(row) or 'no keys'}")


# --- which format -----------------------------------------------------------------------------------------


def _check_columns(source: Source) -> None:
    names = column_names(source.format)
    for ours in source.columns:
        if ours not in names:
            raise BadRowError(f'columns has "{ours}"; what can be renamed is {listed(names)} (ours: theirs)')


def _named(name: str, lines: Sequence[Line], columns: Mapping[str, str], task: str) -> Format:
    if name not in NEEDS:
        raise BadRowError(f'format "{name}" is not read; the formats are {", ".join(NEEDS)}')
    first = next((line.row for line in lines if line.row is not None), {})
    reason = f"read as {name}, as the spec says{_as_it_stands(name, Fields(first, columns))}"
    return Format(name, reason, f"the spec says format: {name}", columns, task)


def _detected(lines: Sequence[Line], columns: Mapping[str, str], task: str) -> Format:
    """The format of the first row that has one; the other rows are held to it."""
    rows = [(line.number, Fields(line.row, columns)) for line in lines if line.row is not None]
    for number, fields in rows:
        fits = _fitting(fields)
        if fits:
            name = _one_of(fits, task)
            by = f"line {number} is {name}"
            return Format(name, f"detected {name}: {_why(name, fields)}", by, columns, task)
    raise BadRowError(_no_format(rows[0][1]))


def _fitting(fields: Fields) -> list[str]:
    """The formats whose keys the row has. Null ones, as tables have them, count only where no others fit."""
    said = Fields({key: value for key, value in fields.row.items() if value is not None}, fields.columns)
    return _with_keys(said) or _with_keys(fields)


def _with_keys(fields: Fields) -> list[str]:
    fits = [
        name for name, needs in NEEDS.items() if any(all(fields.has(key) for key in keys) for keys in needs)
    ]
    if "kto" in fits and not _is_labelled(fields):
        return [name for name in fits if name != "kto"]
    claimed = {name for keys, names in _CLAIMED if all(fields.has(key) for key in keys) for name in names}
    return [name for name in fits if name not in claimed]


def _is_labelled(fields: Fields) -> bool:
    """A label that is true or false, which a class's number or name is not."""
    if fields.has("kto_tag"):
        return True
    try:
        is_desirable(fields)
    except BadRowError:
        return False
    return fields.has("completion") or isinstance(fields.get("label"), bool)


def _one_of(fits: Sequence[str], task: str) -> str:
    """Of the formats that a row fits the one that the task takes. Raises BadRowError where several are."""
    taken = [name for name in fits if name in TASKS[task].formats] or fits[:1]
    if len(taken) > 1:
        written = " or ".join(f"format: {name}" + _trains_on(name, task) for name in taken)
        raise BadRowError(f"fits {' and '.join(fits)}; say which with {written}")
    if task == "sft" and taken[0] in _ASKED_FOR:
        asked = f"format: {taken[0]}{_trains_on(taken[0], task)}"
        raise BadRowError(f"{taken[0]} rows, which task sft takes where the spec says so: {asked}")
    return taken[0]


def _trains_on(name: str, task: str) -> str:
    return f" ({_ASKED_FOR[name]})" if task == "sft" and name in _ASKED_FOR else ""


def _why(name: str, fields: Fields) -> str:
    keys = next(keys for keys in NEEDS[name] if all(fields.has(key) for key in keys))
    said = f"every row has {' and '.join(listed([fields.name(key)]) for key in keys)}"
    if name == "sharegpt":
        talk = fields.get("conversations")
        first = talk[0] if isinstance(talk, list) and talk else None
        inside = [
            key for key in ("from", "role", "value", "content") if isinstance(first, dict) and key in first
        ]
        said += f" of {'/'.join(inside)}" if inside else ""
    return f"{said}{_as_it_stands(name, fields)}"


def _as_it_stands(name: str, fields: Fields) -> str:
    """Told of strings, which a chat template would have been expected for."""
    answer = "chosen" if name == "preference" else "completion"
    is_text = name in ("prompt_completion", "preference", "kto") and all(
        isinstance(fields.get(key), str) for key in ("prompt", answer)
    )
    return "; strings, read as they stand, without a chat template" if is_text else ""


def _no_format(fields: Fields) -> str:
    row, columns = fields.row, fields.columns
    unfound = [theirs for theirs in columns.values() if theirs not in row]
    if unfound:
        return f"columns names {listed(unfound)}, and the row has {listed(row) or 'no keys'}"
    meant = _meant(row)
    if meant:
        return f"no format fits the keys {listed(row)}; did you mean {meant}?"
    formats = "; ".join(f"{name} needs {listed(needs[0])}" for name, needs in NEEDS.items())
    return f"no format fits the keys {listed(row)}: {formats}; name yours with columns: {{ours: theirs}}"


def _meant(row: Mapping[str, Any]) -> str:
    """What to write for the keys that the row has; empty where nothing is known of them."""
    for keys, write in _MEANT:
        if all(key in row for key in keys):
            return write
    for key, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and key not in column_names(None):
            for ours, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
                if role in first and content in first:
                    return f"columns: {{{ours}: {key}}}"
    theirs = {key.lower(): key for key in row}
    question = next((theirs[key] for key in _QUESTIONS if key in theirs), None)
    answer = next((theirs[key] for key in _ANSWERS if key in theirs), None)
    if question is None or answer is None:
        return ""
    chat = {"instruction": question, "output": answer}
    for ours, key in (("input", "context"), ("system", "system_prompt")):
        if key in theirs:
            chat[ours] = theirs[key]
    text = {"prompt": question, "completion": answer}
    return f"columns: {_columns(chat)} for a chat, or {_columns(text)} for texts as they stand"


def _columns(names: Mapping[str, str]) -> str:
    """As the spec has them, without those that need no other name."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in names.items() if ours != theirs)}}}"
