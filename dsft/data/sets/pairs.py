"""Preference pairs: truncate them so that both answers stay comparable, and present them as examples.

Each pair is two consecutive rows of its source, the chosen and the rejected one, which begin with the same
prompt tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Rendered
from dsft.data.sets.dataset import Example
from dsft.data.sets.pieces import Stream
from dsft.data.sets.selection import NONE, CutOptions, Ids, PairRows, Selection, small

CHOSEN, REJECTED = 0, 1
QUARTER = 4  # 1/4 of max_length is reserved for the prompt (less if it is shorter), however long the answers


@dataclass(frozen=True, eq=False)
class PairExamples:
    """The m pairs of one source as examples of two segments: the prompt with the chosen answer, and the
    prompt with the rejected one. A truncated pair keeps the last tokens of the prompt, the same in both rows,
    and the first tokens of each answer, up to the same limit for both.

    name     the source's name in metrics
    rows     all pairs of the source
    pairs    (m,) index of each pair in `rows`
    begin    (m,) index of the row's token at which the prompt begins
    prompts  (m,) tokens of the prompt
    headed   (m,) the row's first token (bos) is put before the token at `begin`, and counts in `prompts`
    answers  (m, 2) tokens of the chosen and of the rejected answer
    targets  (m, 2) targets of the chosen and of the rejected answer
    shared   the second segment has only the last token of the prompt, and sees the others in the first
    """

    name: str | None
    rows: PairRows
    pairs: Ids
    begin: Ids
    prompts: Ids
    headed: NDArray[np.bool_]
    answers: Ids
    targets: Ids
    shared: bool = False

    @cached_property
    def lengths(self) -> Ids:
        lengths: Ids = self.answers.sum(axis=1, dtype=np.int32) + self.prompts
        return lengths + (np.int32(1) if self.shared else self.prompts)

    @cached_property
    def widths(self) -> Ids:
        widths: Ids = self.prompts + self.answers.max(axis=1, initial=0)
        return widths

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        """(m,) attention cost. A shared prompt is computed once; the rejected answer only attends to it."""
        rows = (self.prompts[:, None] + self.answers).astype(np.int64)
        seeing = rows.copy()
        if self.shared:
            seeing[:, REJECTED] = self.answers[:, REJECTED] + 1
        squares: NDArray[np.int64] = (seeing * rows).sum(axis=1)
        return squares

    @cached_property
    def target_counts(self) -> Ids:
        target_counts: Ids = self.targets.sum(axis=1, dtype=np.int32)
        return target_counts

    @property
    def counts(self) -> Mapping[str, Ids]:
        ones, twos = (np.broadcast_to(np.int32(number), (len(self.pairs),)) for number in (1, 2))
        return {"pairs": ones, "chosen_tokens": self.targets[:, CHOSEN], "sequences": twos}

    @cached_property
    def digest(self) -> str:
        """sha256 that identifies the pairs; it does not depend on whether prompts are shared."""
        digest = hashlib.sha256(self.rows.digest.encode())
        for name in _COLUMNS:
            digest.update(b"|")
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()

    def take(self, kept: NDArray[np.bool_]) -> PairExamples:
        """Return the pairs selected by a mask (m,)."""
        if kept.all():
            return self
        columns: dict[str, Any] = {name: getattr(self, name)[kept] for name in _COLUMNS}
        return replace(self, **columns)

    def read(self, index: int, answer: int) -> Rendered:
        """Return the prompt with one of the answers, CHOSEN or REJECTED."""
        row = self.rows.answers.read(2 * int(self.pairs[index]) + answer)
        begin, headed = int(self.begin[index]), bool(self.headed[index])
        kept = np.arange(begin, begin + self.prompts[index] - headed + self.answers[index, answer])
        if headed:
            kept = np.insert(kept, 0, 0)
        return Rendered(row.input_ids[kept], row.trained[kept], row.ended)

    def source(self, index: int) -> str:
        return self.rows.source(int(self.pairs[index]))

    @property
    def row_ids(self) -> Ids:
        return self.pairs

    @property
    def lost(self) -> NDArray[np.int64]:
        lost: NDArray[np.int64] = self.rows.lengths[self.pairs] - 2 * self.prompts - self.answers.sum(axis=1)
        return lost

    def extent(self, index: int) -> str:
        kept, whole = int(2 * self.prompts[index] + self.answers[index].sum()), self.rows.lengths
        if kept == whole[self.pairs[index]]:
            return ""
        return f"{kept:,} of {whole[self.pairs[index]]:,} tokens kept, from token {self.begin[index]:,} on"

    def example(self, index: int) -> Example:
        chosen, rejected = (self.read(index, answer) for answer in (CHOSEN, REJECTED))
        start = int(self.prompts[index]) - 1 if self.shared else 0
        return Example(
            np.concatenate([chosen.input_ids, rejected.input_ids[start:]]),
            np.concatenate([chosen.trained, rejected.trained[start:]]),
            self.source(index),
            (len(chosen.input_ids), len(rejected.input_ids) - start),
            (0, start) if self.shared else None,
        )


_COLUMNS = ("pairs", "begin", "prompts", "headed", "answers", "targets")


def cut_pairs(selection: Selection, options: CutOptions) -> Selection:
    """Return the selection with its pairs cut to examples of which neither row has more than `max_length`
    tokens. Both answers of each pair must have targets.

    A pair over `max_length` first loses the beginning of its prompt, until the longer answer fits or a
    QUARTER of max_length is left of the prompt; then both answers are cut to the same maximum length."""
    rows, pairs, max_length = selection.rows, selection.row_ids, options.max_length
    assert isinstance(rows, PairRows)
    too_long = rows.longer[pairs] > max_length
    dropped = NONE
    if options.how != "truncate":
        dropped, pairs = pairs[too_long], pairs[~too_long]
        too_long = too_long[~too_long]
    stream = Stream(rows.answers, np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1))
    prompts = (stream.first_targets - stream.firsts)[::2]
    answers = rows.row_lengths[pairs] - prompts[:, None]
    least = np.minimum(prompts, max(1, max_length // QUARTER))
    kept = np.where(too_long, np.maximum(max_length - answers.max(axis=1, initial=0), least), prompts)
    limits = np.where(too_long, max_length - kept, np.iinfo(np.int32).max)
    short = np.minimum(answers, limits[:, None])
    headed = (kept < prompts) & (kept > 1)
    headed[headed] = rows.answers.first_tokens(2 * pairs[headed]) == options.bos
    stops = (prompts[:, None] + short).reshape(-1)
    targets = stream.between(stream.firsts, stream.firsts + stops).reshape(-1, 2)
    numbers = (small(prompts - kept + headed), small(kept), headed, small(short), small(targets))
    part = PairExamples(selection.name, rows, pairs, *numbers, options.share_prompts)
    shorter: NDArray[np.bool_] = short < answers
    is_cut = shorter[:, CHOSEN] | shorter[:, REJECTED]
    equal = _become_equal(part, is_cut)
    unended = is_cut | ~rows.ended[pairs]
    lost = rows.lengths[pairs] - 2 * kept - short.sum(axis=1)
    return replace(
        selection,
        part=part.take(~equal),
        left_out={**selection.left_out, "dropped": dropped, "identical": pairs[equal]},
        noted={
            **selection.noted,
            "truncated": pairs[too_long],
            "without_end": pairs[unended & ~equal],
            "prompt_cut": pairs[(kept < prompts) & ~equal],
        },
        truncated_tokens=int(lost.sum()),
    )


def _become_equal(part: PairExamples, is_cut: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask (m,) of the pairs whose answers have become the same tokens by truncation."""
    equal: NDArray[np.bool_] = is_cut & (part.answers[:, CHOSEN] == part.answers[:, REJECTED])
    for index in np.flatnonzero(equal).tolist():
        chosen, rejected = (part.read(index, answer).input_ids for answer in (CHOSEN, REJECTED))
        equal[index] = np.array_equal(chosen, rejected)
    return equal
