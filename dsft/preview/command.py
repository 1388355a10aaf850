"""The command `dsft preview`: print a preview as text or JSON, or write it as an HTML page."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from dsft.plan.promised import load
from dsft.preview.collect import collect
from dsft.preview.page import check_writable, write_page
from dsft.preview.terminal import Style, as_text
from dsft.preview.view import Wanted, as_mapping, view
from dsft.report.console import shown

ROWS, PAGE_ROWS, JSON_ROWS = 5, 20, 100
PAGE_PROBLEMS, PROBLEMS = 100, 1000  # rows of each kind


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    rows: int | None = None
    row: str | None = None
    worst: bool = False
    problems: bool = False
    html: Path | None = None
    as_json: bool = False

    @property
    def wanted(self) -> Wanted:
        """What to show: everything on a page, else what the options name, by default rows and the first
        micro-batch."""
        page = self.html is not None
        rows = JSON_ROWS if self.as_json else PAGE_ROWS if page else ROWS
        named = self.row is not None or self.worst or self.problems
        return Wanted(
            rows=self.rows if self.rows is not None else 0 if named and not page else rows,
            row=self.row,
            worst=self.worst or page,
            micro_batch=page or not named,
            problems=PROBLEMS if self.problems else PAGE_PROBLEMS if page else 0,
        )


def preview(spec_path: Path, overrides: Sequence[str], asked: Asked) -> None:
    """Print the preview or write its page. Then raise DataError if a run would refuse the data."""
    spec = load(spec_path, overrides, check_files=False)
    if asked.html is not None:
        check_writable(asked.html)
    say = partial(print, file=sys.stderr)
    with shown(say, Console(stderr=True)) as progress:
        found = collect(spec, say, progress)
    seen = view(found, asked.wanted)
    if asked.html is not None:
        write_page(seen, asked.html)
    if asked.as_json:
        print(json.dumps(as_mapping(seen), indent=2))
    elif asked.html is not None:
        print(f"wrote {asked.html}")
    else:
        figures = not (asked.worst or asked.problems)
        print(as_text(seen, _style(), whole=asked.row is not None, figures=figures), end="")
    if found.loaded.refusal is not None:
        raise found.loaded.refusal


def _style() -> Style:
    """Return the style: colors if the terminal has them, unless NO_COLOR is set (no-color.org)."""
    terminal = Console()
    if not sys.stdout.isatty() or terminal.no_color or terminal.color_system is None:
        return Style()
    return Style(terminal.width, "standard" if terminal.color_system == "standard" else "256")
