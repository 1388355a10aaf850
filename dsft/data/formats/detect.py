"""Detect the format of a file from the keys of its first rows and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsft.data.formats.answers import is_desirable
from dsft.data.formats.values import Fields, quoted
from dsft.data.rows import BadRowError, Line
from dsft.spec.formats import FORMATS, column_names
from dsft.spec.schema import Source
from dsft.spec.task import TASKS

_QUESTIONS = ("prompt", "question", "query", "problem", "instruction", "input")
_ANSWERS = ("completion", "response", "answer", "solution", "output")
"""Names of questions and answers in files, in lower case."""
_CHOSEN = re.compile(r"chosen|prefer|accept|win|good|positive", re.IGNORECASE)
_REJECTED = re.compile(r"reject|non_?prefer|dispref|lose|bad|negative", re.IGNORECASE)
"""Names of the better and the worse answer of a pair in files; the second is tried first."""


@dataclass(frozen=True)
class Format:
    """The format of a file.

    reason   a sentence on why the format was chosen
    by       what decided it: the spec, or the first line that has it
    columns  dsft's name -> the file's name
    task     determines what of a row is trained on
    labels   the names of the classes of task classify; (): labels of rows are not read
    """

    name: str
    reason: str
    by: str
    columns: Mapping[str, str]
    task: str
    labels: tuple[str, ...] = ()


def choose(source: Source, lines: Sequence[Line], task: str, labels: tuple[str, ...] = ()) -> Format:
    """Return the format of a file from its first lines. labels: as in `Format`. Raises BadRowError if there
    is none, or if the task does not take it."""
    _check_columns(source)
    if source.format is not None:
        found = _named(source.format, lines, source.columns, task)
    else:
        found = _detected(lines, source.columns, task)
    taken = TASKS[task].formats
    if found.name not in taken:
        way_out = "change the task or file"
        if TASKS[task].label == "answer":
            way_out = f'add a "label" to each row, or {way_out}'
        raise BadRowError(f"the rows are {found.name}, but task {task} takes {', '.join(taken)}; {way_out}")
    return replace(found, labels=labels)


def check_row(fields: Fields, found: Format) -> None:
    """Raise BadRowError if a row lacks keys that its file's format needs."""
    needs = FORMATS[found.name].needs
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
        raise BadRowError(f"the row is {others[0]}, but {found.by}; all rows of a file must have one format")
    raise BadRowError(f"{quoted(missing)} is missing; the row has {quoted(row) or 'no keys'}")


# --- which format -----------------------------------------------------------------------------------------


def _check_columns(source: Source) -> None:
    names = column_names(source.format)
    for ours in source.columns:
        if ours not in names:
            raise BadRowError(
                f'columns has "{ours}", but its keys must be among {quoted(names)} '
                "(name in dsft: name in the file)"
            )


def _named(name: str, lines: Sequence[Line], columns: Mapping[str, str], task: str) -> Format:
    first = next((line.row for line in lines if line.row is not None), {})
    reason = f"read as {name}, as the spec says{_as_text(name, Fields(first, columns))}"
    return Format(name, reason, f"the spec sets format: {name}", columns, task)


def _detected(lines: Sequence[Line], columns: Mapping[str, str], task: str) -> Format:
    """Return the format of the first row that has one; `check_row` holds the other rows to it."""
    rows = [(line.number, Fields(line.row, columns)) for line in lines if line.row is not None]
    for number, fields in rows:
        fits = [name for name in _fitting(fields) if _is_known(name, task)]
        if fits:
            name = _format_for(fits, task)
            unused = [ours for ours in columns if all(ours not in column_names(fit) for fit in fits)]
            if unused:
                raise BadRowError(
                    f"columns has {quoted(unused)}, but the rows are {name}, which have only "
                    f"{quoted(column_names(name))}; correct it, or set format"
                )
            by = f"line {number} is {name}"
            return Format(name, f"detected {name}: {_why(name, fields)}", by, columns, task)
    raise BadRowError(_no_format(rows[0][1], task))


def _is_known(name: str, task: str) -> bool:
    """Return whether rows can be detected to have a format."""
    return not FORMATS[name].by_task or name in TASKS[task].formats


def _fitting(fields: Fields) -> list[str]:
    """Return the formats whose keys the row has. Keys that are null, as in tables, count only if no format
    fits without them."""
    given = Fields({key: value for key, value in fields.row.items() if value is not None}, fields.columns)
    return _with_keys(given) or _with_keys(fields)


def _with_keys(fields: Fields) -> list[str]:
    fits = [name for name in FORMATS if _keys_of(name, fields) and (name not in IS_OF or IS_OF[name](fields))]
    excludes = [pair for name in fits for pair in FORMATS[name].excludes.items()]
    excluded = {name for keys, names in excludes if all(map(fields.has, keys)) for name in names}
    return [name for name in fits if name not in excluded]


def _keys_of(name: str, fields: Fields) -> tuple[str, ...] | None:
    """Return the first set of keys of a format that the row has; None if it has none."""
    return next((keys for keys in FORMATS[name].needs if all(map(fields.has, keys))), None)


def _is_labeled(fields: Fields) -> bool:
    """Return whether the row has a label for KTO, and not the number or name of a class."""
    if fields.has("kto_tag"):
        return True
    try:
        is_desirable(fields)
    except BadRowError:
        return False
    return fields.has("completion") or isinstance(fields.get("label"), bool)


IS_OF: dict[str, Callable[[Fields], bool]] = {"kto": _is_labeled}
"""Format -> a further condition for a row that has its keys."""


def _format_for(fits: Sequence[str], task: str) -> str:
    """Return the format that the task takes among those that a row fits. Raises BadRowError if there are
    several, or if the spec must name it."""
    taken = [name for name in fits if name in TASKS[task].formats] or fits[:1]
    if len(taken) > 1:
        written = " or ".join(f"format: {name}" + _trains_on(name, task) for name in taken)
        raise BadRowError(f"the keys fit {' and '.join(fits)}; choose one with {written}")
    if taken[0] in TASKS[task].if_named:
        written = f"format: {taken[0]}{_trains_on(taken[0], task)}"
        raise BadRowError(f"task {task} takes {taken[0]} rows only if the spec sets {written}")
    return taken[0]


def _trains_on(name: str, task: str) -> str:
    return f" ({TASKS[task].if_named[name]})" if name in TASKS[task].if_named else ""


def _why(name: str, fields: Fields) -> str:
    keys, column = _keys_of(name, fields) or (), FORMATS[name].messages
    reason = f"every row has {' and '.join(quoted([fields.name(key)]) for key in keys)}"
    if column is not None:
        messages = fields.get(column)
        first = messages[0] if isinstance(messages, list) and messages else None
        inside = [
            key for key in ("from", "role", "value", "content") if isinstance(first, dict) and key in first
        ]
        reason += f" of {'/'.join(inside)}" if inside else ""
    return f"{reason}{_as_text(name, fields)}"


def _as_text(name: str, fields: Fields) -> str:
    """Return the note that strings are used without a chat template, if the row has strings where a template
    might be expected."""
    keys = FORMATS[name].strings
    is_text = keys and all(isinstance(fields.get(key), str) for key in keys)
    return "; the strings are used as they are, without a chat template" if is_text else ""


def _no_format(fields: Fields, task: str) -> str:
    row, columns = fields.row, fields.columns
    missing = [theirs for theirs in columns.values() if theirs not in row]
    if missing:
        return f"columns names {quoted(missing)}, but the row has {quoted(row) or 'no keys'}"
    suggestion = _suggestion(row, task)
    if suggestion:
        return f"no format fits the keys {quoted(row)}; did you mean {suggestion}?"
    formats = "; ".join(
        f"{name} needs {quoted(facts.needs[0])}" for name, facts in FORMATS.items() if _is_known(name, task)
    )
    renamed = "rename keys with columns: {name in dsft: name in the file}"
    return f"no format fits the keys {quoted(row)}: {formats}; {renamed}"


def _suggestion(row: Mapping[str, Any], task: str) -> str:
    """Return what the spec should say for the keys that the row has; "" if they are unknown."""
    if "content" in row:
        return "columns: {text: content}"
    theirs = {key.lower(): key for key in row}
    question = next((theirs[key] for key in _QUESTIONS if key in theirs), None)
    if TASKS[task].rows == 2:
        rejected = [key for key in row if _REJECTED.search(key)]
        chosen = [key for key in row if _CHOSEN.search(key) and key not in rejected]
        if len(chosen) == len(rejected) == 1:
            prompt = {} if question is None else {"prompt": question}
            return f"columns: {_columns({**prompt, 'chosen': chosen[0], 'rejected': rejected[0]})}"
    for key, value in row.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and key not in column_names(None):
            for ours, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
                if role in first and content in first:
                    return f"columns: {{{ours}: {key}}}"
    answer = next((theirs[key] for key in _ANSWERS if key in theirs), None)
    if question is None or answer is None:
        return ""
    chat = {"instruction": question, "output": answer}
    for ours, key in (("input", "context"), ("system", "system_prompt")):
        if key in theirs:
            chat[ours] = theirs[key]
    text = {"prompt": question, "completion": answer}
    return f"columns: {_columns(chat)} for a chat, or {_columns(text)} for plain texts"


def _columns(names: Mapping[str, str]) -> str:
    """Return renamed columns in the spec's notation, without those whose names are equal."""
    return f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in names.items() if ours != theirs)}}}"
