"""The values that the engines receive: the micro-batches of one step, with their global counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsft.errors import DsftError

NO_TARGET = -100  # as in torch.nn.functional.cross_entropy

Borders = tuple[Tensor, ...]
"""The borders of the n segments of a packed row: (n + 1,) int32, cumulative lengths from 0. If some segments
continue a shared prompt, two more tensors: (n + 1,) int32, cumulative numbers of the segments' keys, and (K,)
int32, the row's token that each of these K keys is."""


class Tokens(NamedTuple):
    """The tokens of a micro-batch, B rows of T, right-padded; each tensor is (B, T, …). A named tuple, since
    DeepSpeed's ZeRO 3 looks for tensors in the arguments of a module.

    input_ids     int64
    position_ids  int64
    targets       int64: the token that position t predicts (t + 1), or NO_TARGET
    noise_scale   float32: NEFTune's α ÷ √L; None where no noise is added
    is_padding    bool; None: there is no padding
    others        (B, T, k) int32: k different tokens that are scored at each target beside it; None: none
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    noise_scale: Tensor | None = None
    is_padding: Tensor | None = None
    others: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Tokens:
        """Return the tokens with `function` applied to each tensor."""
        return Tokens(*(None if tensor is None else function(tensor) for tensor in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Segments:
    """The segments of a packed row, each of which attends to itself alone.

    lengths  tokens of each segment
    starts   the position id at which each segment begins; None: 0. A segment that begins at p > 0 continues
             the first p tokens of the last segment that begins at 0
    borders  computed by `to`
    """

    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None = None
    borders: Borders | None = None

    def to(self, device: torch.device) -> Segments:
        """Compute the borders, and copy them to `device`, to a GPU asynchronously."""
        borders = self.borders or borders_of(self.lengths, self.starts)
        return replace(self, borders=tuple(to_device(border, device) for border in borders))

    def first(self, length: int) -> Segments:
        """Return the segments of the row's first `length` tokens."""
        begins = accumulate(self.lengths, initial=0)
        lengths = tuple(
            min(n, length - begin) for n, begin in zip(self.lengths, begins, strict=False) if begin < length
        )
        return Segments(lengths, self.starts and self.starts[: len(lengths)])


@dataclass(frozen=True)
class Answers:
    """The answers of a micro-batch whose n examples have k answers each, 2 for preference pairs: chosen and
    rejected. They are its segments if it is packed, else its rows, example by example. Of examples that are
    cut from rows, an answer is such an example, or each of the n rows that examples join.

    ids          (n,) int64: the examples' numbers in the dataset; on the host
    num_targets  (n, k) int64: targets of each answer
    reference    (n, k) float64: the reference's log-probability of each answer, summed over its targets;
                 None: not known
    segments     (T,) int32: packed: the segment, from 0, of each position; set by `to`
    kl           () float64: the divergence of policy and reference, estimated over the whole step (KTO);
                 None: not estimated
    values       by name, (n,) int64 or float64: the fields of the examples' rows that the loss uses; see
                 `dsft.data.rows.FIELDS`
    """

    ids: Tensor
    num_targets: Tensor
    reference: Tensor | None = None
    segments: Tensor | None = None
    kl: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Answers:
        """Return the answers with `function` applied to each tensor that has a row for each example."""
        return replace(
            self,
            ids=function(self.ids),
            num_targets=function(self.num_targets),
            reference=None if self.reference is None else function(self.reference),
            values={name: function(tensor) for name, tensor in self.values.items()},
        )

    def to(self, device: torch.device, row: Segments | None) -> Answers:
        """Copy all but `ids` to `device`. row: the packed row's segments; None: the rows are padded."""
        segments = self.segments
        if segments is None and row is not None:
            numbers = torch.arange(len(row.lengths), dtype=torch.int32)
            segments = numbers.repeat_interleave(torch.tensor(row.lengths))
        segments, kl = (None if one is None else to_device(one, device) for one in (segments, self.kl))
        moved = self.map(lambda tensor: tensor if tensor is self.ids else to_device(tensor, device))
        return replace(moved, segments=segments, kl=kl)

    def first(self, count: int) -> Answers:
        """Return the answers of the first `count` examples."""
        return replace(self.map(itemgetter(slice(count))), segments=None)

    def of(self, first: int, last: int, columns: slice) -> Answers:
        """Return the answers of one example: its segments, or rows, from `first` to before `last`. columns:
        its tokens in the packed row, whose segments have been counted."""
        segments = None if self.segments is None else self.segments[columns] - first
        each = self.num_targets.shape[1]
        return replace(self.map(itemgetter(slice(first // each, last // each))), segments=segments)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass on one data-parallel rank gets.

    There is no attention mask: padding comes after the row's tokens, where a causal model does not see it,
    and has no targets. A micro-batch without examples is one short row of padding, so that every rank runs
    the same number of forward and backward passes.

    segments        of the one row, if it is packed; None: the rows are padded
    answers         where the task compares whole answers, or uses numbers of rows
    targets_before  (B × T + 1,), on the host: the number of targets before each position and, last, of all;
                    counted by `to`
    ids             numbers of the examples in the dataset, in their order in the micro-batch
    teacher         (B, T, k + 1) float32: a teacher's log-probabilities of the tokens in `tokens.others` and
                    of the rest of the vocabulary; None: not known
    """

    tokens: Tokens
    segments: Segments | None = None
    answers: Answers | None = None
    targets_before: NDArray[np.int64] | None = None
    ids: tuple[int, ...] = ()
    teacher: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.tokens.input_ids.shape

    @property
    def num_targets(self) -> int | None:
        """The number of targets; None until `to` has counted them."""
        return None if self.targets_before is None else int(self.targets_before[-1])

    def map(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return the micro-batch with `function` applied to each tensor (B, T, …)."""
        teacher = None if self.teacher is None else function(self.teacher)
        return replace(self, tokens=self.tokens.map(function), teacher=teacher)

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to `device`, to a GPU asynchronously through pinned memory. Compute borders, the number of
        targets and the answers' segments. What has been copied is returned as it is: what is filled in
        later has to be there."""
        if self.targets_before is not None and self.tokens.input_ids.device == device:
            return self
        before = self.targets_before
        if before is None:
            is_target = (self.tokens.targets != NO_TARGET).flatten().numpy()
            before = np.cumsum(np.concatenate(([0], is_target)), dtype=np.int64)
        return replace(
            self.map(lambda tensor: to_device(tensor, device)),
            segments=self.segments and self.segments.to(device),
            answers=self.answers and self.answers.to(device, self.segments),
            targets_before=before,
        )

    def first(self, length: int) -> MicroBatch:
        """Return the first `length` positions. Packed: only examples of which all answers have tokens left
        remain."""
        segments, answers = self.segments, self.answers
        if segments is not None:
            segments = segments.first(length)
            if answers is not None:
                answers = answers.first(len(segments.lengths) // answers.num_targets.shape[1])
        short = self.map(lambda tensor: tensor[:, :length])
        return replace(short, segments=segments, answers=answers, targets_before=None, ids=())

    def examples(self, lengths: Sequence[int]) -> Iterator[tuple[slice, slice, MicroBatch]]:
        """Yield each example alone, with its rows and its columns, for sums over its targets. lengths: tokens
        of each. `to` has been called; the segment of an answer that shares a prompt is not whole."""
        begin = first = 0
        segments = self.segments.lengths if self.segments else ()
        each = self.shape[0] // max(1, len(self.ids))
        for number, length in enumerate(lengths):
            rows, columns, own, last = slice(first, first + each), slice(None), None, first + each
            if segments:
                rows, columns, last = slice(None), slice(begin, begin + length), first
                while begin < columns.stop:
                    begin, last = begin + segments[last], last + 1
                own = Segments(segments[first:last])
            answers, first = self.answers and self.answers.of(first, last, columns), last
            mine = self.map(itemgetter((rows, columns)))
            ids = (self.ids[number],)
            yield rows, columns, replace(mine, segments=own, answers=answers, targets_before=None, ids=ids)


def borders_of(lengths: Sequence[int], starts: Sequence[int] | None = None) -> Borders:
    """Return the borders of segments, on the host. Raises DsftError for a segment that begins after the end
    of its prompt."""
    begins = np.cumsum((0, *lengths), dtype=np.int32)
    if not any(starts or ()):
        return (torch.from_numpy(begins),)
    index, ends, prompt = list[NDArray[np.int32]](), [0], (0, 0)
    for begin, length, start in zip(begins, lengths, starts or (), strict=False):
        if start == 0:
            prompt = begin, length
        elif prompt[1] < start:
            raise DsftError(
                f"A segment begins at position {start} after a prompt of only {prompt[1]} tokens."
            )
        else:
            index.append(np.arange(prompt[0], prompt[0] + start, dtype=np.int32))
        index.append(np.arange(begin, begin + length, dtype=np.int32))
        ends.append(ends[-1] + start + length)
    keys = np.array(ends, dtype=np.int32), np.concatenate(index)
    return tuple(map(torch.from_numpy, (begins, *keys)))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; a copy from the host to a GPU goes through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class LazyMicroBatches(Sequence[MicroBatch]):
    """Micro-batches that are built when they are read, since a held-out set may be larger than memory."""

    def __init__(self, count: int, build: Callable[[int], MicroBatch]) -> None:
        """build: returns a micro-batch by its number; raises IndexError after the last."""
        self._count, self._build = count, build

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, which: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, which: slice) -> tuple[MicroBatch, ...]: ...
    def __getitem__(self, which: int | slice) -> MicroBatch | tuple[MicroBatch, ...]:
        if isinstance(which, slice):
            return tuple(self._build(i) for i in range(*which.indices(len(self))))
        return self._build(which)


Annotate = Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]
"""A function from micro-batches to the same with what an objective needs of them, such as
`answers.reference`."""


def unchanged(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
    """Return the micro-batches as they are, where nothing has to be filled in."""
    return micro_batches


@dataclass(frozen=True)
class SourceShare:
    """A step's examples and tokens of one source. epoch: epochs of that source after this step."""

    examples: int
    tokens: int
    epoch: float


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step as one data-parallel rank sees it.

    micro_batches  of this rank; every rank has the same number of them, which may differ between steps
    counts         global over all ranks and micro-batches, known before the first forward pass:
                   those of `Dataset.count`
    num_tokens     global: input tokens without padding
    squared_lengths  global: Σ length² over the examples (for pairs, over their rows), the cost of attention
    epoch          epochs of the data after this step
    example_ids    global: indices of the step's examples in the dataset
    sources        global: by name of the source; empty if there is only one
    assigned_ids   of this rank: the example ids of each micro-batch, in order
    examples_before  global: number of the run's examples in the steps before
    estimate_batches  of this rank: micro-batches that are scored before the step, for an estimate over the
                   whole step; every rank has the same number of them
    """

    micro_batches: tuple[MicroBatch, ...]
    counts: Mapping[str, int]
    num_tokens: int
    epoch: float
    example_ids: tuple[int, ...]
    squared_lengths: int = 0
    sources: Mapping[str, SourceShare] = field(default_factory=dict)
    assigned_ids: tuple[tuple[int, ...], ...] = ()
    examples_before: int = 0
    estimate_batches: tuple[MicroBatch, ...] = ()


Complete = Callable[[GlobalStep], GlobalStep]
"""A function from a step to the same with what an objective needs of it."""


def unchanged_step(step: GlobalStep) -> GlobalStep:
    """Return the step as it is, where nothing has to be filled in."""
    return step
