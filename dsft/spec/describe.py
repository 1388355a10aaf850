"""The schema as a table for the docs. Pure."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dsft.spec.aliases import sections_in
from dsft.spec.document import shown
from dsft.spec.schema import Spec
from dsft.spec.unbuilt import UNBUILT


def keys_markdown() -> str:
    """Every key with its default and sentence, a table per section; what is not built yet is marked."""
    return "\n".join(_tables(Spec, ""))


def _tables(section: type[BaseModel], prefix: str) -> list[str]:
    lines = ["| key | default | what |", "|---|---|---|"]
    inner: list[str] = []
    for name, field in section.model_fields.items():
        lines.append(f"| `{prefix}{name}` | {_default(field)} | {_what(prefix + name, field)} |")
        for part in sections_in(field.annotation):
            inner += _tables(part, f"{prefix}{name}.")
    return [*lines, "", *inner]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its keys' defaults"
    if isinstance(value, tuple):
        value = list(value)
    return "" if value is None else f"`{value if isinstance(value, str) else shown(value)}`"


def _what(key: str, field: FieldInfo) -> str:
    rows = [row for row in UNBUILT if row.key.replace(".*", "") == key]
    sentence = field.description or ""
    offered = _choices(field.annotation)
    if offered:
        sentence += f" One of {', '.join(f'`{choice}`' for choice in offered)}."
    if not rows:
        return sentence
    built = [choice for choice in offered if choice in rows[0].built]
    note = f"built: {', '.join(f'`{choice}`' for choice in built)}" if len(built) > 1 else "not built yet"
    return f"{sentence} *({note})*"


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))
