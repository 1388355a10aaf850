"""The tokens of a source's rows.

Takes a source and a renderer. Gives TokenRows. Reads the source's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsft.data import formats
from dsft.data.read import files
from dsft.data.read.files import blocks, data_files, file_notes, read_block
from dsft.data.render import Renderer
from dsft.data.rows import Account, BadRowError, Line, Rendered, Row

_LOOKED_AT = 100  # first lines of a file, by which its format is known


class Source(files.Source, formats.Source, Protocol):
    """What is read of a `data.train` or `data.eval` entry."""


@dataclass(frozen=True)
class InMemory:
    """Rows that were just read."""

    account: Account
    rows: tuple[tuple[str, Rendered], ...]
    content: NDArray[np.uint64]
    desirable: NDArray[np.bool_]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(row.input_ids) for _, row in self.rows], dtype=np.int64)

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        return np.array([np.count_nonzero(row.trained[1:]) for _, row in self.rows], dtype=np.int64)

    @cached_property
    def ended(self) -> NDArray[np.bool_]:
        return np.array([row.ended for _, row in self.rows], dtype=np.bool_)

    @cached_property
    def digest(self) -> str:
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes())
        for _, row in self.rows:
            digest.update(row.input_ids.astype("<i4").tobytes())
            digest.update(row.trained.tobytes())
        return digest.hexdigest()

    def source(self, row: int) -> str:
        return self.rows[row][0]

    def spans(self, row: int) -> NDArray[np.int64]:
        trained = np.concatenate([[False], self.rows[row][1].trained, [False]])
        return np.flatnonzero(np.diff(trained.astype(np.int8))).reshape(-1, 2)

    def read(self, row: int) -> Rendered:
        return self.rows[row][1]


def tokenised(
    source: Source,
    renderer: Renderer,
    *,
    task: str,
    progress: Callable[[int, int], None] | None = None,
) -> InMemory:
    """Every row of the source. `progress` is called with (rows that are tokens, rows in all).

    Raises MissingInputError for a file that is not there. Bad rows stand in the account.
    """
    rows: list[tuple[str, Rendered]] = []
    bad: list[tuple[str, str]] = []
    notes: list[str] = []
    content: list[int] = []
    desirable: list[bool] = []
    chosen: list[tuple[str, str, str]] = []
    blank_lines = 0
    for file in data_files(source):
        notes += file_notes(file)
        lines: list[Line] = []
        for block in blocks(file):
            before = lines[-1].number if lines else 0
            lines += [replace(line, number=before + line.number) for line in read_block(block)]
        blank_lines += sum(line.row is None and line.mistake is None for line in lines)
        mistakes = [(line.number, line.mistake) for line in lines if line.mistake is not None]
        with_rows = [line for line in lines if line.row is not None]
        if with_rows:
            try:
                found = formats.choose(source, with_rows[:_LOOKED_AT], task)
                notes.append(f"{file.name}: {found.reason}")
                chosen.append((file.name, found.name, found.reason))
                meant = _converted(with_rows, found, mistakes)
            except BadRowError as error:
                mistakes.append((with_rows[0].number, str(error)))
                meant = []
        else:
            notes.append(f"{file.name}: holds no row")
            meant = []
        samples = [(number, row, sample) for number, row in meant for sample in row.samples]
        for (number, row, _), rendered in zip(
            samples, renderer.render([sample for _, _, sample in samples]), strict=True
        ):
            if isinstance(rendered, str):
                mistakes.append((number, rendered))
            else:
                rows.append((f"{file.name}:{number}", rendered))
                content.append(formats.content_hash(row))
                desirable.append(row.label is not False)
        bad += [(f"{file.name}:{number}", reason) for number, reason in sorted(mistakes)]
        if progress is not None:
            progress(len(rows), len(rows))
    account = Account(blank_lines, len(bad), tuple(bad), tuple(notes), tuple(chosen))
    hashes, labels = np.array(content, dtype=np.uint64), np.array(desirable, dtype=np.bool_)
    return InMemory(account, tuple(rows), hashes, labels)


def _converted(
    lines: list[Line], found: formats.Format, mistakes: list[tuple[int, str]]
) -> list[tuple[int, Row]]:
    meant = []
    for line in lines:
        try:
            meant.append((line.number, formats.convert(line.row or {}, found)))
        except BadRowError as error:
            mistakes.append((line.number, str(error)))
    return meant
