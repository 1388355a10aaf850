"""Tables of the docs that are made from the code. DSFT_UPDATE_GOLDEN=1 rewrites them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, WithJsonSchema
from pydantic.fields import FieldInfo

from dsft.spec.aliases import sections_in
from dsft.spec.document import quote
from dsft.spec.not_offered import NOT_OFFERED
from dsft.spec.rules import RULES
from dsft.spec.schema import Spec

DOCS = Path(__file__).parents[3] / "docs"


def rules_markdown() -> str:
    lines = [
        "| what | verdict | what DeepSpeed does | what to write instead | source |",
        "|---|---|---|---|---|",
    ]
    for rule in RULES:
        lines.append(f"| {rule.title} | {rule.verdict} | {rule.behavior} | {rule.answer} | {rule.source} |")
    return "\n".join(lines) + "\n"


def not_offered_markdown() -> str:
    lines = ["| not offered | what to do instead | asked for by | in a DeepSpeed JSON |", "|---|---|---|---|"]
    for one in NOT_OFFERED:
        names = [f"`{name}`" for name in one.keys.split()]
        names += [f"`{one.of[0]}: {value}`" for value in one.values.split()]
        files = ", ".join(f"`{key}`" for key in one.in_json.split())
        lines.append(f"| {one.title} | {one.way_out} | {', '.join(names)} | {files} |")
    return "\n".join(lines) + "\n"


def keys_markdown() -> str:
    """Every key with its default and sentence, a table per section."""
    return "\n".join(_tables(Spec, ""))


def _tables(section: type[BaseModel], prefix: str) -> list[str]:
    lines = ["| key | default | what |", "|---|---|---|"]
    inner: list[str] = []
    for name, field in section.model_fields.items():
        lines.append(f"| `{prefix}{name}` | {_default(field)} | {_what(field)} |")
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
    return "" if value is None else f"`{value if isinstance(value, str) else quote(value)}`"


def _what(field: FieldInfo) -> str:
    offered = tuple(choice for part in (field.annotation, *field.metadata) for choice in _choices(part))
    one_of = f" One of {', '.join(f'`{choice}`' for choice in offered)}." if offered else ""
    return " ".join((field.description or "").split()) + one_of


def _choices(annotation: Any) -> tuple[Any, ...]:
    if isinstance(annotation, WithJsonSchema):
        return tuple(annotation.json_schema["enum"])
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in _choices(part))


@pytest.mark.parametrize(("file", "name", "make"), [
    ("limits.md", "rules", rules_markdown),
    ("limits.md", "not offered", not_offered_markdown),
    ("spec.md", "keys", keys_markdown),
])  # fmt: skip
def test_the_table_in_the_docs_is_the_one_in_the_code(file: str, name: str, make: Callable[[], str]) -> None:
    check_block(file, name, make())


def check_block(file: str, name: str, block: str) -> None:
    """Compare a block between its markers in a file of docs/, or write it."""
    begin, end = f"<!-- {name}: made by the tests, do not edit -->\n", f"<!-- end of {name} -->\n"
    path = DOCS / file
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"{file} has lost its markers"
    made = head + begin + "\n" + block.rstrip("\n") + "\n\n" + end + tail
    if os.environ.get("DSFT_UPDATE_GOLDEN"):
        path.write_text(made, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == made
