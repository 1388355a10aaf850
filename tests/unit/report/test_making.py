"""How far the making of tokens is, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console as Terminal

from dsft.data.cache.store import TokenizeProgress
from dsft.report import console
from dsft.report.console import task_progress


def told(is_terminal: bool, *, first: bool = True) -> tuple[list[str], str]:
    """Lines, and what the terminal got, of two sources."""
    lines: list[str] = []
    out = io.StringIO()
    terminal = Terminal(file=out, force_terminal=is_terminal, width=100)
    with task_progress(lines.append, terminal, first=first) as progress:
        for name in ("a.jsonl", "b.jsonl"):
            for done in range(4):
                progress(TokenizeProgress(name, done, 3, 1000 * done))
    return lines, out.getvalue()


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100, 1000, 4))
    monkeypatch.setattr(console.time, "monotonic", lambda: float(next(now)))  # a pace every four seconds
    lines, out = told(False)
    assert lines == [
        "a.jsonl: tokenized 3,000 rows (250 rows/s), 3 of 3 blocks",
        "b.jsonl: tokenized 3,000 rows (250 rows/s), 3 of 3 blocks",
    ]
    assert out == ""


def test_a_bar_on_a_terminal_of_the_first_rank() -> None:
    lines, out = told(True)
    assert lines == []
    assert "3/3" in out and "b.jsonl: tokenized 3,000 rows" in out
    assert "\x1b[?25h" in out  # the cursor is back
    assert told(True, first=False)[1] == ""
