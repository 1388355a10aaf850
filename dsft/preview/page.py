"""Write a preview as one self-contained HTML page.

Content of the rows is always escaped text, never an element or an attribute. The page has no script, and its
content security policy lets the browser run no script and load nothing.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from dsft.preview.content import SIGNS, Element, first_and_last, sections
from dsft.preview.tokens import LINE_BREAK, Token, neutral, visible
from dsft.preview.view import View
from dsft.system.files import page_begin

SHOWN_TOKENS = 4096  # tokens of a row that are shown
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
h3, h4 { font-size: 1rem; margin-bottom: .3rem; } h4 { font-weight: normal; color: var(--faint); }
nav { position: sticky; top: 0; background: var(--paper); padding: .3rem 0; }
nav a { margin-right: 1rem; } a { color: inherit; } h2 { scroll-margin-top: 2.5rem; }
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
.bar { display: grid; grid-template-columns: 9rem 1fr 6rem; gap: .6rem; text-align: right;
  font-variant-numeric: tabular-nums; } .bar small { text-align: left; font-size: inherit; }
hr { height: .5rem; min-width: 1px; margin: 0; border: 0; background: var(--bar); }
.bar hr { height: 1rem; min-width: 0; align-self: center; }
.item { display: list-item; margin: .2rem 0 .2rem 1.2rem; }
.alarm { color: var(--alarm); } summary { cursor: pointer; }
"""


def page(view: View) -> str:
    """Return the HTML of the whole page."""
    parts = {
        name: [_html(element) for element in elements if element.text not in view.data.loaded.tables]
        for name, elements in sections(view).items()
    }
    parts["Data"] += _ledgers(view)
    parts["Micro-batch"][:0] = [_LEGEND] if parts["Micro-batch"] else []
    parts = {name: lines for name, lines in parts.items() if lines}
    anchors = {name: name.lower().replace(" ", "-") for name in parts}
    body = [f"<h1>{_escaped(view.title)}</h1>"]
    refusal = view.data.loaded.refusal
    if refusal is not None:
        errors = [f"A run would stop with this error: {refusal.title}", *map(str, refusal.problems)]
        body += [f'<p class="alarm">{_escaped(line)}</p>' for line in errors]
    links = " ".join(f'<a href="#{anchor}">{name}</a>' for name, anchor in anchors.items())
    body.append(f"<nav>{links}</nav>")
    for name, lines in parts.items():
        body += [f'<h2 id="{anchors[name]}">{name}</h2>', *lines]
    return "\n".join(
        [
            page_begin("dsft preview"),
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_escaped(view.data.spec.name)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


_LEGEND = (
    '<pre dir="ltr"><b>trained on</b> <i>given</i><i> in two shades,</i><i> a token each</i> '
    f'<i class="s">special</i> {SIGNS}</pre>'
    "<p>Other characters that do not show are written out, such as ⟨U+202E⟩.</p>"
)


def _escaped(text: str) -> str:
    return html.escape(neutral(text), quote=True)


def _html(element: Element) -> str:
    """Return an element as HTML. A part has a bar where it is in its micro-batch."""
    text = _escaped(element.text)
    if element.kind == "folded":
        return f"<details><summary>{text}</summary>{''.join(map(_html, element.elements))}</details>"
    if element.kind == "tokens":
        first, last = first_and_last(element.tokens, SHOWN_TOKENS)
        shown = _tokens(first, element.start)
        if last:
            skipped = len(element.tokens) - SHOWN_TOKENS
            shown += f"<p>… {skipped:,} tokens …</p>"
            shown += _tokens(last, element.start + len(element.tokens) - len(last))
        return shown
    begin, end = element.span or (0, 0)
    bar = f'<hr style="margin-left: {begin:.2%}; width: {end - begin:.2%}">' if element.span else ""
    if element.kind == "bar":
        return f'<div class="bar"><span>{text}</span>{bar}<small>{_escaped(element.note)}</small></div>'
    tags = {"title": ("<h3>", "</h3>"), "part": ("<h4>", "</h4>"), "item": ('<p class="item">', "</p>")}
    opening, closing = tags.get(element.kind, ("<p>", "</p>"))
    return f"{opening}{text}{closing}{bar}"


def _tokens(tokens: Sequence[Token], start: int) -> str:
    """Return tokens as HTML: <b> is trained on, <i> is not; class s: special; title: position and id."""
    parts = []
    for position, token in enumerate(tokens, start):
        name = "b" if token.trained else "i"
        special = ' class="s"' if token.special else ""
        shown = html.escape(visible(token.text), quote=True).replace(LINE_BREAK, f"<u>{LINE_BREAK}</u>\n")
        parts.append(f'<{name}{special} title="{position}: id {token.id}">{shown}</{name}>')
    return f'<pre dir="ltr">{"".join(parts)}</pre>'


def _ledgers(view: View) -> Iterator[str]:
    """Yield the ledger of each set as an HTML table, a column for each source, without counts that are
    zero."""
    sets: dict[str, dict[str, dict[str, int]]] = {}
    for one in view.data.loaded.sources:
        sets.setdefault(one.what, {})[one.name] = one.ledger.figures()
    for title, ledgers in sets.items():
        names = dict.fromkeys(
            name for ledger in ledgers.values() for name, count in ledger.items() if count > 0
        )
        rows = [[title, *ledgers]]
        rows += [[name.replace("_", " "), *(f"{one[name]:,}" for one in ledgers.values())] for name in names]
        cells = ["".join(f"<td>{_escaped(cell)}</td>" for cell in row) for row in rows]
        cells[0] = cells[0].replace("td>", "th>")
        yield f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'
