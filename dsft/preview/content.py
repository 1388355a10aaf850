"""What a preview shows, as sections of elements that the terminal and the page draw, each in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dsft.preview.problems import KINDS
from dsft.preview.tokens import LINE_BREAK, SPACE, TAB, Token
from dsft.preview.view import BatchView, RowView, View

SIGNS = f"{LINE_BREAK} line break, {TAB} tab, {SPACE} one of several spaces, or a token of spaces"


@dataclass(frozen=True)
class Element:
    """A piece of a preview.

    kind    title: a heading; folded: the heading of elements that a page shows on a click; part: a smaller
            heading; line: a sentence; item: an entry of a list; bar: a bar of a histogram; tokens: tokens
    text    what it says; for a bar, its label
    tokens  the tokens; brief: few of them are enough
    start   position of the first token in its row
    span    where a part begins and ends in its micro-batch, or the length of a bar, 0 to 1
    note    what is written after a bar
    elements  of a folded title
    """

    kind: Literal["title", "folded", "part", "line", "item", "bar", "tokens"]
    text: str = ""
    tokens: Sequence[Token] = ()
    start: int = 0
    brief: bool = False
    span: tuple[float, float] | None = None
    note: str = ""
    elements: tuple[Element, ...] = ()


def sections(view: View) -> dict[str, list[Element]]:
    """Return the sections of a preview by name; a section without elements is not shown."""
    return {
        "Data": [Element("line", line) for line in view.data.messages],
        "Rows": [element for row in view.rows for element in row_elements(row)],
        "Micro-batch": list(_micro_batch(view.micro_batch)) if view.micro_batch else [],
        "Worst rows": list(_worst(view)),
        "Lengths": list(_lengths(view)),
        "Steps": [Element("line", line) for line in _steps(view)],
        "Problems": list(_problems(view)),
    }


def _worst(view: View) -> Iterator[Element]:
    for title, rows in view.worst.items():
        yield Element("title", f"{title}:")
        yield from (Element("folded", title_of(row), elements=tuple(_pieces(row))) for row in rows)


def row_elements(row: RowView) -> Iterator[Element]:
    yield Element("title", title_of(row))
    yield from _pieces(row)


def title_of(row: RowView) -> str:
    """Return a one-line description of a row."""
    facts = [f"row {row.number}"] if row.number is not None else []
    facts += [row.source, f"{len(row.tokens):,} tokens", f"{row.trained:,} trained on"]
    facts += [value if isinstance(value, str) else f"{name} {value:g}" for name, value in row.values.items()]
    if row.prompt is not None:
        once = ", computed once" if row.shared else ""
        facts.append(f"two answers after a prompt of {row.prompt:,} tokens{once}")
    elif len(row.segments) > 1:
        facts.append(f"{len(row.segments)} pieces")
    return ", ".join([*facts, *filter(None, (row.extent, row.why))])


def _pieces(row: RowView) -> Iterator[Element]:
    start = 0
    after = "after the prompt's last token" if row.shared else "after the prompt"
    answers = ("the prompt and the chosen answer", f"the rejected answer {after}")
    for number, length in enumerate(row.segments):
        name = f"piece {number + 1}" if row.prompt is None else answers[number]
        if len(row.segments) > 1:
            yield Element("part", f"{name}, tokens {start:,} to {start + length - 1:,}")
        yield Element("tokens", tokens=row.tokens[start : start + length], start=start)
        start += length


def _micro_batch(batch: BatchView) -> Iterator[Element]:
    """Yield the title of a micro-batch, then each of its segments or rows with its place."""
    is_pairs = any(row.prompt is not None for row in batch.rows)
    if batch.packed:
        what = counted(len(batch.rows), "pair" if is_pairs else "example")
        layout = f"packed: {what} in one row of {batch.width:,} tokens"
    else:
        layout = f"padded: {len(batch.rows) * (1 + is_pairs)} rows of {batch.width:,} positions"
    yield Element("title", f"first micro-batch of step 1, {layout}")
    start = 0
    for row in batch.rows:
        begin = 0
        for number, length in enumerate(row.segments if row.prompt is not None else [len(row.tokens)]):
            tokens = row.tokens[begin : begin + length]
            facts = [row.source]
            if row.prompt is not None:
                facts.append(("chosen", "rejected")[number])
                if number and row.shared:
                    facts.append(f"from position {row.prompt - 1:,} on")
            if batch.packed:
                facts.append(f"positions {start:,} to {start + length - 1:,}")
            else:
                facts.append(f"{length:,} tokens, {batch.width - length:,} positions of padding")
            facts.append(f"{sum(token.trained for token in tokens):,} trained on")
            first = start if batch.packed else 0
            yield Element(
                "part", ", ".join(facts), span=(first / batch.width, (first + length) / batch.width)
            )
            yield Element("tokens", tokens=tokens, brief=True)
            begin, start = begin + length, start + length


def _lengths(view: View) -> Iterator[Element]:
    lengths = view.lengths
    if lengths is None:
        return
    most = max(count for *_, count in lengths.bins)
    percentiles = {"p50": lengths.p50, "p95": lengths.p95, "p99": lengths.p99}
    for start, stop, count in lengths.bins:
        here = [name for name, length in percentiles.items() if start <= length <= stop]
        note = ", ".join([f"{count:,}", *here])
        yield Element("bar", f"{start:7,} to {stop:7,}", span=(0, count / most), note=note)
    yield Element(
        "line",
        f"p50 {lengths.p50:,}, p95 {lengths.p95:,}, p99 {lengths.p99:,}, longest {lengths.longest:,}, "
        f"mean {lengths.mean:,.1f}; data.max_length {lengths.max_length:,}"
        + (", for the prompt and one answer" if view.unit == "pair" else ""),
    )
    yield Element("line", f"{view.trained_share:.1%} of the tokens are trained on")


def _steps(view: View) -> Iterator[str]:
    steps = view.steps
    if steps is None:
        return
    yield view.data.batch.equation()
    yield (
        f"{counted(steps.per_epoch, 'step')} per epoch, {steps.total:,} in total; "
        f"{steps.mean_tokens:,.0f} tokens per step on average, at most {steps.most_tokens:,}"
    )
    for way in steps.padding:
        yield (
            f"{way}: {steps.padding[way]:.2%} of the positions are padding, "
            f"{steps.idle[way]:.2%} with those for which a rank waits for the fullest one"
        )
    if steps.of_steps < steps.per_epoch:
        yield f"tokens and padding are computed from the first {steps.of_steps:,} steps"


def _problems(view: View) -> Iterator[Element]:
    if not view.problems and view.data.loaded.refusal is None:
        yield Element("title", "no problems")
    for kind, (count, rows) in view.problems.items():
        yield Element("line", f"{counted(count, view.unit)} {KINDS[kind]}")
        yield from (Element("item", f"{row.source}: {row.reason}") for row in rows)
        if 0 < len(rows) < count:
            yield Element("item", f"… and {count - len(rows):,} more")
    if view.problems and not any(rows for _, rows in view.problems.values()):
        yield Element("line", "add --problems to list them")


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def first_and_last(tokens: Sequence[Token], limit: int) -> tuple[Sequence[Token], Sequence[Token]]:
    """Return all tokens and none, or the first and the last ones if there are more than `limit`."""
    last = limit // 4 if len(tokens) > limit else 0
    return tokens[: limit - last], tokens[len(tokens) - last :]
