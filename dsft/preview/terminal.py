"""Format a preview as text, with colors for a terminal or with marks for a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from dsft.preview.content import SIGNS, Block, first_and_last, row_blocks, sections
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


@dataclass(frozen=True)
class Style:
    """width: of the terminal; None: no colors, and lines are not wrapped."""

    width: int | None = None
    color_system: Literal["standard", "256"] = "256"

    @property
    def colors(self) -> bool:
        return self.width is not None


def as_text(view: View, style: Style, *, whole: bool = False, figures: bool = True) -> str:
    """Return the view as text. whole: only rows, each with all of its tokens and their ids; figures: include
    lengths and steps."""
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=style.colors,
        no_color=not style.colors,
        color_system=style.color_system if style.colors else None,
        width=style.width or PLAIN_WIDTH,
        legacy_windows=False,
    )
    for line in _lines(view, style, whole, figures):
        console.print(line, highlight=False, markup=False, soft_wrap=not style.colors)
    return out.getvalue()


def _lines(view: View, style: Style, whole: bool, figures: bool) -> Iterator[Text]:
    found = sections(view)
    if not whole:
        yield Text(view.title, style="bold")
        yield from _drawn(found["Data"], style)
    if view.rows or view.micro_batch or view.worst:
        yield _legend(style)
    if whole:
        for row in view.rows:
            yield from _drawn(row_blocks(row), style, whole=True)
            yield from _table(row.tokens)
        return
    for name in ("Rows", "Micro-batch", "Worst rows", *(("Lengths", "Steps") if figures else ()), "Problems"):
        blocks = found[name]
        if blocks and blocks[0].kind != "title":
            yield _heading("lengths, in tokens" if name == "Lengths" else name.lower())
        yield from _drawn(blocks, style)


def _drawn(blocks: Iterable[Block], style: Style, *, whole: bool = False) -> Iterator[Text]:
    for block in blocks:
        if block.kind == "tokens":
            limit = len(block.tokens) if whole else SHOWN_IN_BATCH if block.brief else SHOWN_TOKENS
            first, last = first_and_last(block.tokens, limit)
            yield _token_text(first, style)
            if last:
                yield Text(f"… {len(block.tokens) - limit:,} tokens …", style="italic")
                yield _token_text(last, style)
        elif block.kind in {"title", "folded"}:
            yield _heading(block.text)
            yield from _drawn(block.blocks, style)
        elif block.kind == "bar" and block.span:
            bar = "█" * round(block.span[1] * BAR) or ("▏" if block.span[1] else "")
            yield Text(f"{block.text}  {bar:{BAR}} {block.note}")
        else:
            mark = {"part": "── ", "item": "  "}.get(block.kind, "")
            yield Text(mark + neutral(block.text))


def _heading(text: str) -> Text:
    return Text(f"\n{neutral(text)}", style="bold")


def _legend(style: Style) -> Text:
    if not style.colors:
        return Text(f"\n{TRAINED}trained on{END_TRAINED}, {BORDER} between tokens, {SIGNS}")
    words = (("trained on", _TRAINED[0]), " ", ("given", _GIVEN[0]), " ", ("special", _GIVEN[0] + _SPECIAL))
    return Text.assemble("\n", *words, f"; neighboring tokens in two shades, {SIGNS}")


def _table(tokens: Sequence[Token]) -> Iterator[Text]:
    yield Text("\nposition       id  trained  token")
    for position, token in enumerate(tokens):
        text = visible(token.text) if token.text else f"(begins a character: {neutral(token.name)})"
        yield Text(f"{position:8} {token.id:8}  {'yes' if token.trained else 'no':7}  {text}")


def _token_text(tokens: Sequence[Token], style: Style) -> Text:
    """Return tokens as one text; a line break is shown as a sign and as a new line."""
    text, trained = Text(), False
    for position, token in enumerate(tokens):
        shown = visible(token.text).replace(LINE_BREAK, f"{LINE_BREAK}\n")
        if style.colors:
            shades = _TRAINED if token.trained else _GIVEN
            text.append(shown, shades[position % 2] + (_SPECIAL if token.special else ""))
            continue
        if token.trained != trained:
            text.append(TRAINED if token.trained else END_TRAINED)
        elif position:
            text.append(BORDER)
        text.append(shown)
        trained = token.trained
    if trained:
        text.append(END_TRAINED)
    return text
