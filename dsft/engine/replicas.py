"""Compare periodically what several ranks replicate: weights that are not sharded, frozen weights, buffers,
and the copies of a tied parameter on several pipeline stages.

Each rank adds up the bits of its tensors; the digests of all ranks travel in the all-reduce that the loop
makes for its record. Weights that ZeRO 1 and 2 gather in each step are compared too; sharded ones (ZeRO 3)
are on one rank only.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor, nn

from dsft.dist.world import World
from dsft.errors import WorldError

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type whose values are an element's bits, by the element's bytes."""
BLOCK = 2**20
"""Elements added up at a time: torch widens them to int64 in a copy, which should stay small."""
EXACT = 2**53 - 1
"""Mask of the bits of a digest that are compared, since it travels as a float64."""
_SHOWN = 3
_CHANGING = ("dynamic", "longrope")  # rotary tables that depend on the longest row of a batch


class Replicas:
    """The comparison of a run. `every`: steps between two comparisons; None: only before a checkpoint is
    saved."""

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], world: World, every: int | None) -> None:
        """A collective. `tensors`: `Engine.replicated`."""
        self._tensors, self._world, self._every = tensors, world, every
        self._last = 0
        self._holders = _holders(sorted(tensors()), world)
        self._sets = sorted(set(self._holders.values()))

    def mine(self, step: int, *, saves: bool) -> Tensor:
        """Return (ranks × sets,) float64 on the device: this rank's digests, and zeros for other ranks, so
        that the sum over all ranks has all digests. A set is all tensors that the same ranks have. Empty
        where `step` is not due: all ranks call this with the same step."""
        is_due = saves or (self._every is not None and step - self._last >= self._every)
        if not self._sets or not is_due:
            return torch.zeros(0, dtype=torch.float64, device=self._world.device)
        self._last = step
        rows = torch.zeros(
            self._world.world_size, len(self._sets), dtype=torch.int64, device=self._world.device
        )
        for name, tensor in self._tensors().items():
            if (ranks := self._holders.get(name)) is not None:
                factor = crc32(name.encode()) | 1  # so that exchanging two tensors changes the sum
                rows[self._world.rank, self._sets.index(ranks)] += digest(tensor) * factor
        return (rows & EXACT).double().flatten()

    def check(self, everyones: Tensor, step: int) -> None:
        """Compare the digests. `everyones`: the sum of all ranks' `mine`. Raises WorldError on every rank,
        naming rank and tensor, where ranks with the same tensors have different digests."""
        if not everyones.numel():
            return
        rows = everyones.view(self._world.world_size, len(self._sets)).long()
        if all(len(rows[list(ranks), number].unique()) == 1 for number, ranks in enumerate(self._sets)):
            return
        mine = {n: int(digest(tensor)) for n, tensor in self._tensors().items() if n in self._holders}
        gathered = self._world.gather((socket.gethostname(), mine))
        raise WorldError(
            _divergence_message([host for host, _ in gathered], [digests for _, digests in gathered], step)
        )


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of all elements' bits as integers, int64 and wrapping, on the tensor's device. Any
    single bit that differs changes it."""
    flat = tensor.detach().reshape(-1)
    words = flat.view(WORDS[flat.element_size()])
    return torch.stack([block.sum(dtype=torch.int64) for block in words.split(BLOCK)]).sum()


def replicated(causal_lm: nn.Module, master_weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors that a rank has whole, by name: parameters that ZeRO 3 has not sharded, buffers, and
    `master_weights`, the float32 copies of parameters where every data-parallel rank has all of them (ZeRO 0
    in bf16 or fp16)."""
    found: dict[str, Tensor] = _buffers(causal_lm)
    found |= {name: p for name, p in causal_lm.named_parameters() if not hasattr(p, "ds_tensor")}
    found |= {f"{name} in float32": master for name, master in master_weights}
    return {name: tensor for name, tensor in found.items() if tensor.numel() and not tensor.is_meta}


def _buffers(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that do not depend on the rows that a rank has computed."""
    return {
        name: buffer
        for prefix, part in causal_lm.named_modules()
        if not any(kind in str(getattr(part, "rope_type", "")) for kind in _CHANGING)
        for name, buffer in part.named_buffers(prefix, recurse=False)
    }


def _holders(names: Sequence[str], world: World) -> dict[str, tuple[int, ...]]:
    """Return the ranks that have each tensor, for all that several ranks have: the same on every rank."""
    names_by_rank = [names] * world.world_size if world.layout.pipeline_stages == 1 else world.gather(names)
    found: dict[str, list[int]] = {}
    for rank, present in enumerate(names_by_rank):
        for name in present:
            found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items() if len(ranks) > 1}


def _divergence_message(hosts: Sequence[str], digests: Sequence[Mapping[str, int]], step: int) -> str:
    """Return the message. `hosts` and `digests` are by rank; digests are of each tensor that the rank shares
    with others."""
    found: dict[tuple[tuple[int, ...], bool], list[str]] = {}
    for name in dict.fromkeys(name for present in digests for name in present):
        values = {rank: present[name] for rank, present in enumerate(digests) if name in present}
        usual, times = Counter(values.values()).most_common(1)[0]
        odd = [rank for rank, value in values.items() if value != usual]
        if odd:
            is_minority = times > len(odd)
            found.setdefault((tuple(odd if is_minority else values), is_minority), []).append(name)
    clauses = []
    for (ranks, is_minority), names in found.items():
        listed = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks)
        who = f"rank {listed} has" if len(ranks) == 1 else f"ranks {listed} have"
        others = "from those of the other ranks" if is_minority else "from each other"
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        clauses.append(f"{who} values of {', '.join(names[:_SHOWN])}{more} that differ {others}")
    return (
        f"step {step}: {'; '.join(clauses)}, and they must be equal bit for bit. Either a host's memory or "
        "device is faulty, or the hosts have different processors, which round differently. This step is not "
        "saved: resume from the last checkpoint on hosts of one kind, without the faulty one."
    )
