"""Which format a file's rows have, from their keys and the kind of their values, and why.

Takes the first rows of a file. Gives a Format. Raises BadRowError. Touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dsft.data.formats.values import Fields, listed
from dsft.data.rows import BadRowError, Line

NEEDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "alpaca": (("instruction", "output"),),
    "text": (("text",),),
    "sharegpt": (("conversations",),),
    "prompt_completion": (("prompt", "completion"),),
    "preference": (("chosen", "rejected"), ("messages", "rejected_response")),
    "kto": tuple(
        (*keys, label)
        for label in ("label", "kto_tag")
        for keys in (("prompt", "completion"), ("messages",), ("conversations",), ("instruction", "output"))
    ),
}
"""Of each format, the sets of keys of which a row has one."""
_PROMPTED = ("prompt", "system", "tools")
MAY_HAVE: Mapping[str, tuple[str, ...]] = {
    "messages": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
    "text": (),
    "sharegpt": ("system", "tools"),
    "prompt_completion": ("system", "tools"),
    "preference": (*_PROMPTED, "conversations", "instruction", "input", "history"),
    "kto": (*_PROMPTED, "input", "history"),
}
TASK_FORMATS: Mapping[str, tuple[str, ...]] = {
    "sft": ("messages", "alpaca", "text", "sharegpt", "prompt_completion", "preference", "kto"),
    "pretrain": ("text",),
    "dpo": ("preference",),
}
_ASKED_FOR = ("preference", "kto")
"""sft trains on the good ones of these, where the spec names the format."""
_CLAIMED: Mapping[str, tuple[str, ...]] = {"preference": ("sharegpt",), "kto": ("prompt_completion",)}
"""A row of the first format has all keys of the others, which it is not meant as."""
_MEANT: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(pair), f"columns: {{prompt: {pair[0]}, completion: {pair[1]}}}")
    for pair in (
        ("prompt", "response"),
        ("question", "answer"),
        ("query", "response"),
        ("input", "output"),
        ("prompt", "answer"),
        ("question", "response"),
    )
)


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
        found = _named(source.format, source.columns, task)
    else:
        found = _detected(lines, source.columns, task)
    taken = TASK_FORMATS[task]
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
        if all(columns.get(key, key) in row for key in keys):
            return
    others = [name for name in _fitting(fields) if name != found.name]
    if others:
        raise BadRowError(f"a row of {others[0]}, and {found.by}; a file holds rows of one format")
    nearest = min(needs, key=lambda keys: sum(not fields.has(key) for key in keys))
    missing = [fields.name(key) for key in nearest if not fields.has(key)]
    raise BadRowError(f"{listed(missing)} is missing; the row has {listed(row) or 'no keys'}")


# --- which format -----------------------------------------------------------------------------------------


def _check_columns(source: Source) -> None:
    names = [source.format] if source.format in NEEDS else list(NEEDS)
    keys = dict.fromkeys(
        key for name in names for keys in (*NEEDS[str(name)], MAY_HAVE[str(name)]) for key in keys
    )
    for ours in source.columns:
        if ours not in keys:
            raise BadRowError(f'columns has "{ours}"; what can be renamed is {listed(keys)} (ours: theirs)')


def _named(name: str, columns: Mapping[str, str], task: str) -> Format:
    if name not in NEEDS:
        raise BadRowError(f'format "{name}" is not read; the formats are {", ".join(NEEDS)}')
    return Format(name, f"read as {name}, as the spec says", f"the spec says format: {name}", columns, task)


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
    """The formats whose keys the row has."""
    fits = [
        name for name, needs in NEEDS.items() if any(all(fields.has(key) for key in keys) for keys in needs)
    ]
    if "kto" in fits and not _labelled(fields):
        fits.remove("kto")
    claimed = {other for name in fits for other in _CLAIMED.get(name, ())}
    return [name for name in fits if name not in claimed]


def _labelled(fields: Fields) -> bool:
    """A label that is true or false, which a class's number or name is not."""
    if fields.has("kto_tag"):
        return True
    label = fields.get("label")
    return isinstance(label, bool) or (fields.has("completion") and label in (0, 1))


def _one_of(fits: Sequence[str], task: str) -> str:
    taken = [name for name in fits if name in TASK_FORMATS[task]]
    asked_for = [name for name in fits if name in _ASKED_FOR] if task == "sft" else []
    if len(taken) > 1:
        raise BadRowError(f"fits {' and '.join(fits)}; say which with format: {taken[0]}")
    if asked_for:
        raise BadRowError(_ask(asked_for[0]))
    return taken[0] if taken else fits[0]


def _ask(name: str) -> str:
    what = {"preference": "the chosen answers", "kto": "the answers labelled true"}[name]
    return f"{name} rows, and task sft takes them where the spec says format: {name}, to train on {what}"


def _why(name: str, fields: Fields) -> str:
    keys = next(keys for keys in NEEDS[name] if all(fields.has(key) for key in keys))
    said = f"every row has {' and '.join(listed([fields.name(key)]) for key in keys)}"
    if name == "sharegpt":
        first = next(iter(fields.get("conversations") or ()), None)
        inside = [
            key for key in ("from", "role", "value", "content") if isinstance(first, dict) and key in first
        ]
        said += f" of {'/'.join(inside)}" if inside else ""
    return said


def _no_format(fields: Fields) -> str:
    row, columns = fields.row, fields.columns
    unfound = [theirs for theirs in columns.values() if theirs not in row]
    if unfound:
        return f"columns names {listed(unfound)}, and the row has {listed(row) or 'no keys'}"
    meant = next((write for keys, write in _MEANT if keys <= row.keys()), None)
    if meant is not None:
        return f"no format fits the keys {listed(row)}; did you mean {meant}?"
    formats = "; ".join(f"{name} needs {listed(needs[0])}" for name, needs in NEEDS.items())
    return f"no format fits the keys {listed(row)}: {formats}; name yours with columns: {{ours: theirs}}"
