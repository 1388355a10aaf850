"""Pieces of what the plan prints: headings, tables, sizes in bytes. Takes words and numbers, gives text."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dsft.errors import plain

PLAIN_WIDTH = 160  # characters, where the output is no terminal


def printed(parts: Iterable[RenderableType]) -> str:
    """As wide, and in the colours, that standard output has."""
    terminal = sys.stdout.isatty()
    return rendered(parts, terminal=terminal, width=Console().width if terminal else None)


def rendered(parts: Iterable[RenderableType], *, terminal: bool, width: int | None = None) -> str:
    """Lines without blanks at their ends; colours on a terminal only."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, no_color=not terminal, width=width or PLAIN_WIDTH)
    for part in parts:
        console.print(part)
    text = plain(out.getvalue(), colours=terminal)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def heading(words: str) -> Text:
    return Text(f"\n{words}", style="bold")


def figures(*columns: str) -> Table:
    """Words in the first column, numbers in the others."""
    made = Table(box=box.SIMPLE, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right")
    return made


def size_text(count: int) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
