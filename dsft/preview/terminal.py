"""Format a preview as text, with colors for a terminal or with marks for a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Literal

from rich.console import Console
from rich.text import Text

from dsft.preview.content import SIGNS, Element, first_and_last, row_elements, sections
from dsft.preview.tokens import BORDER, END_TRAINED, LINE_BREAK, TRAINED, Token, neutral, visible
from dsft.preview.view import View

SHOWN_TOKENS = 400  # tokens of a row, unless it is the only one shown
SHOWN_IN_BATCH = 24
BAR = 40
PLAIN_WIDTH = 110
# Two alternating shades each, so that neighboring tokens differ; also for terminals with 16 colors.
_TRAINED = ("color(16) on color(120)", "color(16) on color(40)")
_GIVEN = ("color(16) on color(254)", "color(16) on color(250)")
_SPECIAL = " bold underline"


Colors = Literal["standard", "256"]  # rich's names of color systems


def as_text(
    view: View,
    colors: Colors | None = None,
    width: int = PLAIN_WIDTH,
    *,
    whole: bool = False,
    figures: bool = True,
) -> str:
    """Return the view as text.

    colors   those that the terminal has; None: marks instead, and lines are not wrapped
    whole    only rows, each with all of its tokens and their ids
    figures  include lengths and steps
    """
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=colors is not None,
        no_color=colors is None,
        color_system=colors,
        width=width,
        legacy_windows=False,
    )
    for line in _lines(view, whole, figures, in_color=colors is not None):
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=colors is None)
    return out.getvalue()


def _lines(view: View, whole: bool, figures: bool, *, in_color: bool) -> Iterator[Text]:
    found = sections(view)
    if not whole:
        yield Text(view.title, style="bold")
        yield from _formatted(found["Data"], in_color)
    if view.rows or view.micro_batch or view.worst:
        yield _legend(in_color, whole=whole)
    if whole:
        for row in view.rows:
            yield from _formatted(row_elements(row), in_color, whole=True)
            yield from _table(row.tokens)
        return
    for name, elements in found.items():
        if name == "Data" or (name in {"Lengths", "Steps"} and not figures):
            continue
        if elements and elements[0].kind != "title":
            yield _heading("lengths, in tokens" if name == "Lengths" else name.lower())
        yield from _formatted(elements, in_color)


def _formatted(elements: Iterable[Element], in_color: bool, *, whole: bool = False) -> Iterator[Text]:
    for element in elements:
        if element.kind == "tokens":
            limit = len(element.tokens) if whole else SHOWN_IN_BATCH if element.brief else SHOWN_TOKENS
            first, last = first_and_last(element.tokens, limit)
            as_shown = _shaded if in_color else _bordered if whole else _marked
            yield as_shown(first)
            if last:
                yield Text(f"… {len(element.tokens) - limit:,} tokens …", style="italic")
                yield as_shown(last)
        elif element.kind in {"title", "folded"}:
            yield _heading(element.text)
            yield from _formatted(element.elements, in_color)
        elif element.kind == "bar" and element.span:
            bar = "█" * round(element.span[1] * BAR) or ("▏" if element.span[1] else "")
            yield Text(f"{element.text}  {bar:{BAR}} {element.note}")
        else:
            mark = {"part": "── ", "item": "  "}.get(element.kind, "")
            yield Text(mark + neutral(element.text))


def _heading(text: str) -> Text:
    return Text(f"\n{neutral(text)}", style="bold")


def _legend(in_color: bool, *, whole: bool) -> Text:
    if not in_color:
        border = f"{BORDER} between tokens, " if whole else ""
        return Text(f"\n{TRAINED}trained on{END_TRAINED}, {border}{SIGNS}")
    words = (("trained on", _TRAINED[0]), " ", ("given", _GIVEN[0]), " ", ("special", _GIVEN[0] + _SPECIAL))
    return Text.assemble("\n", *words, f"; neighboring tokens in two shades, {SIGNS}")


def _table(tokens: Sequence[Token]) -> Iterator[Text]:
    yield Text("\nposition       id  trained  token")
    for position, token in enumerate(tokens):
        text = visible(token.text) if token.text else f"(begins a character: {neutral(token.name)})"
        yield Text(f"{position:8} {token.id:8}  {'yes' if token.trained else 'no':7}  {text}")


def _shown(text: str) -> str:
    """Return text in which a line break is a sign and a new line."""
    return visible(text).replace(LINE_BREAK, f"{LINE_BREAK}\n")


def _shaded(tokens: Sequence[Token]) -> Text:
    text = Text()
    for position, token in enumerate(tokens):
        shades = _TRAINED if token.trained else _GIVEN
        text.append(_shown(token.text), shades[position % 2] + (_SPECIAL if token.special else ""))
    return text


def _marked(tokens: Sequence[Token], border: str = "") -> Text:
    """Return tokens with marks around what is trained on, and a border between them."""
    text = Text()
    for trained, run in groupby(tokens, lambda token: token.trained):
        texts = [token.text for token in run]
        shown = border.join(map(_shown, texts)) if border else _shown("".join(texts))
        text.append(f"{TRAINED}{shown}{END_TRAINED}" if trained else shown)
    return text


_bordered = partial(_marked, border=BORDER)
