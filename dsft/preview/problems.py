"""Find the rows in which something is wrong or lost, with place and reason, and the worst examples.

Tokens are read only to compute tokens per character.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsft.data.sets.dataset import Dataset, Ids
from dsft.data.sets.load import on_too_long
from dsft.data.sets.selection import SourceData
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
    "identical": "with two answers that are the same when truncated",
    "no_end": "trained on without their end of turn or text",
    "duplicate": "repeating an earlier one",
}
_IN_LEDGER = {"too_long": "dropped", "no_target": "without_target", "no_end": "without_end"}
"""Kind of problem -> its name in the ledger, where that is another."""
SourceSets = Sequence[SourceData]
"""What the sets have of one source: what is trained on or evaluated, then what is held out."""
EACH = 3  # worst examples of each kind
DECODED = 2_000  # examples that are decoded to compute their tokens per character: about a second


@dataclass(frozen=True)
class RowProblem:
    """A row with a problem. source: "file:line"; kind: a key of KINDS."""

    source: str
    kind: str
    reason: str


def problems_of(
    sources: Sequence[SourceSets], spec: Spec, limit: int
) -> dict[str, tuple[int, list[RowProblem]]]:
    """Return the problems of rows by kind, for kinds that occur: the number of rows, and the first `limit` of
    them in the order of the sources."""
    counts = dict.fromkeys(KINDS, 0)
    found: dict[str, list[RowProblem]] = {kind: [] for kind in KINDS}
    for source in sources:
        account = source[0].account
        counts["bad"] += account.bad_rows
        found["bad"] += [RowProblem(place, "bad", reason) for place, reason in account.bad]
        for kind, rows in _rows_by_kind(source, spec).items():
            counts[kind] += len(rows)
            rows = rows[: max(0, limit - len(found[kind]))]
            if kind == "duplicate":
                reasons = [f"repeats {place}" for place in _first_places(sources, source[0], rows)]
            else:
                reasons = [_reason(kind, source, row, spec.data) for row in rows.tolist()]
            found[kind] += [
                RowProblem(at, kind, why) for at, why in zip(source[0].places(rows), reasons, strict=True)
            ]
    return {kind: (count, found[kind][:limit]) for kind, count in counts.items() if count}


def kinds_of(source: SourceSets, row: int, spec: Spec) -> list[str]:
    """Return the kinds of problems of one row, in words, except whether it is a duplicate."""
    kinds = _rows_by_kind(source, spec)
    return [KINDS[kind] for kind in kinds if kind != "duplicate" and row in kinds[kind]]


def _rows_by_kind(source: SourceSets, spec: Spec) -> dict[str, Ids]:
    """Return for each kind of problem but bad rows the rows that have it, ascending, as the ledgers count
    them. A row of data.eval is a duplicate also if data.train has it."""
    other = "dropped" if on_too_long(spec) == "error" else "too_long"
    found = {
        kind: np.sort(np.concatenate([one.of(_IN_LEDGER.get(kind, kind)) for one in source]))
        for kind in KINDS
        if kind not in ("bad", other)
    }
    again = source[0].also_in_train
    if again is not None:
        found["duplicate"] = np.union1d(found["duplicate"], again).astype(np.int32)
    return found


def _first_places(sources: Sequence[SourceSets], read: SourceData, rows: Ids) -> Iterator[str]:
    """Yield for each of the rows of a source the place of the first row, over all sources, that has its
    content."""
    wanted = read.records.content[rows]
    places: dict[int, str] = {}
    for one, *_ in sources:
        content = one.records.content[: one.count]
        for row in np.flatnonzero(np.isin(content, wanted)).tolist():
            places.setdefault(int(content[row]), one.records.source(row))
    yield from (places[content] for content in wanted.tolist())


def _reason(kind: str, source: SourceSets, row: int, data: Data) -> str:
    records = source[0].records
    length, targets, first = int(records.lengths[row]), int(records.trained[row]), records.each * row
    if kind == "truncated":
        for examples in (one.examples for one in source):
            at = int(np.searchsorted(examples.row_ids, first))
            if at < len(examples) and examples.row_ids[at] == first:
                lost = targets - examples.target_counts[at]
                return f"{examples.extent(at)}; {lost:,} of {targets:,} trained tokens lost"
    match kind:
        case "empty":
            return f"{length} tokens, too few to train on"
        case "no_target" if targets == 0:
            return f"none of its {length:,} tokens is a target"
        case "no_target":
            return f"{length:,} tokens; no target is left when truncated to {data.max_length:,} tokens"
        case "no_end":
            return "its targets stop before the end of the turn or text"
        case _:
            return f"{records.longest[row]:,} tokens, data.max_length is {data.max_length:,}"


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
    """Yield the truncated examples that lost the most tokens; none of rows that were split or joined."""
    rows = _rows(data)
    lost = np.concatenate([part.lost for part in data.parts]) * (np.bincount(rows)[rows] == 1)
    for index in _largest(lost):
        if lost[index] > 0:
            yield index, f"{lost[index]:,} tokens cut off"


def _least_efficient(data: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, str]]:
    looked_at = np.unique(np.linspace(0, len(data) - 1, min(DECODED, len(data))).astype(np.int64))
    texts = tokenizer.batch_decode([data[int(index)].input_ids.tolist() for index in looked_at])
    characters = np.array([max(1, len(text)) for text in texts])
    rates = data.lengths[looked_at] / characters
    for at in _largest(rates):
        index = int(looked_at[at])
        yield index, f"{characters[at]:,} characters, {rates[at]:.2f} tokens per character"


def _repeated(data: Dataset) -> Iterator[tuple[int, str]]:
    content = np.concatenate([part.rows.content[part.row_ids] for part in data.parts])
    _, first_of_row = np.unique(_rows(data), return_index=True)  # count a row that was split only once
    _, first, times = np.unique(content[first_of_row], return_index=True, return_counts=True)
    for at in _largest(times):
        if times[at] > 1:
            yield int(first_of_row[first[at]]), f"{times[at]:,} rows have this content"


def _rows(data: Dataset) -> NDArray[np.int64]:
    """Return the row of each example, (n,), numbered over all sources."""
    counts = [len(part.rows.lengths) for part in data.parts]
    offsets = np.cumsum([0, *counts])
    return np.concatenate([part.row_ids + offset for part, offset in zip(data.parts, offsets, strict=False)])


def _largest(values: NDArray[np.number]) -> list[int]:
    """Return the indices of the EACH largest values, the earlier of equals first."""
    return [int(index) for index in np.argsort(-values, kind="stable")[:EACH]]
