"""What one rank trains, as the counts of its memory need it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dsft.plan.ds_config import PERSIST_BELOW
from dsft.plan.memory.gathered import Gathered
from dsft.plan.memory.tensors import NONE, Phase, Tensors, each, held, one
from dsft.plan.storage import FP32, MOMENT_BLOCK, MOMENT_LEAST, Stored

ROUNDED = 64 << 20  # torch rounds pinned tensors up to this many bytes to a power of two


@dataclass(frozen=True)
class RankSetup:
    """The part of a model that one rank trains, and how.

    trained                number of elements of each trained parameter of the rank's stage
    frozen                 the tensors that hold its other parameters
    zero                   ZeRO stage
    ranks                  data-parallel ranks
    copied                 those of a group that has a second copy of the parameters; 1: none
    weight                 bytes per element of trained weights
    reduced                bytes per element in the reduction over ranks
    moment                 bytes per element of the optimizer states in 32 bits
    in_8_bits              whether they have 8 bits
    fewer                  as `fewer_moment_bytes` returns, for the parameters of the stage
    orthogonal             bytes that the update of the largest of these needs at once (`orthogonal_bytes`)
    gradient               bytes per element of the gradients that ZeRO 3 keeps
    sub_group              most trained elements that ZeRO 3 updates at once
    bucket                 elements of the reduction bucket
    gathered               what ZeRO 3 gathers, if there are several ranks
    inside, outside        elements of the largest trained parameter of the layers, and outside of them
    beside, together       of the layers', of the largest whose gradient appears beside activations (not those
                           of MLPs in chunks), and of all of a module
    reads_whole            whether ZeRO 3 shards parameters that have been read whole (model/lora.py)
    optimizer, parameters  devices of offload_optimizer and offload_parameters
    groups                 parameter groups of the optimizer
    accumulates            whether steps have several micro-batches
    pinned                 whether offloaded tensors are pinned
    locked                 bytes of the pinned buffers through which the rank swaps
    forward, backward      activations and head at the peak of each
    reducing               activations while a layer's gradients are reduced
    """

    trained: tuple[int, ...]
    frozen: tuple[Stored, ...]
    zero: int
    ranks: int
    weight: int
    reduced: int
    moment: int
    in_8_bits: bool
    fewer: int
    orthogonal: int
    sub_group: int
    bucket: int
    gathered: Gathered
    inside: int
    outside: int
    beside: int
    together: int
    reads_whole: bool
    optimizer: str
    parameters: str
    groups: int
    accumulates: bool
    pipeline: bool
    on_cpu: bool
    is_bf16: bool
    pinned: bool
    locked: int
    forward: Phase
    backward: Phase
    reducing: Phase
    gradient: int
    copied: int

    @property
    def elements(self) -> int:
        return sum(self.trained)

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The tensors that hold the parameters of the stage."""
        return (*(Stored(numel, self.weight) for numel in self.trained), *self.frozen)

    @property
    def frozen_shards(self) -> Tensors:
        """This rank's shares of the parameters that are not trained, at ZeRO 3."""
        return held(tensor.shard(self.ranks) for tensor in self.frozen)

    @property
    def resident(self) -> Tensors:
        """The small parameters that ZeRO 3 keeps whole."""
        return held(tensor for tensor in self.stored if tensor.numel <= PERSIST_BELOW)

    @property
    def copies(self) -> Tensors:
        """This rank's part of its group's copy of the parameters (partition_parameters.py:1912
        secondary_partition_size)."""
        return held(tensor.shard(self.copied) for tensor in self.stored) if self.copied > 1 else NONE

    @property
    def share(self) -> int:
        """Number of trained elements per rank; at ZeRO 3 each parameter is sharded separately."""
        if self.zero == 3:
            return sum(self.shares(self.trained))
        return -(-self.elements // self.ranks)

    @property
    def moments(self) -> Tensors:
        """The optimizer states of this rank, on its device."""
        own = self.shares(self.trained) if self.zero else self.trained
        if self.fewer:
            return one(self.share * self.moment - self.fewer // (self.ranks if self.zero else 1))
        if not self.in_8_bits:
            return one(self.share * self.moment) if self.zero else each(own, self.moment)
        found = NONE
        for numel, part in zip(self.trained, own, strict=True):
            blocks = -(-part // MOMENT_BLOCK)
            found += each((2 * part, 2 * blocks * FP32), 1) if numel >= MOMENT_LEAST else one(2 * part * FP32)
        return found

    @property
    def largest(self) -> int:
        return max(self.trained, default=0)

    @property
    def is_offloaded(self) -> bool:
        return self.optimizer != "none"

    @property
    def adds_in_place(self) -> bool:
        """Whether gradients are added up without buckets, as on one rank (engine/reduction.py)."""
        return self.ranks == 1 and not self.pipeline and not self.is_offloaded

    def shares(self, elements: Iterable[int]) -> list[int]:
        return [-(-numel // self.ranks) for numel in elements]

    def in_host(self, elements: int, width: int) -> Tensors:
        """Return a tensor in host memory. torch rounds pinned tensors up to a power of two of bytes
        (torch, CachingHostAllocator.h) unless configured otherwise (`dsft.plan.memory.offload.allocator`)."""
        size = elements * width
        is_rounded = self.pinned and 0 < size <= ROUNDED
        return one(1 << (size - 1).bit_length() if is_rounded else size)

    def gathering(self, size: int) -> Tensors:
        """Return gloo's own copy of the bytes that it gathers (ProcessGroupGloo, all_gather_into_tensor);
        nothing on a GPU."""
        return one(size) if self.on_cpu and self.ranks > 1 else NONE
