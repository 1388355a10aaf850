"""Tables of the docs that are made from the code. DSFT_UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsft.spec.describe import keys_markdown
from dsft.spec.not_offered import table_markdown as not_offered_markdown
from dsft.spec.rules import table_markdown

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("file", "name", "make"),
    [
        ("limits.md", "rules", table_markdown),
        ("limits.md", "not offered", not_offered_markdown),
        ("spec.md", "keys", keys_markdown),
    ],
)
def test_the_table_in_the_docs_is_the_one_in_the_code(file: str, name: str, make: Callable[[], str]) -> None:
    begin, end = f"<!-- {name}: made by the tests, do not edit -->\n", f"<!-- end of {name} -->\n"
    path = DOCS / file
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    assert found, f"{file} has lost its markers"
    made = head + begin + "\n" + make().rstrip("\n") + "\n\n" + end + tail
    if os.environ.get("DSFT_UPDATE_GOLDEN"):
        path.write_text(made, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == made
