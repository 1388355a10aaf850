"""Find the rows in which something is wrong or lost, with place and reason, and the worst examples.

Tokens are read only to compute tokens per character.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset, SourceExamples
from dsft.data.sets.load import on_too_long
from dsft.data.sets.pairs import PairExamples
from dsft.data.sets.pieces import RowExamples
from dsft.data.sets.selection import PairRows, Selection, is_duplicate, longest_rows
from dsft.spec.schema import Data, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS: Mapping[str, str] = {
    "bad": "cannot be read",
    "too_long": "longer than data.max_length, so a run stops",
    "dropped": "dropped as longer than data.max_length",
    "truncated": "truncated",
    "empty": "empty",
    "no_target": "without a target",
    "no_end": "without an end of turn or text",
    "duplicate": "repeating an earlier one",
}
_TOO_LONG = {"error": "too_long", "drop": "dropped", "truncate": "truncated"}
Mask = NDArray[np.bool_]
SourceSelections = Sequence[Selection]
"""The selections of one source: the rows that are trained on or evaluated, then those that are held out."""
EACH = 3  # worst examples of each kind
DECODED = 2_000  # examples that are decoded to compute their tokens per character: about a second


@dataclass(frozen=True)
class RowProblem:
    """A row with a problem. source: "file:line"; kind: a key of KINDS."""

    source: str
    kind: str
    reason: str


@dataclass(frozen=True)
class Problems:
    """Rows with problems. counts: kind -> number of rows, for kinds that occur; rows: the first `limit` of
    each kind."""

    counts: Mapping[str, int]
    rows: tuple[RowProblem, ...]
    limit: int


def problems_of(sources: Sequence[SourceSelections], spec: Spec, limit: int) -> Problems:
    """Return the problems of all rows by kind, within a kind in the order of the sources."""
    counts = dict.fromkeys(KINDS, 0)
    found: dict[str, list[RowProblem]] = {kind: [] for kind in KINDS}
    content = np.concatenate([read.rows.content[: read.count] for read, *_ in sources])
    duplicate, start = is_duplicate(content), 0
    for source in sources:
        read, account = source[0], source[0].account
        counts["bad"] += account.bad_rows
        found["bad"] += [RowProblem(place, "bad", reason) for place, reason in account.bad]
        says = content[start : start + read.count]
        masks = _masks(source, spec) | {"duplicate": duplicate[start : start + read.count]}
        start += read.count
        for kind, mask in masks.items():
            counts[kind] += int(np.count_nonzero(mask))
            rows = np.flatnonzero(mask)[: max(0, limit - len(found[kind]))].astype(np.int32)
            if kind == "duplicate":
                reasons = [f"repeats {place}" for place in _first_places(sources, content, says[rows])]
            else:
                reasons = [_reason(kind, source, row, spec.data) for row in rows.tolist()]
            found[kind] += [
                RowProblem(at, kind, why) for at, why in zip(read.places(rows), reasons, strict=True)
            ]
    happened = {kind: count for kind, count in counts.items() if count}
    return Problems(happened, tuple(row for kind in happened for row in found[kind][:limit]), limit)


def kinds_of(source: SourceSelections, row: int, spec: Spec) -> list[str]:
    """Return the kinds of problems of one row, in words, except whether it is a duplicate."""
    return [KINDS[kind] for kind, mask in _masks(source, spec).items() if mask[row]]


def parts_of(parts: Iterable[SourceExamples]) -> tuple[RowExamples | PairExamples, ...]:
    """Return the parts that are RowExamples or PairExamples, with their types narrowed."""
    return tuple(part for part in parts if isinstance(part, (RowExamples, PairExamples)))


def row_of(part: RowExamples | PairExamples) -> NDArray[np.int32]:
    """Return the row in which each example of a source begins, or the pair that it is, (examples,)."""
    if isinstance(part, PairExamples):
        return part.pairs
    return part.ids if part.at is None else part.ids[part.at]


def lost_of(part: RowExamples | PairExamples) -> NDArray[np.int64]:
    """Return how many more tokens each example's row has than the example, (examples,); for a pair, both rows
    together."""
    whole: NDArray[np.int64] = part.rows.lengths[row_of(part)]
    if isinstance(part, PairExamples):
        whole = whole - 2 * part.prompts - part.answers.sum(axis=1)
        return whole
    return whole - part.lengths


def _masks(source: SourceSelections, spec: Spec) -> dict[str, Mask]:
    """Return for each kind of problem a mask (count,) of the rows that have it."""
    rows, count = source[0].rows, source[0].count
    lengths, targets = rows.lengths[:count], rows.trained[:count]
    empty = lengths <= 1
    no_target = (targets == 0) & ~empty
    masks = {"empty": empty, "no_target": no_target, "no_end": ~rows.ended[:count] & ~empty & ~no_target}
    kind = _TOO_LONG.get(on_too_long(spec))
    if kind is not None:
        masks[kind] = (longest_rows(rows)[:count] > spec.data.max_length) & ~no_target
    for one in source:
        masks["no_end"][one.of("without_end")] = True
    return masks


def _first_places(
    sources: Sequence[SourceSelections], content: NDArray[np.uint64], says: NDArray[np.uint64]
) -> Iterator[str]:
    """Yield the place of the first row, over all sources, with each of the contents `says` (k,). content: the
    hashes of all rows of all sources."""
    rows = np.flatnonzero(np.isin(content, says)) if len(says) else np.zeros(0, np.int64)
    values, first = np.unique(content[rows], return_index=True)
    for row in rows[first[np.searchsorted(values, says)]].tolist():
        for source in sources:
            if row < source[0].count:
                yield source[0].rows.source(row)
                break
            row -= source[0].count


def _truncated(source: SourceSelections, row: int, data: Data) -> str:
    rows = source[0].rows
    length, targets = int(rows.lengths[row]), int(rows.trained[row])
    for part in parts_of([one.examples for one in source]):
        which = row_of(part)
        at = int(np.searchsorted(which, row))
        if at < len(which) and which[at] == row:
            kept = f"{length - lost_of(part)[at]:,} of {length:,} tokens kept"
            kept += f", from token {part.begin[at]:,} on"
            return f"{kept}; {targets - part.target_counts[at]:,} of {targets:,} trained tokens lost"
    if isinstance(rows, PairRows):
        return f"{length:,} tokens; both answers are the same when truncated to {data.max_length:,} tokens"
    return f"{length:,} tokens; no target is left when truncated to {data.max_length:,} tokens"


def _reason(kind: str, source: SourceSelections, row: int, data: Data) -> str:
    rows = source[0].rows
    match kind:
        case "truncated":
            return _truncated(source, row, data)
        case "empty":
            return f"{int(rows.lengths[row])} tokens, too few to train on"
        case "no_target":
            return f"none of its {int(rows.lengths[row]):,} tokens is a target"
        case "no_end":
            return "its targets stop before the end of the turn or text"
        case _:
            return f"{longest_rows(rows)[row]:,} tokens, data.max_length is {data.max_length:,}"


# --- the examples to look at first ------------------------------------------------------------------------


def worst_of(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[tuple[int, str]]]:
    """Return the EACH worst examples of each kind that occurs: title -> (index in the dataset, why)."""
    sampled = "" if len(data) <= DECODED else f", of {DECODED:,} examples over all of the data"
    kinds = {
        "longest": [(index, "") for index in _largest(data.lengths)],
        "smallest share of trained tokens": list(_least_trained(data)),
        "most tokens cut off": list(_most_cut(data)),
        f"most tokens per character{sampled}": list(_least_efficient(data, tokenizer)),
        "repeated most often": list(_repeated(data)),
    }
    return {title: examples for title, examples in kinds.items() if examples}


def _least_trained(data: Dataset) -> Iterator[tuple[int, str]]:
    share = data.target_counts / data.lengths
    for index in _largest(-share):
        yield index, f"{share[index]:.1%} trained on"


def _most_cut(data: Dataset) -> Iterator[tuple[int, str]]:
    """Yield the truncated examples that lost the most tokens; none if rows are split or joined."""
    parts = parts_of(data.parts)
    cut = np.concatenate([lost_of(part) for part in parts])
    rows = np.concatenate([row_of(part) + offset for part, offset in _offsets(data)])
    once = np.bincount(rows)[rows] == 1
    is_window = all(isinstance(part, PairExamples) or part.at is None for part in parts)
    for index in _largest(np.where(once & is_window, cut, 0)):
        if cut[index] > 0 and once[index] and is_window:
            yield index, f"{cut[index]:,} tokens cut off"


def _least_efficient(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, str]]:
    looked_at = np.unique(np.linspace(0, len(data) - 1, min(DECODED, len(data))).astype(np.int64))
    texts = tokenizer.batch_decode([data[int(index)].input_ids.tolist() for index in looked_at])
    characters = np.array([max(1, len(text)) for text in texts])
    rates = data.lengths[looked_at] / characters
    for at in _largest(rates):
        index = int(looked_at[at])
        yield index, f"{characters[at]:,} characters, {rates[at]:.2f} tokens per character"


def _repeated(data: Dataset) -> Iterator[tuple[int, str]]:
    content = np.concatenate([part.rows.content[row_of(part)] for part in parts_of(data.parts)])
    rows = np.concatenate([row_of(part) + offset for part, offset in _offsets(data)])
    _, first_of_row = np.unique(rows, return_index=True)  # count a row that was split only once
    _, first, times = np.unique(content[first_of_row], return_index=True, return_counts=True)
    for at in _largest(times):
        if times[at] > 1:
            yield int(first_of_row[first[at]]), f"{times[at]:,} rows have this content"


def _offsets(data: Dataset) -> Iterator[tuple[RowExamples | PairExamples, int]]:
    """Yield each source's part with the number of rows in the sources before it."""
    offset = 0
    for part in parts_of(data.parts):
        yield part, offset
        offset += len(part.rows.lengths)


def _largest(values: NDArray[np.number]) -> list[int]:
    """Return the indices of the EACH largest values, the earlier of equals first."""
    return [int(index) for index in np.argsort(-values, kind="stable")[:EACH]]
