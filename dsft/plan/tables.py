"""Format the output of `dsft plan`: headings, tables, sizes in bytes."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dsft.errors import printable

_NUMBER = re.compile(r"[+-]?\d|$")

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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], fixed: str = "") -> Table:
    """Return a table without the columns that have no entry; numbers are aligned to the right, except in the
    first column. fixed: name of a column that is not wrapped."""
    made = Table(box=box.SIMPLE, pad_edge=False)
    shown = [number for number in range(len(head)) if any(row[number] for row in rows)]
    for number in shown:
        is_number = number > 0 and all(_NUMBER.match(row[number]) for row in rows)
        made.add_column(
            head[number],
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=head[number] == fixed,
        )
    for row in rows:
        made.add_row(*(Text(row[number]) for number in shown))
    return made
