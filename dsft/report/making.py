"""How far the making of something is, as it is shown: a bar on a terminal, else a line now and then.

Takes the paces of `dsft.data.cache.store`, or of `dsft.reference`. Writes to the terminal, or gives lines to
`say`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

EVERY_SECONDS = 10.0


class Pace(Protocol):
    """How far it is. name: of what is made; done, of so many."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def total(self) -> int: ...
    def text(self, seconds: float) -> str:
        """After so many seconds."""
        ...

    def count(self) -> str:
        """What is done, of how many."""
        ...


@contextmanager
def shown(
    say: Callable[[str], None], terminal: Terminal | None = None, *, first: bool = True
) -> Iterator[Callable[[Pace], None]]:
    """What is given to the block is called with each Pace. What `say` prints stands above the bar, which only
    the `first` rank draws."""
    terminal = terminal or Terminal()
    if not (first and terminal.is_terminal):
        yield _Lines(say).tell
        return
    bar = _Bar(terminal)
    try:
        yield bar.tell
    finally:
        bar.close()


class _Lines:
    """The first line after EVERY_SECONDS: what is quick is not told."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._name: str | None = None
        self._began = self._told = 0.0

    def tell(self, pace: Pace) -> None:
        now = time.monotonic()
        if pace.name != self._name:
            self._name, self._began, self._told = pace.name, now, now
        if now - self._told >= EVERY_SECONDS:
            self._told = now
            self._say(f"{pace.text(now - self._began)}, {pace.count()}")


class _Bar:
    """Of what is made now; it goes when that is."""

    def __init__(self, terminal: Terminal) -> None:
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._progress = Progress(*columns, console=terminal, transient=True)
        self._name: str | None = None
        self._began = 0.0
        self._task = self._progress.add_task("", total=None)

    def tell(self, pace: Pace) -> None:
        now = time.monotonic()
        if pace.name != self._name:
            self._name, self._began = pace.name, now
        self._progress.start()
        description = pace.text(now - self._began)
        self._progress.update(self._task, completed=pace.done, total=pace.total, description=description)

    def close(self) -> None:
        self._progress.stop()
