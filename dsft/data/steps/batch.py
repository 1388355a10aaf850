"""The values that the engines receive: the micro-batches of one step, with their global counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsft.data.steps.copies import to_device
from dsft.errors import DsftError

NO_TARGET = -100  # as in torch.nn.functional.cross_entropy

Borders = tuple[Tensor, ...]
"""The borders of the n segments of a packed row: (n + 1,) int32, cumulative lengths from 0. If some segments
continue a shared prompt, two more tensors: (n + 1,) int32, cumulative numbers of the segments' keys, and (K,)
int32, the row's token that each of these K keys is."""


@dataclass(frozen=True)
class Pairs:
    """The n preference pairs of a micro-batch. Its segments if it is packed, else its rows, are chosen,
    rejected, chosen, rejected, …

    ids         (n,) int64: the pairs' numbers in the dataset; on the host
    num_tokens  (n, 2) int64: targets of the chosen and of the rejected answer
    reference   (n, 2) float64: the reference's log-probability of each answer, summed over its targets; None:
                not known
    segments    (T,) int32: packed: the segment, from 0, of each position; set by `MicroBatch.to`
    """

    ids: Tensor
    num_tokens: Tensor
    reference: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass on one data-parallel rank: B rows of T tokens, right-padded.

    There is no attention mask: padding comes after the row's tokens, where a causal model does not see it,
    and has no targets. A micro-batch without examples is one short row of padding, so that every rank runs
    the same number of forward and backward passes.
    """

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64: the token that position t predicts (t + 1), or NO_TARGET
    lengths: tuple[int, ...] | None = None  # packed: tokens of each segment of the one row; padded: None
    noise_scale: Tensor | None = None  # (B, T) float32: NEFTune's α ÷ √L; None where no noise is added
    targets_before: NDArray[np.int64] | None = None  # (B × T + 1,), on the host: the number of targets before
    # each position and, last, of all; counted by `to`
    starts: tuple[int, ...] | None = None  # the position id at which each segment begins; None: 0. A segment
    # that begins at p > 0 continues the first p tokens of the last segment that begins at 0
    pairs: Pairs | None = None
    borders: Borders | None = None  # of a packed row's segments; computed by `to`
    is_padding: Tensor | None = None  # (B, T) bool; None: there is no padding

    @property
    def num_targets(self) -> int | None:
        """The number of targets; None until `to` has counted them."""
        return None if self.targets_before is None else int(self.targets_before[-1])

    def to(self, device: torch.device) -> MicroBatch:
        """Copy to `device`, to a GPU asynchronously through pinned memory. Compute borders, the number of
        targets and the pairs' segments."""
        borders, before = self.borders, self.targets_before
        if before is None:
            is_target = (self.targets != NO_TARGET).flatten().numpy()
            before = np.cumsum(np.concatenate(([0], is_target)), dtype=np.int64)
        if borders is None and self.lengths is not None:
            borders = borders_of(self.lengths, self.starts)
        return replace(
            self,
            borders=borders and tuple(to_device(border, device) for border in borders),
            input_ids=to_device(self.input_ids, device),
            position_ids=to_device(self.position_ids, device),
            targets=to_device(self.targets, device),
            noise_scale=None if self.noise_scale is None else to_device(self.noise_scale, device),
            is_padding=None if self.is_padding is None else to_device(self.is_padding, device),
            targets_before=before,
            pairs=self.pairs and _pairs_to(self.pairs, self.lengths, device),
        )


def _pairs_to(pairs: Pairs, lengths: tuple[int, ...] | None, device: torch.device) -> Pairs:
    segments = pairs.segments
    if segments is None and lengths is not None:
        segments = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return replace(
        pairs,
        num_tokens=to_device(pairs.num_tokens, device),
        reference=None if pairs.reference is None else to_device(pairs.reference, device),
        segments=None if segments is None else to_device(segments, device),
    )


def first_part(micro_batch: MicroBatch, length: int) -> MicroBatch:
    """Return the first `length` positions of a micro-batch. Packed: only pairs of which both answers have
    tokens left remain."""
    lengths, starts, pairs = micro_batch.lengths, micro_batch.starts, micro_batch.pairs
    if lengths is not None:
        begins = accumulate(lengths, initial=0)
        lengths = tuple(
            min(n, length - begin) for n, begin in zip(lengths, begins, strict=False) if begin < length
        )
        starts = starts and starts[: len(lengths)]
        if pairs is not None:
            n = len(lengths) // 2
            reference = None if pairs.reference is None else pairs.reference[:n]
            pairs = Pairs(pairs.ids[:n], pairs.num_tokens[:n], reference)
    return replace(
        micro_batch,
        input_ids=micro_batch.input_ids[:, :length],
        position_ids=micro_batch.position_ids[:, :length],
        targets=micro_batch.targets[:, :length],
        lengths=lengths,
        noise_scale=None if micro_batch.noise_scale is None else micro_batch.noise_scale[:, :length],
        is_padding=None if micro_batch.is_padding is None else micro_batch.is_padding[:, :length],
        starts=starts,
        pairs=pairs,
    )


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
                   {"tokens": n, "sequences": s}, or for preference pairs {"pairs": n, "chosen_tokens": m,
                   "sequences": s}; each segment and each answer is a sequence
    num_tokens     global: input tokens without padding
    squared        global: Σ length² over the examples (for pairs, over their rows), the cost of attention
    epoch          epochs of the data after this step
    example_ids    global: indices of the step's examples in the dataset
    sources        global: by name of the source; empty if there is only one
    assigned_ids   of this rank: the example ids of each micro-batch, in order
    """

    micro_batches: tuple[MicroBatch, ...]
    counts: Mapping[str, int]
    num_tokens: int
    epoch: float
    example_ids: tuple[int, ...]
    squared: int = 0
    sources: Mapping[str, SourceShare] = field(default_factory=dict)
    assigned_ids: tuple[tuple[int, ...], ...] = ()
