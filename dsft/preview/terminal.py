"""Format a preview as text, with colors for a terminal or with marks for a pipe."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.console import Console
from rich.text import Text

from dsft.preview.figures import LengthStats, StepStats
from dsft.preview.problems import KINDS, Problems
from dsft.preview.tokens import BORDER, END_TRAINED, LINE_BREAK, SPACE, TAB, TRAINED, Token, neutral, visible
from dsft.preview.view import BatchView, RowView, View

SHOWN_TOKENS = 400  # tokens of a row, unless it is the only one shown
SHOWN_IN_BATCH = 24
BAR = 40
SIGNS = f"{LINE_BREAK} line break, {TAB} tab, {SPACE} a space that stands alone or with others"
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
    if not whole:
        yield Text(f"{view.name}: {view.task}, {view.examples:,} {view.unit}s", style="bold")
        yield from (Text(neutral(line)) for line in view.told)
    if view.rows or view.micro_batch or view.worst:
        yield _legend(style)
    for row in view.rows:
        yield from _row(row, style, whole)
    if view.micro_batch is not None:
        yield from _micro_batch(view.micro_batch, style)
    for kind in view.worst:
        yield _heading(f"{kind.title}:")
        for row in kind.rows:
            yield from _row(row, style, whole)
    if whole:
        return
    if view.lengths is not None and view.steps is not None and figures:
        yield from _lengths(view.lengths, view.trained_share)
        yield from _steps(view.steps, view.batch)
    if view.problems.counts or view.refusal is None:
        yield from _problems(view.problems, view.unit_of_data)


def _heading(text: str) -> Text:
    return Text(f"\n{neutral(text)}", style="bold")


def _legend(style: Style) -> Text:
    if not style.colors:
        return Text(f"\n{TRAINED}trained on{END_TRAINED}, {BORDER} between tokens, {SIGNS}")
    words = (("trained on", _TRAINED[0]), " ", ("given", _GIVEN[0]), " ", ("special", _GIVEN[0] + _SPECIAL))
    return Text.assemble("\n", *words, f"; neighbouring tokens in two shades, {SIGNS}")


# --- rows -------------------------------------------------------------------------------------------------


def title_of(row: RowView) -> str:
    """Return a one-line description of a row."""
    said = [f"row {row.number}"] if row.number is not None else []
    said += [row.source, f"{len(row.tokens):,} tokens", f"{row.trained:,} trained on"]
    if row.prompt is not None:
        once = ", computed once" if row.shared else ""
        said.append(f"two answers after a prompt of {row.prompt:,} tokens{once}")
    elif len(row.segments) > 1:
        said.append(f"{len(row.segments)} pieces")
    return ", ".join([*said, *filter(None, (row.happened, row.why))])


def _row(row: RowView, style: Style, whole: bool) -> Iterator[Text]:
    yield _heading(title_of(row))
    most = len(row.tokens) if whole else SHOWN_TOKENS
    start = 0
    for name, length in zip(piece_names(row), row.segments, strict=True):
        if len(row.segments) > 1:
            yield Text(f"── {name}, tokens {start:,} to {start + length - 1:,}")
        yield from _cut(row.tokens[start : start + length], style, most)
        start += length
    if whole:
        yield from _table(row.tokens)


def piece_names(row: RowView) -> list[str]:
    if row.prompt is None:
        return [f"piece {number}" for number in range(1, len(row.segments) + 1)]
    after = "after the prompt's last token" if row.shared else "after the prompt"
    return ["the prompt and the chosen answer", f"the rejected answer {after}"]


def _table(tokens: Sequence[Token]) -> Iterator[Text]:
    yield Text("\nposition       id  trained  token")
    for position, token in enumerate(tokens):
        text = visible(token.text) if token.text else f"(begins a character: {neutral(token.name)})"
        yield Text(f"{position:8} {token.id:8}  {'yes' if token.trained else 'no':7}  {text}")


def _cut(tokens: Sequence[Token], style: Style, most: int) -> Iterator[Text]:
    """Yield all tokens, or the first and last ones if there are more than `most`."""
    if len(tokens) <= most:
        yield laid(tokens, style)
        return
    last = most // 4
    yield laid(tokens[: most - last], style)
    yield Text(f"… {len(tokens) - most:,} tokens …", style="italic")
    yield laid(tokens[-last:], style)


def laid(tokens: Sequence[Token], style: Style) -> Text:
    """Return tokens as one text, in which a line break is both marked and made."""
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


def batch_title(batch: BatchView) -> str:
    pairs = any(row.prompt is not None for row in batch.rows)
    if batch.packed:
        what = _counted(len(batch.rows), "pair" if pairs else "example")
        laid_out = f"packed: {what} in one row of {batch.width:,} tokens"
    else:
        laid_out = f"padded: {len(batch.rows) * (1 + pairs)} rows of {batch.width:,} places"
    return f"first micro-batch of step 1, {laid_out}"


def places_of(batch: BatchView) -> Iterator[tuple[RowView, str]]:
    """Yield each row of a micro-batch with a description of its place."""
    start = 0
    for row in (piece for shown in batch.rows for piece in _rows_of(shown)):
        length = len(row.tokens)
        if batch.packed:
            where = f"places {start:,} to {start + length - 1:,}"
        else:
            where = f"{length:,} tokens, {batch.width - length:,} places of padding"
        yield row, ", ".join(filter(None, (row.source, row.why, where, f"{row.trained:,} trained on")))
        start += length


def _rows_of(row: RowView) -> Iterator[RowView]:
    """Yield the row, or both rows of a pair."""
    if row.prompt is None:
        yield replace(row, why="")
        return
    start = 0
    for name, length in zip(("chosen", "rejected"), row.segments, strict=True):
        at = f", from position {row.prompt - 1:,} on" if start and row.shared else ""
        tokens = row.tokens[start : start + length]
        yield replace(row, tokens=tokens, segments=(length,), why=f"{name}{at}")
        start += length


def _micro_batch(batch: BatchView, style: Style) -> Iterator[Text]:
    yield _heading(batch_title(batch))
    for row, where in places_of(batch):
        yield Text(f"── {neutral(where)}")
        yield from _cut(row.tokens, style, SHOWN_IN_BATCH)


# --- figures ----------------------------------------------------------------------------------------------


def _lengths(lengths: LengthStats, share: float) -> Iterator[Text]:
    yield _heading("lengths, in tokens")
    most = max(count for *_, count in lengths.bins)
    for start, stop, count in lengths.bins:
        bar = "█" * round(count / most * BAR) or ("▏" if count else "")
        yield Text(f"{start:7,} to {stop:7,}  {bar:{BAR}} {count:,}")
    yield from map(Text, length_lines(lengths, share))


def length_lines(lengths: LengthStats, share: float) -> list[str]:
    return [
        f"p50 {lengths.p50:,}, p95 {lengths.p95:,}, p99 {lengths.p99:,}, longest {lengths.longest:,}, "
        f"mean {lengths.mean:,.1f}; data.max_length {lengths.max_length:,}",
        f"{share:.1%} of the tokens are trained on",
    ]


def _steps(steps: StepStats, batch: str) -> Iterator[Text]:
    yield _heading("steps")
    yield from map(Text, [batch, *step_lines(steps)])


def step_lines(steps: StepStats) -> list[str]:
    lines = [
        f"{_counted(steps.per_epoch, 'step')} an epoch, {steps.total:,} in all, "
        f"of {steps.mean_tokens:,.0f} tokens on average and {steps.most_tokens:,} at most"
    ]
    lines += [
        f"{way}: {steps.padding[way]:.2%} of the places are padding, {steps.idle[way]:.2%} with those that "
        "ranks wait for the fullest one"
        for way in steps.padding
    ]
    if steps.of_steps < steps.per_epoch:
        lines.append(f"tokens and padding are those of the first {steps.of_steps:,} steps")
    return lines


# --- problems ---------------------------------------------------------------------------------------------


def _problems(problems: Problems, unit: str) -> Iterator[Text]:
    yield _heading("problems" if problems.counts else "no problems")
    for kind, count in problems.counts.items():
        yield Text(f"{_counted(count, unit)} {KINDS[kind]}")
        rows = [row for row in problems.rows if row.kind == kind]
        yield from (Text(neutral(f"  {row.source}: {row.reason}")) for row in rows)
        if rows and count > len(rows):
            yield Text(
                f"  … and {count - len(rows):,} more; the first {problems.limit:,} of a kind are shown"
            )
    if problems.counts and not problems.limit:
        yield Text("dsft preview SPEC --problems names them")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
