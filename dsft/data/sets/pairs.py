"""Preference pairs: a line gives two rows, the chosen answer's and behind it the rejected one's, which begin
with the tokens of one prompt.

Takes the rows of a source. Gives them two by two, and cut so that both answers stay comparable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsft.data.rows import Account, Rendered, TokenRows
from dsft.data.sets.dataset import Example
from dsft.data.sets.pieces import NONE, Cut, Ids, OnTooLong
from dsft.data.sets.windows import Stream

CHOSEN, REJECTED = 0, 1
QUARTER = 4  # of a window is the prompt's, or as much as there is of it, however long the answers are


@dataclass(frozen=True, eq=False)
class PairRows:
    """The rows of a source as n pairs: pair i is its rows 2i, chosen, and 2i + 1, rejected."""

    answers: TokenRows

    @property
    def account(self) -> Account:
        return self.answers.account

    @property
    def digest(self) -> str:
        return self.answers.digest

    @cached_property
    def row_lengths(self) -> NDArray[np.int64]:
        """(n, 2) tokens of each row: the prompt and an answer."""
        return self.answers.lengths.reshape(-1, 2)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of both rows."""
        lengths: NDArray[np.int64] = self.row_lengths.sum(axis=1)
        return lengths

    @cached_property
    def longest(self) -> NDArray[np.int64]:
        """(n,) tokens of the longer row."""
        longest: NDArray[np.int64] = self.row_lengths.max(axis=1)
        return longest

    @cached_property
    def trained(self) -> NDArray[np.int64]:
        """(n,) targets of both answers; 0 where one has none: then there is nothing to compare."""
        targets = self.answers.trained.reshape(-1, 2)
        return np.where(targets.all(axis=1), targets.sum(axis=1), 0)

    @cached_property
    def ended(self) -> NDArray[np.bool_]:
        ended = self.answers.ended
        return ended[::2] & ended[1::2]

    @property
    def content(self) -> NDArray[np.uint64]:
        """(n,) a hash of what the pair says."""
        return self.answers.content[::2]

    @property
    def desirable(self) -> NDArray[np.bool_]:
        return self.answers.desirable[::2]

    def source(self, pair: int) -> str:
        """Where the pair stands: "file:line"."""
        return self.answers.source(2 * pair)


@dataclass(frozen=True, eq=False)
class PairPieces:
    """m pairs as they are trained on. Of a truncated one the last tokens of the prompt are kept, the same in
    both rows, and as many of the first tokens of each answer as one limit allows.

    pairs    (m,) which pair of the source
    begin    (m,) the token of its rows with which the prompt begins
    prompts  (m,) tokens that both rows begin with, before the answers
    headed   (m,) the first of them is the rows' first token, which stands before `begin`
    answers  (m, 2) tokens of the chosen and of the rejected answer
    targets  (m, 2) of them, those that are trained on
    """

    pairs: Ids
    begin: Ids
    prompts: Ids
    headed: NDArray[np.bool_]
    answers: Ids
    targets: Ids

    def take(self, kept: NDArray[np.bool_]) -> PairPieces:
        """The pairs of a mask (m,)."""
        return self if kept.all() else PairPieces(*(column[kept] for column in vars(self).values()))

    def is_cut(self, rows: PairRows) -> NDArray[np.bool_]:
        """(m,): an answer is not there to its end."""
        whole = rows.row_lengths[self.pairs] - (self.begin + self.prompts - self.headed)[:, None]
        shorter: NDArray[np.bool_] = self.answers < whole
        return shorter[:, CHOSEN] | shorter[:, REJECTED]

    def read(self, rows: PairRows, index: int, answer: int) -> Rendered:
        """The prompt and one of the answers."""
        row = rows.answers.read(2 * int(self.pairs[index]) + answer)
        begin, headed = int(self.begin[index]), bool(self.headed[index])
        kept = np.arange(begin, begin + self.prompts[index] - headed + self.answers[index, answer])
        if headed:
            kept = np.insert(kept, 0, 0)
        return Rendered(row.input_ids[kept], row.trained[kept], row.ended)


@dataclass(frozen=True, eq=False)
class PairPart:
    """The pairs of one source as examples, each of two segments: the prompt with the chosen answer, and the
    prompt with the rejected one. shared: the second has of the prompt its last token alone, and follows the
    others where they stand in the first."""

    name: str | None
    rows: PairRows
    pieces: PairPieces
    shared: bool = False

    @cached_property
    def lengths(self) -> Ids:
        prompts = self.pieces.prompts
        lengths: Ids = self.pieces.answers.sum(axis=1, dtype=np.int32) + prompts
        return lengths + (np.int32(1) if self.shared else prompts)

    @cached_property
    def widths(self) -> Ids:
        widths: Ids = self.pieces.prompts + self.pieces.answers.max(axis=1, initial=0)
        return widths

    @cached_property
    def squares(self) -> NDArray[np.int64]:
        """Of a shared prompt the rejected answer's tokens see it, and it is not computed for them again."""
        rows = (self.pieces.prompts[:, None] + self.pieces.answers).astype(np.int64)
        seeing = rows.copy()
        if self.shared:
            seeing[:, REJECTED] = self.pieces.answers[:, REJECTED] + 1
        squares: NDArray[np.int64] = (seeing * rows).sum(axis=1)
        return squares

    @cached_property
    def target_counts(self) -> Ids:
        target_counts: Ids = self.pieces.targets.sum(axis=1, dtype=np.int32)
        return target_counts

    @property
    def counts(self) -> Mapping[str, Ids]:
        pairs = np.broadcast_to(np.int32(1), (len(self.pieces.pairs),))
        return {"pairs": pairs, "chosen_tokens": self.pieces.targets[:, CHOSEN]}

    @cached_property
    def digest(self) -> str:
        """Of what is learned, which is the same whether prompts are shared or not."""
        digest = hashlib.sha256(self.rows.digest.encode())
        for column in vars(self.pieces).values():
            digest.update(b"|")
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()

    def source(self, index: int) -> str:
        return self.rows.source(int(self.pieces.pairs[index]))

    def example(self, index: int) -> Example:
        chosen, rejected = (self.pieces.read(self.rows, index, answer) for answer in (CHOSEN, REJECTED))
        start = int(self.pieces.prompts[index]) - 1 if self.shared else 0
        return Example(
            np.concatenate([chosen.input_ids, rejected.input_ids[start:]]),
            np.concatenate([chosen.trained, rejected.trained[start:]]),
            self.source(index),
            (len(chosen.input_ids), len(rejected.input_ids) - start),
            (0, start) if self.shared else None,
        )


def cut_pairs(
    rows: PairRows, pairs: Ids, max_length: int, how: OnTooLong, bos: int | None
) -> Cut[PairPieces]:
    """`pairs` (k,) of the source, ascending, each with targets in both answers, as pairs of which neither row
    has more than `max_length` tokens. `bos`: the token that a truncated prompt keeps in front where its row
    begins with it. With `error` all stay whole.

    A row over `max_length` loses the beginning of its prompt, so that the longer answer fits, but for a
    QUARTER of max_length; where that is not enough, both answers end at the same number of tokens."""
    too_long = rows.longest[pairs] > max_length
    dropped = NONE
    if how == "drop":
        dropped, pairs = pairs[too_long], pairs[~too_long]
        too_long = too_long[~too_long]
    stream = Stream(rows.answers, np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1))
    prompts = (stream.first_targets - stream.firsts)[::2]
    answers = rows.row_lengths[pairs] - prompts[:, None]
    kept, limits = prompts, np.full(len(pairs), np.iinfo(np.int32).max)
    if how == "truncate":
        least = np.minimum(prompts, max(1, max_length // QUARTER))
        kept = np.where(too_long, np.maximum(max_length - answers.max(axis=1, initial=0), least), prompts)
        limits = np.where(too_long, max_length - kept, limits)
    short = np.minimum(answers, limits[:, None])
    headed = (kept < prompts) & (kept > 1)
    headed[headed] = rows.answers.first_tokens(2 * pairs[headed]) == bos
    stops = (prompts[:, None] + short).reshape(-1)
    targets = stream.between(stream.firsts, stream.firsts + stops).reshape(-1, 2)
    pieces = PairPieces(
        pairs, _small(prompts - kept + headed), _small(kept), headed, _small(short), _small(targets)
    )
    is_cut = pieces.is_cut(rows)
    equal = _become_equal(rows, pieces, is_cut)
    lost = rows.lengths[pairs] - 2 * kept - short.sum(axis=1)
    return Cut(
        pieces.take(~equal),
        dropped=dropped,
        truncated=pairs[too_long] if how == "truncate" else NONE,
        unended=pairs[(is_cut | ~rows.ended[pairs]) & ~equal],
        without_target=NONE,
        truncated_tokens=int(lost.sum()),
        identical=pairs[equal],
    )


def _become_equal(rows: PairRows, pieces: PairPieces, is_cut: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(m,): pairs of which an answer was cut and that are now the same tokens."""
    equal: NDArray[np.bool_] = is_cut & (pieces.answers[:, CHOSEN] == pieces.answers[:, REJECTED])
    for index in np.flatnonzero(equal).tolist():
        chosen, rejected = (pieces.read(rows, index, answer).input_ids for answer in (CHOSEN, REJECTED))
        equal[index] = np.array_equal(chosen, rejected)
    return equal


def _small(numbers: NDArray[np.int64]) -> Ids:
    return numbers.astype(np.int32)
