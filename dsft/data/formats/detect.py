"""Detect the format of a file from the keys of its first rows and the types of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsft.data.formats.answers import is_desirable
from dsft.data.formats.values import Fields, listed
from dsft.data.rows import BadRowError, Line
from dsft.spec.formats import NEEDS, column_names
from dsft.spec.schema import Source
from dsft.spec.task import TASKS

_ASKED_FOR: Mapping[str, str] = {
    "preference": "trains on the chosen answers",
    "kto": "trains on the answers labelled true",
}
"""Formats that sft takes only if the spec names them -> what it then does."""
_CLAIMED: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("conversations", "chosen", "rejected"), ("sharegpt",)),
    (("messages", "rejected_response"), ("messages",)),
    (("messages", "rejected_messages"), ("messages",)),
    (("prompt", "completion", "label"), ("prompt_completion",)),
    (("kto_tag",), ("messages", "sharegpt", "alpaca", "prompt_completion")),
)
"""(keys, formats): a row with all these keys is not of these formats, even though it has their keys."""
_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")
_ANSWERS = ("completion", "response", "answer", "solution", "output")
"""Names of questions and answers in files, in lower case."""
_MEANT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("input", "preferred_output", "non_preferred_output"),
        "columns: {prompt: input, chosen: preferred_output, rejected: non_preferred_output}",
    ),
    (("content",), "columns: {text: content}"),
)
"""(keys of a file, what to write in the spec for them)."""


@dataclass(frozen=True)
class Format:
    """The format of a file.

    reason   a sentence on why the format was chosen
    by       what decided it: the spec, or the first line that has it
    columns  dsft's name -> the file's name
    task     determines what of a row is trained on
    """

    name: str
    reason: str
    by: str
    columns: Mapping[str, str]
    task: str


def choose(source: Source, lines: Sequence[Line], task: str) -> Format:
    """Return the format of a file from its first lines. Raises BadRowError if there is none, or if the task
    does not take it."""
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
    """Raise BadRowError if a row lacks keys that its file's format needs."""
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
        raise BadRowError(f'format "{name}" is unknown; the formats are {", ".join(NEEDS)}')
    first = next((line.row for line in lines if line.row is not None), {})
    reason = f"read as {name}, as the spec says{_as_it_stands(name, Fields(first, columns))}"
    return Format(name, reason, f"the spec says format: {name}", columns, task)


def _detected(lines: Sequence[Line], columns: Mapping[str, str], task: str) -> Format:
    """Return the format of the first row that has one; `check_row` holds the other rows to it."""
    rows = [(line.number, Fields(line.row, columns)) for line in lines if line.row is not None]
    for number, fields in rows:
        fits = _fitting(fields)
        if fits:
            name = _one_of(fits, task)
            by = f"line {number} is {name}"
            return Format(name, f"detected {name}: {_why(name, fields)}", by, columns, task)
    raise BadRowError(_no_format(rows[0][1]))


def _fitting(fields: Fields) -> list[str]:
    """Return the formats whose keys the row has. Keys that are null, as in tables, count only if no format
    fits without them."""
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
    """Return whether the row has a label for KTO, and not the number or name of a class."""
    if fields.has("kto_tag"):
        return True
    try:
        is_desirable(fields)
    except BadRowError:
        return False
    return fields.has("completion") or isinstance(fields.get("label"), bool)


def _one_of(fits: Sequence[str], task: str) -> str:
    """Return the format that the task takes among those that a row fits. Raises BadRowError if there are
    several, or if the spec must name it."""
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
    """Return the note that strings are used without a chat template, if the row has strings where a template
    might be expected."""
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
    """Return what the spec should say for the keys that the row has; "" if they are unknown."""
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
    """Return renamed columns in the spec's notation, without those whose names are equal."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in names.items() if ours != theirs)}}}"
