"""Keys that the schema has and the code does not have yet. Pure.

`UNBUILT` is the list: a key (`*`: each item), what may stand there today, and the way out. A feature that is
built takes its row out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsft.spec.document import shown
from dsft.spec.finding import Finding, values_at
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class Unbuilt:
    key: str
    built: tuple[Any, ...]
    way_out: str


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt(
        "model.attention",
        ("auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"),
        "use auto, which attends per segment when rows are packed",
    ),
    Unbuilt("model.trust_remote_code", (False,), "use a model whose class is in transformers"),
)


def unbuilt(spec: Spec) -> Iterator[Finding]:
    """Every value that asks for something that is not built."""
    for row in UNBUILT:
        for path, value in values_at(spec, row.key):
            if value not in row.built:
                what = shown(value) if isinstance(value, (str, int, float)) else "this"
                yield Finding(path, f"{what} is not built yet; {row.way_out}", (row.key.replace(".*", ""),))


def unbuilt_in_data(spec: Spec) -> Iterator[Finding]:
    """Those of them that say which rows there are, and what their tokens are: all that a preview needs."""
    for finding in unbuilt(spec):
        if finding.path[0] == "data" or finding.path[:2] == ("model", "add_tokens"):
            yield finding
