"""A preview as text. Takes a view; gives lines with colours for a terminal, or with marks for a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from dsft.preview.figures import Lengths, Steps
from dsft.preview.tokens import BORDER, END_TRAINED, LINE_BREAK, TRAINED, Token, visible
from dsft.preview.view import MicroBatch, ShownRow, View

SHOWN_TOKENS = 400  # of a row, unless it is asked for alone
BAR = 40
# Two shades of each, for tokens beside each other.
_TRAINED = ("black on green", "black on bright_green")
_GIVEN = ("black on white", "black on bright_white")
_SPECIAL = " bold underline"


@dataclass(frozen=True)
class Style:
    colours: bool
    width: int | None = None


def as_text(view: View, style: Style, *, whole: bool = False) -> str:
    """whole: the rows with all of their tokens, each with its id."""
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=style.colours,
        no_color=not style.colours,
        width=style.width or 110,
        soft_wrap=not style.colours,
        color_system="standard" if style.colours else None,
        legacy_windows=False,
    )
    for line in _lines(view, style, whole):
        console.print(line, highlight=False, markup=False, soft_wrap=not style.colours)
    return out.getvalue()


def _lines(view: View, style: Style, whole: bool) -> Iterator[Text]:
    yield Text(f"{view.name}: {view.task}, {view.examples:,} examples")
    yield from map(_plain, view.notes)
    yield from map(_plain, view.ledger)
    if view.rows or view.micro_batch:
        yield _legend(style)
    for row in view.rows:
        yield from _row(row, style, whole)
    if view.micro_batch is not None:
        yield from _micro_batch(view.micro_batch, style)
    if view.lengths is not None and not whole:
        yield from _lengths(view.lengths, view.trained_share)
    if view.steps is not None and not whole:
        yield from _steps(view.steps, view.batch)


def _plain(text: str) -> Text:
    return Text(visible(text))


def _heading(text: str) -> Text:
    return Text(f"\n{visible(text)}", style="bold")


def _legend(style: Style) -> Text:
    if style.colours:
        return Text.assemble(
            "\n",
            ("trained on", _TRAINED[0]),
            " ",
            ("given", _GIVEN[0]),
            " ",
            ("special", _GIVEN[0] + _SPECIAL),
        )
    return Text(f"\n{TRAINED}trained on{END_TRAINED}, {BORDER} between tokens, {LINE_BREAK} a line break")


# --- rows -------------------------------------------------------------------------------------------------


def _row(row: ShownRow, style: Style, whole: bool) -> Iterator[Text]:
    why = f": {row.why}" if row.why else ""
    yield _heading(
        f"row {row.number}, {row.source}, {len(row.tokens):,} tokens, {row.trained:,} trained{why}"
    )
    yield from _cut(row.tokens, style, len(row.tokens) if whole else SHOWN_TOKENS)
    if whole:
        yield Text("\nposition     id  trained  token")
        for position, token in enumerate(row.tokens):
            mark = "yes" if token.trained else ""
            text = visible(token.text) if token.text else f"begins a character ({visible(token.name)})"
            yield Text(f"{position:8} {token.id:6}  {mark:7}  {text}")


def _cut(tokens: Sequence[Token], style: Style, most: int) -> Iterator[Text]:
    """All tokens, or the first and the last ones."""
    if len(tokens) <= most:
        yield laid(tokens, style)
        return
    last = most // 4
    yield laid(tokens[: most - last], style)
    yield Text(f"… {len(tokens) - most:,} tokens …", style="italic")
    yield laid(tokens[-last:], style)


def laid(tokens: Sequence[Token], style: Style) -> Text:
    """The tokens one after the other; a line break is shown, and made."""
    text, trained = Text(), False
    for position, token in enumerate(tokens):
        shown = visible(token.text).replace(LINE_BREAK, f"{LINE_BREAK}\n")
        if style.colours:
            shades = _TRAINED if token.trained else _GIVEN
            text.append(shown, shades[position % 2] + (_SPECIAL if token.special else ""))
            continue
        if token.trained != trained:
            text.append(TRAINED if token.trained else END_TRAINED)
        elif position:
            text.append(BORDER)
        text.append(shown)
        trained = token.trained
    if trained and not style.colours:
        text.append(END_TRAINED)
    return text


def _micro_batch(batch: MicroBatch, style: Style) -> Iterator[Text]:
    count = len(batch.rows)
    if batch.packed:
        yield _heading(
            f"first micro-batch of step 1, packed: {count} examples in one row of {batch.width:,} tokens"
        )
    else:
        yield _heading(f"first micro-batch of step 1, padded: {count} rows of {batch.width:,} places")
    start = 0
    for row in batch.rows:
        length = len(row.tokens)
        at = f"places {start:,} to {start + length - 1:,}" if batch.packed else f"{length:,} tokens"
        padding = "" if batch.packed else f", {batch.width - length:,} of padding"
        yield Text(visible(f"── {row.source}, {at}, {row.trained:,} trained{padding}"))
        yield from _cut(row.tokens, style, 24)
        start += length


# --- figures ----------------------------------------------------------------------------------------------


def _lengths(lengths: Lengths, share: float) -> Iterator[Text]:
    yield _heading("lengths, in tokens")
    most = max(count for *_, count in lengths.bins)
    for start, stop, count in lengths.bins:
        bar = "█" * round(count / most * BAR) or ("▏" if count else "")
        yield Text(f"{start:6,} to {stop:6,}  {bar:{BAR}} {count:,}")
    yield Text(
        f"p50 {lengths.p50:,}, p95 {lengths.p95:,}, p99 {lengths.p99:,}, longest {lengths.longest:,}, "
        f"mean {lengths.mean:,.1f}; data.max_length {lengths.max_length:,}"
    )
    yield Text(f"{share:.1%} of the tokens are trained on")


def _steps(steps: Steps, batch: str) -> Iterator[Text]:
    yield _heading("steps")
    yield Text(batch)
    yield Text(
        f"{steps.per_epoch:,} an epoch, {steps.total:,} in all, of {steps.mean_tokens:,.0f} tokens on "
        f"average and {steps.most_tokens:,} at most"
    )
    for way in ("padded", "packed"):
        yield Text(
            f"{way}: {steps.padding[way]:.1%} padding, {steps.with_waiting[way]:.1%} with waiting for the "
            "fullest rank"
        )
    if steps.of_steps < steps.per_epoch:
        yield Text(f"tokens and padding as in the first {steps.of_steps:,} steps")
