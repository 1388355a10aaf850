"""The command `dsft preview`: print a preview as text or JSON, or write it as an HTML page."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from dsft.preview.page import page
from dsft.preview.terminal import PLAIN_WIDTH, Colors, as_text
from dsft.preview.view import as_mapping, collect, view
from dsft.report.console import task_progress
from dsft.report.page import check_page, write_page
from dsft.spec.load import load_spec

ROWS, PAGE_ROWS, JSON_ROWS = 5, 20, 100
PAGE_PROBLEMS, PROBLEMS = 100, 1000  # rows of each kind


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
