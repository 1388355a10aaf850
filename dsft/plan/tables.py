"""Format the output of `dsft plan`: headings, tables, sizes in bytes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dsft.errors import printable

PLAIN_WIDTH = 160  # characters, if the output is not a terminal


def printed(parts: Iterable[RenderableType]) -> str:
    """Render for standard output, with its width and colors; in a pipe, COLUMNS can set the width."""
    terminal = sys.stdout.isatty()
    width = Console().width if terminal or "COLUMNS" in os.environ else None
    return rendered(parts, terminal=terminal, width=width)


def rendered(parts: Iterable[RenderableType], *, terminal: bool, width: int | None = None) -> str:
    """Render as text without trailing blanks; with colors only for a terminal."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=not terminal, width=width or PLAIN_WIDTH)
    for part in parts:
        console.print(part)
    text = printable(out.getvalue(), keep_colors=terminal)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def figures(*columns: str) -> Table:
    """Return an empty table with words in the first column and numbers in the others."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
