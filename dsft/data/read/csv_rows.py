"""Read CSV and TSV files strictly: a header, and rows with the same number of fields (RFC 4180, or with
tabs).

Each row has the line it starts on, its values as strings, or the mistake in it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence

from dsft.data.read.lines import MAX_LINE, STOPS
from dsft.data.rows import Line


def csv_rows(texts: Iterable[tuple[str, str | None]], delimiter: str) -> Iterator[Line]:
    """Yield the rows of a file, given what `lines` yields. A quoted field may contain line breaks; a row's
    number is that of the line it starts on."""
    csv.field_size_limit(MAX_LINE)  # global for the process: the csv module has no other way
    header: list[str] | None = None
    for number, fields, mistake in _records(texts, delimiter):
        if mistake is None and len(fields) < 2 and not "".join(fields).strip():
            yield Line(number)
        elif header is None:
            mistake = mistake or _header_mistake(fields)
            if mistake is not None:
                yield Line(number, mistake=f"{mistake.removesuffix(STOPS)}{STOPS}")
                return
            header = fields
        elif mistake is not None:
            yield Line(number, mistake=mistake)
        elif len(fields) != len(header):
            hint = "write fields that contain a delimiter or a line break in double quotes"
            has = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            yield Line(number, mistake=f"{has}, but the header has {len(header)}; {hint}")
        else:
            yield Line(number, dict(zip(header, fields, strict=True)))


def _records(
    texts: Iterable[tuple[str, str | None]], delimiter: str
) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield (line that the record starts on, fields, mistake)."""
    bad: list[str] = []

    def with_line_breaks() -> Iterator[str]:
        for text, mistake in texts:
            if mistake is not None:
                bad.append(mistake)
            yield text + "\n"

    reader = csv.reader(with_line_breaks(), delimiter=delimiter, strict=True)
    while True:
        number, fields, reason = reader.line_num + 1, [], None
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = _syntax(error)
        yield number, fields, bad[0] if bad else reason
        if reason is not None and reason.endswith(STOPS):
            return
        bad.clear()


def _syntax(error: csv.Error) -> str:
    reason = str(error)
    if reason == "unexpected end of data":
        return "cut off: a quote that is opened here is not closed"
    if reason.startswith("field larger"):
        return f"a field has over {MAX_LINE:,} characters, or its quote is not closed{STOPS}"
    return f"not CSV: {reason}"


def _header_mistake(names: Sequence[str]) -> str | None:
    for position, name in enumerate(names, start=1):
        if not name.strip():
            return f"column {position} of the header has no name"
        if name in names[: position - 1]:
            return f'the header has the column "{name}" twice'
    return None
