"""Write a preview as one self-contained HTML page.

Content of the rows is always escaped text, never an element or an attribute. The page has no script, and its
content security policy lets the browser run no script and load nothing.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from dsft.errors import StorageError
from dsft.preview.figures import LengthStats
from dsft.preview.problems import KINDS, Problems
from dsft.preview.terminal import (
    SIGNS,
    batch_title,
    length_lines,
    piece_names,
    places_of,
    step_lines,
    title_of,
)
from dsft.preview.tokens import LINE_BREAK, Token, neutral, visible
from dsft.preview.view import BatchView, RowView, View, WorstView

SHOWN_TOKENS = 4096  # tokens of a row that are shown
_BEGIN = "<!doctype html>"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --paper: #fff; --faint: #667; --line: #d5d9de;
  --given: #eef0f3; --given2: #e1e5ea; --trained: #c9efd0; --trained2: #aee3b9; --special: #7a3ea8;
  --bar: #5b8def; --alarm: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --paper: #15181c; --faint: #9aa4b0;
  --line: #343a42; --given: #22272e; --given2: #2c323a; --trained: #1d4a2a; --trained2: #276238;
  --special: #d0a6f5; --bar: #5b8def; --alarm: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin-bottom: .3rem; } h3 small { font-weight: normal; color: var(--faint); }
nav a { margin-right: 1rem; } a { color: inherit; }
pre { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; margin: .3rem 0 1rem;
  unicode-bidi: isolate; }
pre b, pre i { font-weight: normal; font-style: normal; padding: .1em 0; border-left: 1px solid var(--paper);
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
pre i { background: var(--given); } pre i:nth-child(even) { background: var(--given2); }
pre b { background: var(--trained); } pre b:nth-child(even) { background: var(--trained2); }
pre .s { color: var(--special); font-weight: bold; }
pre u { text-decoration: none; color: var(--faint); }
.wide { overflow-x: auto; margin-bottom: 1rem; } table { border-collapse: collapse; }
th, td { text-align: right; white-space: nowrap; padding: .2rem .6rem; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } th:first-child, td:first-child { text-align: left; }
svg { width: 100%; max-width: 40rem; height: auto; }
svg rect { fill: var(--bar); } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg line { stroke: var(--alarm); stroke-dasharray: 3 3; }
.alarm { color: var(--alarm); } ul { padding-left: 1.2rem; } summary { cursor: pointer; }
"""


def check_writable(path: Path) -> None:
    """Raise StorageError if the page cannot be written there, before any row is read."""
    if path.is_dir():
        raise StorageError(f"--html {path}: this is a folder; name a file, such as {path / 'preview.html'}")
    if not path.parent.is_dir():
        raise StorageError(f"--html {path}: the folder {path.parent} does not exist; make it or name another")
    if path.is_file() and not _is_page(path):
        raise StorageError(
            f"--html {path}: a file that is no page is there, and is left as it is; name another"
        )


def _is_page(path: Path) -> bool:
    """Return whether the file is empty or begins like a page, so that `--html` may overwrite it."""
    try:
        with path.open("rb") as file:
            begin = file.read(len(_BEGIN))
    except OSError:
        return True  # the error is raised when the page is written
    return begin in {b"", _BEGIN.encode()}


def write_page(view: View, path: Path) -> None:
    """Write the page. Raises StorageError if the file cannot be written."""
    try:
        path.write_text(page(view), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"--html {path}: cannot be written ({error.strerror}); free some space, or name another file"
        ) from error


def page(view: View) -> str:
    """Return the HTML of the whole page."""
    sections = [(name, list(lines)) for name, lines in _sections(view)]
    links = " ".join(f'<a href="#{_anchor(name)}">{_escaped(name)}</a>' for name, lines in sections if lines)
    body = [f"<h1>{_escaped(f'{view.name}: {view.task}, {view.examples:,} {view.unit}s')}</h1>"]
    body += [f'<p class="alarm">{_escaped(line)}</p>' for line in _refusal(view)]
    body += [f"<nav>{links}</nav>"]
    for name, lines in sections:
        if lines:
            body += [f'<h2 id="{_anchor(name)}">{_escaped(name)}</h2>', *lines]
    return "\n".join(
        [
            _BEGIN,
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escaped(view.name)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _sections(view: View) -> Iterator[tuple[str, Iterable[str]]]:
    yield "Data", _data(view)
    yield "Lengths", _lengths(view.lengths, view.trained_share) if view.lengths else ()
    yield "Steps", (_paragraphs([view.batch, *step_lines(view.steps)]) if view.steps else ())
    yield "Marks", _legend()
    yield "Micro-batch", _micro_batch(view.micro_batch) if view.micro_batch else ()
    yield "Rows", [line for row in view.rows for line in _row(row)]
    yield "Worst rows", _worst(view.worst)
    yield "Problems", _problems(view.problems, view.unit_of_data)


def _escaped(text: str) -> str:
    return html.escape(neutral(text), quote=True)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _paragraphs(lines: Iterable[str]) -> list[str]:
    return [f"<p>{_escaped(line)}</p>" for line in lines]


def _listed(lines: Iterable[str]) -> str:
    return "<ul>" + "\n".join(f"<li>{_escaped(line)}</li>" for line in lines) + "</ul>"


def _refusal(view: View) -> list[str]:
    if view.refusal is None:
        return []
    title, problems = view.refusal
    return [f"A run would stop here: {title}", *map(str, problems)]


# --- rows -------------------------------------------------------------------------------------------------


def _tokens(tokens: Sequence[Token], start: int = 0) -> str:
    """Return tokens as HTML: <b> is trained on, <i> is not; class s: special; title: position and id."""
    return "".join(_token(position, token) for position, token in enumerate(tokens, start))


def _token(position: int, token: Token) -> str:
    name = "b" if token.trained else "i"
    special = ' class="s"' if token.special else ""
    shown = html.escape(visible(token.text), quote=True).replace(LINE_BREAK, f"<u>{LINE_BREAK}</u>\n")
    return f'<{name}{special} title="{position}: id {token.id}">{shown}</{name}>'


def _laid(tokens: Sequence[Token]) -> str:
    rest = len(tokens) - SHOWN_TOKENS
    if rest <= 0:
        return f'<pre dir="ltr">{_tokens(tokens)}</pre>'
    last = SHOWN_TOKENS // 4
    first, end = tokens[: SHOWN_TOKENS - last], tokens[-last:]
    return (
        f'<pre dir="ltr">{_tokens(first)}</pre><p>… {rest:,} tokens …</p>'
        f'<pre dir="ltr">{_tokens(end, len(tokens) - last)}</pre>'
    )


def _row(row: RowView) -> Iterator[str]:
    yield f"<h3>{_escaped(title_of(row))}</h3>"
    start = 0
    for name, length in zip(piece_names(row), row.segments, strict=True):
        if row.prompt is not None:
            yield f"<h3><small>{_escaped(name)}</small></h3>"
        yield _laid(row.tokens[start : start + length])
        start += length


def _micro_batch(batch: BatchView) -> Iterator[str]:
    yield f"<p>{_escaped(batch_title(batch))}</p>"
    yield _borders(batch)
    for row, where in places_of(batch):
        yield f"<h3><small>{_escaped(where)}</small></h3>"
        yield _laid(row.tokens)


def _borders(batch: BatchView) -> str:
    """Return an SVG of the micro-batch's examples as bars, side by side if packed, else one below the other.
    The width of 400 units is that of the micro-batch."""
    bars, start = [], 0.0
    rows = [row for row, _ in places_of(batch)]
    for number, row in enumerate(rows):
        width = 400 * len(row.tokens) / batch.width
        x, y = (start, 0) if batch.packed else (0, 10 * number)
        bars.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(1.0, width - 1):.1f}" height="8">'
            f"<title>{_escaped(row.source)}: {len(row.tokens):,} tokens</title></rect>"
        )
        start += width
    tall = 10 if batch.packed else 10 * len(rows)
    return f'<svg viewBox="0 0 400 {tall}" role="img" aria-label="borders of examples">{"".join(bars)}</svg>'


def _worst(kinds: Sequence[WorstView]) -> Iterator[str]:
    for kind in kinds:
        yield f"<h3>{_escaped(kind.title)}</h3>"
        for row in kind.rows:
            yield f"<details><summary>{_escaped(title_of(row))}</summary>{_laid(row.tokens)}</details>"


def _legend() -> Iterator[str]:
    yield (
        f'<pre dir="ltr"><b>trained on</b> <i>given</i><i> in two shades,</i><i> a token each</i> '
        f'<i class="s">special</i> {SIGNS}</pre>'
    )
    yield "<p>Other characters that do not show are written out, such as ⟨U+202E⟩.</p>"


# --- figures ----------------------------------------------------------------------------------------------


def _data(view: View) -> Iterator[str]:
    """Yield the formats of files, the ledger by source, and a run's messages about them."""
    files = [file for ledger in view.ledgers.values() for file in ledger["files"]]
    yield _listed(f"{file['file']}: {file['reason']}" for file in files)
    figures = dict.fromkeys(
        name for ledger in view.ledgers.values() for name, figure in ledger.items() if _counts(figure)
    )
    rows = [[key.replace("_", " "), *(f"{one[key]:,}" for one in view.ledgers.values())] for key in figures]
    yield _table([["", *view.ledgers], *rows])
    told = "\n".join(_escaped(line) for line in view.told)
    yield f"<details><summary>what a run says of it</summary><pre>{told}</pre></details>"


def _counts(figure: object) -> bool:
    """Return whether a value of a ledger is a count above zero."""
    return isinstance(figure, int) and figure > 0


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose first line is the head."""
    kinds = ["th", *["td"] * (len(lines) - 1)]
    cells = (
        "".join(f"<{kind}>{_escaped(cell)}</{kind}>" for cell in line)
        for kind, line in zip(kinds, lines, strict=True)
    )
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in cells)}</table></div>'


def _lengths(lengths: LengthStats, share: float) -> Iterator[str]:
    yield from _paragraphs(length_lines(lengths, share))
    yield _histogram(lengths)


def _histogram(lengths: LengthStats) -> str:
    """Return an SVG histogram of lengths, with dashed lines at percentiles; 400 × 190 units."""
    width, height, left, top = 400, 190, 30, 24
    room, base = width - 2 * left, height - 20
    most, end = max(count for *_, count in lengths.bins), lengths.bins[-1][1]
    bar = room / len(lengths.bins)
    parts = []
    for i, (start, stop, count) in enumerate(lengths.bins):
        tall = count / most * (base - top - 12)
        x = left + i * bar
        parts.append(
            f'<rect x="{x + 1:.1f}" y="{base - tall:.1f}" width="{bar - 2:.1f}" height="{tall:.1f}">'
            f"<title>{start:,} to {stop:,} tokens: {count:,}</title></rect>"
            f'<text x="{x + bar / 2:.1f}" y="{base - tall - 2:.1f}" text-anchor="middle">{count or ""}</text>'
        )
    for name, value in (("p50", lengths.p50), ("p95", lengths.p95), ("p99", lengths.p99)):
        x = left + value / end * room
        parts.append(
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{base}"/>'
            f'<text x="{x:.1f}" y="{top - 2 - 10 * (name == "p95")}" text-anchor="middle">{name}</text>'
        )
    for x, value, anchor in ((left, 0, "start"), (left + room, end, "end")):
        parts.append(f'<text x="{x}" y="{base + 13}" text-anchor="{anchor}">{value:,}</text>')
    said = 'role="img" aria-label="histogram of lengths"'
    return f'<svg viewBox="0 0 {width} {height}" {said}>{"".join(parts)}</svg>'


# --- problems ---------------------------------------------------------------------------------------------


def _problems(problems: Problems, unit: str) -> Iterator[str]:
    if not problems.counts:
        yield f"<p>None of single {unit}s.</p>"
    for kind, count in problems.counts.items():
        yield f"<h3>{count:,} {unit if count == 1 else f'{unit}s'} {_escaped(KINDS[kind])}</h3>"
        rows = [row for row in problems.rows if row.kind == kind]
        yield _listed(f"{row.source}: {row.reason}" for row in rows)
        if count > len(rows):
            yield f"<p>… and {count - len(rows):,} more</p>"
