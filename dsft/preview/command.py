"""The command `dsft preview`: print a preview as text or JSON, or write it as an HTML page, from
`report/pages/preview.html.jinja`. Content of the rows is always escaped text, never an element or an
attribute."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dsft.preview.content import SIGNS, first_and_last, sections
from dsft.preview.terminal import PLAIN_WIDTH, Colors, as_text
from dsft.preview.tokens import LINE_BREAK, neutral, visible
from dsft.preview.view import View, as_mapping, collect, view
from dsft.report.console import task_progress
from dsft.report.page import check_page, rendered, write_page
from dsft.spec.load import load_spec

ROWS, PAGE_ROWS, JSON_ROWS = 5, 20, 100
PAGE_PROBLEMS, PROBLEMS = 100, 1000  # rows of each kind
SHOWN_TOKENS = 4096  # tokens of a row that are shown


def preview(  # noqa: PLR0913  an argument is an option
    spec_path: Path,
    overrides: Sequence[str],
    *,
    rows: int | None = None,
    row: str | None = None,
    worst: bool = False,
    problems: bool = False,
    html: Path | None = None,
    as_json: bool = False,
) -> None:
    """Print the preview or write its page. Then raise DataError if a run would refuse the data.

    A page has everything; else the preview has what the options name, by default rows and the first
    micro-batch.
    """
    spec = load_spec(spec_path, overrides, check_files=False)
    if html is not None:
        check_page(html, "--html", "dsft preview")
    log = partial(print, file=sys.stderr)
    is_page, named = html is not None, row is not None or worst or problems
    with task_progress(log, Console(stderr=True)) as progress:
        data = collect(spec, log, progress)
    if rows is None:
        rows = JSON_ROWS if as_json else PAGE_ROWS if is_page else ROWS
        rows = 0 if named and not is_page else rows
    found = view(
        data,
        rows=rows,
        row=row,
        worst=worst or is_page,
        micro_batch=is_page or not named,
        problems=PROBLEMS if problems else PAGE_PROBLEMS if is_page else 0,
    )
    if html is not None:
        write_page(html, page(found), "--html")
    if as_json:
        print(json.dumps(as_mapping(found), indent=2))
    elif is_page:
        print(f"wrote {html}")
    else:
        text = as_text(found, *_terminal(), whole=row is not None, figures=not (worst or problems))
        print(text, end="")
    if data.loaded.refusal is not None:
        raise data.loaded.refusal


def _terminal() -> tuple[Colors | None, int]:
    """Return the terminal's colors and width; no colors in a pipe or with NO_COLOR (no-color.org)."""
    terminal = Console()
    if not sys.stdout.isatty() or terminal.no_color or terminal.color_system is None:
        return None, PLAIN_WIDTH
    return "standard" if terminal.color_system == "standard" else "256", terminal.width


# --- the page ---------------------------------------------------------------------------------------------


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
