"""Write a preview as one self-contained HTML page, from `report/pages/preview.html.jinja`.

Content of the rows is always escaped text, never an element or an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from dsft.preview.content import SIGNS, first_and_last, sections
from dsft.preview.tokens import LINE_BREAK, neutral, visible
from dsft.preview.view import View
from dsft.report.page import rendered

SHOWN_TOKENS = 4096  # tokens of a row that are shown


def page(view: View) -> str:
    """Return the HTML of the whole page."""
    loaded, ledgers = view.data.loaded, list(_ledgers(view))
    parts = {
        name: [element for element in elements if element.text not in loaded.tables]
        for name, elements in sections(view).items()
    }
    refusal, errors = loaded.refusal, []
    if refusal is not None:
        errors = [f"A run would stop with this error: {refusal.title}", *map(str, refusal.problems)]
    return rendered(
        "dsft preview",
        "preview.html.jinja",
        neutral,
        filters={
            "shown": _shown,
            "anchor": lambda name: name.lower().replace(" ", "-"),
            "first_and_last": partial(first_and_last, limit=SHOWN_TOKENS),
        },
        title=view.data.spec.name,
        heading=view.title,
        errors=errors,
        sections={name: found for name, found in parts.items() if found or (name == "Data" and ledgers)},
        ledgers=ledgers,
        signs=_unchanged(SIGNS),
    )


def _unchanged(text: str) -> Any:
    """Return text as HTML that shows it with the signs of this package, which `neutral` would write out."""
    from markupsafe import escape

    return escape(text)


def _shown(text: str) -> Any:
    """Return a token's text as HTML, with a new line after the sign of each line break."""
    from markupsafe import Markup

    return _unchanged(visible(text)).replace(LINE_BREAK, Markup(f"<u>{LINE_BREAK}</u>\n"))


def _ledgers(view: View) -> Iterator[list[list[str]]]:
    """Yield the ledger of each set as rows of cells, a column for each source, without counts that are
    zero."""
    sets: dict[str, dict[str, dict[str, int]]] = {}
    for one in view.data.loaded.sources:
        sets.setdefault(one.what, {})[one.name] = one.ledger.figures()
    for title, ledgers in sets.items():
        names = dict.fromkeys(
            name for ledger in ledgers.values() for name, count in ledger.items() if count > 0
        )
        rows = [[name.replace("_", " "), *(f"{one[name]:,}" for one in ledgers.values())] for name in names]
        yield [[title, *ledgers], *rows]
