"""What flows from the data to the engines: micro-batches of one optimizer step, with global counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsft.data.steps.copies import to_device
from dsft.errors import DsftError

NO_TARGET = -100  # as in torch.nn.functional.cross_entropy

Borders = tuple[Tensor, ...]
"""Of the n segments of a packed row: (n + 1,) int32, where each begins in the row, and the end of the last.
Where some go on from a prompt, two more: (n + 1,) int32, the same of the segments' keys, and (K,) int32,
which token of the row each of these K keys is."""


@dataclass(frozen=True)
class Pairs:
    """The n preference pairs of a micro-batch: its segments, or where it is padded its rows, are chosen,
    rejected, chosen, rejected, …

    ids         (n,) int64: their numbers in their dataset; on the host
    num_tokens  (n, 2) int64: targets of the chosen and of the rejected answer
    reference   (n, 2) float64: the reference's log-probabilities, summed over them; None: not known
    segments    (T,) int32: of a packed micro-batch the segment, from 0, that each position is in; set by
                `MicroBatch.to`
    """

    ids: Tensor
    num_tokens: Tensor
    reference: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass on one data-parallel rank. B rows of T tokens, right-padded.

    There is no attention mask: padding stands after the row's tokens, where a causal model cannot see
    it, and has no targets. An empty micro-batch (no examples left to deal) is one short row without
    targets, so that every rank runs the same number of forward and backward passes.
    """

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64: the token that position t predicts (t + 1), or NO_TARGET
    lengths: tuple[int, ...] | None = None  # packed: tokens of each segment of the one row; padded: None
    noise_scale: Tensor | None = None  # (B, T) float32: NEFTune's α ÷ √L; None where no noise is added
    num_targets: int | None = None  # counted by `to`, while the targets are still on the host
    starts: tuple[int, ...] | None = None  # the position at which each segment begins; None: 0. One that
    # begins later follows the first tokens, up to there, of the last segment that begins at 0
    pairs: Pairs | None = None
    borders: Borders | None = None  # of a packed row's segments; made by `to`

    def to(self, device: torch.device) -> MicroBatch:
        """On `device`; the copy to a GPU goes through page-locked memory, and nobody waits for it."""
        borders = self.borders
        if borders is None and self.lengths is not None:
            borders = borders_of(self.lengths, self.starts)
        return replace(
            self,
            borders=borders and tuple(to_device(border, device) for border in borders),
            input_ids=to_device(self.input_ids, device),
            position_ids=to_device(self.position_ids, device),
            targets=to_device(self.targets, device),
            noise_scale=None if self.noise_scale is None else to_device(self.noise_scale, device),
            num_targets=self.num_targets
            if self.num_targets is not None
            else int((self.targets != NO_TARGET).sum()),
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
    """Its first `length` positions. Packed, with the pairs of which both answers have some."""
    lengths, starts, pairs = micro_batch.lengths, micro_batch.starts, micro_batch.pairs
    if lengths is not None:
        lengths = _first_lengths(lengths, length)
        starts = starts and starts[: len(lengths)]
        pairs = pairs and _first_pairs(pairs, len(lengths) // 2)
    return replace(
        micro_batch,
        input_ids=micro_batch.input_ids[:, :length],
        position_ids=micro_batch.position_ids[:, :length],
        targets=micro_batch.targets[:, :length],
        lengths=lengths,
        noise_scale=None if micro_batch.noise_scale is None else micro_batch.noise_scale[:, :length],
        starts=starts,
        pairs=pairs,
    )


def _first_lengths(lengths: tuple[int, ...], total: int) -> tuple[int, ...]:
    """The first segments, the last of them shortened, that make `total` tokens."""
    starts = accumulate(lengths, initial=0)
    return tuple(min(n, total - start) for n, start in zip(lengths, starts, strict=False) if start < total)


def _first_pairs(pairs: Pairs, number: int) -> Pairs:
    reference = pairs.reference if pairs.reference is None else pairs.reference[:number]
    return Pairs(pairs.ids[:number], pairs.num_tokens[:number], reference)


def borders_of(lengths: Sequence[int], starts: Sequence[int] | None = None) -> Borders:
    """On the host. Raises DsftError for a segment that begins later than its prompt ends."""
    begins = np.cumsum((0, *lengths), dtype=np.int32)
    if not any(starts or ()):
        return (torch.from_numpy(begins),)
    index, ends, prompt = list[NDArray[np.int32]](), [0], (0, 0)
    for begin, length, start in zip(begins, lengths, starts or (), strict=False):
        if start == 0:
            prompt = begin, length
        elif prompt[1] < start:
            raise DsftError(f"A segment begins at position {start} without so many tokens before it.")
        else:
            index.append(np.arange(prompt[0], prompt[0] + start, dtype=np.int32))
        index.append(np.arange(begin, begin + length, dtype=np.int32))
        ends.append(ends[-1] + start + length)
    keys = np.array(ends, dtype=np.int32), np.concatenate(index)
    return tuple(map(torch.from_numpy, (begins, *keys)))


@dataclass(frozen=True)
class OfSource:
    """What a step has of a source; epoch: how often the run has seen that source after this step."""

    examples: int
    tokens: int
    epoch: float


@dataclass(frozen=True)
class GlobalStep:
    """One optimizer step as one data-parallel rank sees it.

    micro_batches  this rank's; every rank has the same number of them, which may differ between steps
    counts         global over all ranks and micro-batches, known before the first forward: {"tokens": n},
                   or of preference pairs {"pairs": n, "chosen_tokens": m}
    num_tokens     global, non-padding input tokens
    squared        global, Σ length² over the examples (of pairs their rows): what attention grows with
    epoch          how much of the data has been seen after this step, in epochs
    example_ids    global: indices into the dataset of the examples of this step
    sources        global, by name, where the data has several
    dealt          this rank's: the examples of each of its micro-batches, in their order there
    """

    micro_batches: tuple[MicroBatch, ...]
    counts: Mapping[str, int]
    num_tokens: int
    epoch: float
    example_ids: tuple[int, ...]
    squared: int = 0
    sources: Mapping[str, OfSource] = field(default_factory=dict)
    dealt: tuple[tuple[int, ...], ...] = ()
