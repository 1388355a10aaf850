"""Define which keys a row of each format has, and check `format` and `columns` of a spec.

`dsft.data.formats` interprets the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dsft.spec.findings import Finding, value_finding
from dsft.spec.schema import Spec
from dsft.spec.task import TASKS

NEEDS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "alpaca": (("instruction", "output"),),
    "text": (("text",),),
    "sharegpt": (("conversations",),),
    "prompt_completion": (("prompt", "completion"),),
    "preference": (
        ("chosen", "rejected"),
        ("messages", "rejected_response"),
        ("messages", "rejected_messages"),
        ("chosen_messages", "rejected_messages"),
    ),
    "kto": tuple(
        (*keys, label)
        for label in ("label", "kto_tag")
        for keys in (("prompt", "completion"), ("messages",), ("conversations",), ("instruction", "output"))
    ),
    "classify": (("text",), ("messages",), ("conversations",), ("prompt",)),
}
"""Format -> alternative sets of required keys; a row has one of the sets."""
_PROMPTED = ("prompt", "system", "tools", "functions")
MAY_HAVE: Mapping[str, tuple[str, ...]] = {
    "messages": ("system", "tools", "functions"),
    "alpaca": ("input", "system", "history", "tools", "functions"),
    "text": (),
    "sharegpt": ("system", "tools", "functions"),
    "prompt_completion": ("system", "tools", "functions"),
    "preference": (*_PROMPTED, "conversations", "instruction", "input", "history"),
    "kto": (*_PROMPTED, "input", "history"),
    "classify": ("label", "completion", "system", "tools", "functions"),
}


def column_names(format: str | None) -> tuple[str, ...]:
    """Return the columns that `columns` can rename in a row of the format, with the fields of tasks that take
    it; of all formats if it is None (to be detected)."""
    names = [format] if format in NEEDS else list(NEEDS)
    keys = [key for name in names for keys in (*NEEDS[str(name)], MAY_HAVE[str(name)]) for key in keys]
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
