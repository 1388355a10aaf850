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
    bad: list[str] = []  # mistakes of the lines of one row

    def with_line_breaks() -> Iterator[str]:
        for text, mistake in texts:
            bad.extend([mistake] if mistake is not None else [])
            yield text + "\n"

    csv.field_size_limit(MAX_LINE)  # global for the process: the csv module has no other way
    reader = csv.reader(with_line_breaks(), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        bad.clear()
        number, fields = reader.line_num + 1, list[str]()
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.append(_syntax(error))
        if not bad and len(fields) < 2 and not "".join(fields).strip():
            yield Line(number)
        elif not header:
            if mistakes := [*bad, *_header_mistakes(fields)]:
                yield Line(number, mistake=f"{mistakes[0].removesuffix(STOPS)}{STOPS}")
                return
            header = fields
        elif bad:
            yield Line(number, mistake=bad[0])
            if bad[-1].endswith(STOPS):
                return
        elif len(fields) != len(header):
            hint = "write fields that contain a delimiter or a line break in double quotes"
            has = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            yield Line(number, mistake=f"{has}, but the header has {len(header)}; {hint}")
        else:
            yield Line(number, dict(zip(header, fields, strict=True)))


def _syntax(error: csv.Error) -> str:
    reason = str(error)
    if reason == "unexpected end of data":
        return "cut off: a quote that is opened here is not closed"
    if reason.startswith("field larger"):
        return f"a field has over {MAX_LINE:,} characters, or its quote is not closed{STOPS}"
    return f"not CSV: {reason}"


def _header_mistakes(names: Sequence[str]) -> Iterator[str]:
    for position, name in enumerate(names, start=1):
        if not name.strip():
            yield f"column {position} of the header has no name"
        if name in names[: position - 1]:
            yield f'the header has the column "{name}" twice'
