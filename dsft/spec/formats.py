"""Define the formats of rows: which keys their rows have, and check `format` and `columns` of a spec.

`dsft.data.formats` interprets the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsft.spec.findings import Finding, value_finding
from dsft.spec.task import TASKS

if TYPE_CHECKING:  # the schema reads the table
    from dsft.spec.schema import Spec


@dataclass(frozen=True)
class FormatFacts:
    """Properties of a format of rows.

    needs     alternative sets of required keys; a row has one of the sets
    may_have  further keys that a row may have
    excludes  keys -> formats: a row of this format that has all these keys is not detected as one of those
    strings   a prompt and an answer, which are used without a chat template if both are strings
    messages  the column of messages whose keys `dsft preview` names as the reason for the format
    by_task   True if the format is detected only for tasks that take it: other formats have the same keys
    """

    needs: tuple[tuple[str, ...], ...]
    may_have: tuple[str, ...] = ()
    excludes: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    strings: tuple[str, ...] = ()
    messages: str | None = None
    by_task: bool = False


_TOOLS = ("system", "tools", "functions")
_PROMPTED = ("prompt", *_TOOLS)
_TEXTS = ("prompt", "completion")
_ANSWERED = (_TEXTS, ("messages",), ("conversations",), ("instruction", "output"))
FORMATS: dict[str, FormatFacts] = {
    "messages": FormatFacts((("messages",),), _TOOLS),
    "alpaca": FormatFacts((("instruction", "output"),), ("input", "system", "history", "tools", "functions")),
    "text": FormatFacts((("text",),)),
    "sharegpt": FormatFacts((("conversations",),), _TOOLS, messages="conversations"),
    "prompt_completion": FormatFacts((_TEXTS,), _TOOLS, strings=_TEXTS),
    "preference": FormatFacts(
        (("chosen", "rejected"), ("messages", "rejected_response"), ("messages", "rejected_messages"),
         ("chosen_messages", "rejected_messages")),
        (*_PROMPTED, "conversations", "instruction", "input", "history"),
        {("conversations", "chosen", "rejected"): ("sharegpt",),
         ("messages", "rejected_response"): ("messages",), ("messages", "rejected_messages"): ("messages",)},
        strings=("prompt", "chosen"),
    ),
    "kto": FormatFacts(
        tuple((*keys, label) for label in ("label", "kto_tag") for keys in _ANSWERED),
        (*_PROMPTED, "input", "history"),
        {(*_TEXTS, "label"): ("prompt_completion",),
         ("kto_tag",): ("messages", "sharegpt", "alpaca", "prompt_completion")},
        strings=_TEXTS,
    ),
    "classify": FormatFacts(
        (("text",), ("messages",), ("conversations",), ("prompt",)), ("label", "completion", *_TOOLS),
        by_task=True,
    ),
}  # fmt: skip
"""The formats, by name; `dsft.data.formats.convert.CONVERT` has what converts their rows."""


def column_names(format: str | None) -> tuple[str, ...]:
    """Return the columns that `columns` can rename in a row of the format, with the fields of tasks that take
    it; of all formats if it is None (to be detected)."""
    names = [format] if format in FORMATS else list(FORMATS)
    found = [FORMATS[str(name)] for name in names]
    keys = [key for facts in found for keys in (*facts.needs, facts.may_have) for key in keys]
    keys += [key for facts in TASKS.values() if {*names} & {*facts.formats} for key in facts.fields]
    return tuple(dict.fromkeys(keys))


def format_findings(spec: Spec) -> Iterator[Finding]:
    """Yield findings for formats that the task does not accept, and for columns that the format does not
    have."""
    taken = spec.task_kind.formats
    for part, sources in (("train", spec.data.train), ("eval", spec.data.eval)):
        for index, source in enumerate(sources):
            key = f"data.{part}"
            if source.format is not None and source.format not in taken:
                message = f"does not fit task {spec.task}, which takes {', '.join(taken)}; change one of them"
                yield value_finding(spec, f"{key}.{index}.format", message, "task")
            names = column_names(source.format)
            for ours in source.columns:
                if ours not in names:
                    message = f"rows of this format have no such column to rename, only {', '.join(names)}"
                    reads = (f"{key}.columns", f"{key}.format")
                    yield Finding(("data", part, index, "columns", ours), message, reads)
