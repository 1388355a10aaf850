"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for the matrices of the layers, and AdamW for
all other parameters.

A matrix changes by its momentum with all singular values brought near 1, times 0.2 √max(rows, columns). A
learning rate and a weight decay that suit AdamW then suit Muon too (Liu et al. 2025, arXiv 2502.16982). Of
joined experts each one's matrix is taken by itself.

DeepSpeed gives the optimizer flat tensors, and a matrix may lie on several ranks. These send their parts to
one of them, which computes the update, and get back their parts of it. So the update follows the gradient
that is clipped, as without ZeRO; DeepSpeed's own Muon clips the updates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsft.plan.flops import ITERATIONS

MUON = "muon"
"""Key of an optimizer's group: whether its parameters are matrices that Muon updates."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
LIKE_ADAMW = 0.2
"""Root mean square of a matrix's update at a learning rate of 1, about that of AdamW's."""
_TINY = 1e-7


@dataclass(frozen=True)
class Matrix:
    """The part of a matrix that this rank has in a flat tensor.

    shape   of the whole, (rows, columns) or (experts, rows, columns)
    offset  index of its first element in the flat tensor
    sizes   number of its elements on each rank, in the order of the ranks
    rank    this one
    """

    shape: tuple[int, ...]
    offset: int
    sizes: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        return self.sizes[self.rank]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_split(self) -> bool:
        return max(self.sizes) < self.numel

    @property
    def scale(self) -> float:
        return LIKE_ADAMW * math.sqrt(max(self.shape[-2:]))

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.size]


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum for the groups with `MUON`, torch's fused AdamW for the others. `matrices`
    must be set before the first step: those in each tensor of the groups with `MUON`, on all ranks in the
    same order.

    names     of the matrices
    momentum  factor of the momentum, an average of gradients, as AdamW's first moment
    dtype     in which singular values are brought near 1
    ranks     the process group over which matrices are split; None: each rank has all of them
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        names: Iterable[str],
        *,
        momentum: float,
        dtype: torch.dtype,
        **adamw: Any,
    ) -> None:
        self._adamw = torch.optim.AdamW([{"params": []}], **adamw, fused=True)
        super().__init__(groups, self._adamw.defaults)
        self.names, self.momentum, self.dtype = frozenset(names), momentum, dtype
        self.matrices: Mapping[Tensor, Sequence[Matrix]] = {}
        self.ranks: dist.ProcessGroup | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group[MUON]]
        self._adamw.step()
        for group in self.param_groups:
            for home in group["params"] if group[MUON] else ():
                if home.grad is not None:
                    self._step(home, group)

    def _step(self, home: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[home]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(home, requires_grad=False)
        flat, momentum = home.detach().view(-1), state["momentum_buffer"].view(-1)
        gradient = home.grad.reshape(-1)  # type: ignore[union-attr]
        momentum.lerp_(gradient, 1 - self.momentum)
        matrices = self.matrices.get(home, ())

        def ahead(matrix: Matrix) -> Tensor:
            return matrix.of(gradient).lerp(matrix.of(momentum), self.momentum)

        def apply(matrix: Matrix, update: Tensor) -> None:
            part = matrix.of(flat).mul_(1 - group["lr"] * group["weight_decay"])
            part.add_(update, alpha=-group["lr"] * matrix.scale)

        for matrix in matrices:
            if not matrix.is_split and matrix.size:
                apply(matrix, self._orthogonal(ahead(matrix), matrix))
        split = sorted((one for one in matrices if one.is_split), key=lambda one: one.numel)
        at_once = dist.get_world_size(self.ranks) if split else 1
        for first in range(0, len(split), at_once):
            some = split[first : first + at_once]
            for matrix, update in zip(some, self._exchanged(some, [*map(ahead, some)]), strict=True):
                apply(matrix, update)

    def _exchanged(self, some: Sequence[Matrix], parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return this rank's parts of the updates of split matrices, one of which each rank computes. parts:
        of the momentum. A collective."""
        rank, ranks = some[0].rank, len(some[0].sizes)
        mine = some[rank] if rank < len(some) else None
        sent = [matrix.size for matrix in some] + [0] * (ranks - len(some))
        received = list(mine.sizes) if mine else [0] * ranks
        whole = parts[0].new_empty(sum(received))
        dist.all_to_all_single(whole, torch.cat([*parts]), received, sent, group=self.ranks)
        if mine is not None:
            whole = self._orthogonal(whole, mine)
        found = whole.new_empty(sum(sent))
        dist.all_to_all_single(found, whole, sent, received, group=self.ranks)
        return found.split(sent[: len(some)])

    def _orthogonal(self, flat: Tensor, matrix: Matrix) -> Tensor:
        return orthogonal(flat.view(matrix.shape), self.dtype).reshape(-1).to(flat.dtype)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (…, rows, columns) in `dtype` with the same singular vectors and singular values of about 0.7 to
    1.2, by five Newton-Schulz iterations."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    found = (matrix.mT if is_tall else matrix).view(-1, *sorted(matrix.shape[-2:]))
    found = (found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)).to(dtype)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, gram, found, beta=a)
    return (found.mT if is_tall else found).view(matrix.shape)


def split_over(
    mine: Mapping[str, tuple[tuple[int, ...], int, int, int]],
    homes: Sequence[Tensor],
    ranks: dist.ProcessGroup | None,
) -> dict[Tensor, list[Matrix]]:
    """Return the matrices of each of the optimizer's tensors. mine: name -> (shape, number of the tensor in
    `homes`, offset, size) of this rank's parts. A collective of `ranks`, which have as many tensors each."""
    every, rank = [mine], 0
    if ranks is not None:
        every, rank = [mine] * dist.get_world_size(ranks), dist.get_rank(ranks)
        dist.all_gather_object(every, mine, ranks)
    found: dict[Tensor, list[Matrix]] = {home: [] for home in homes}
    known = {name: place for places in every for name, place in places.items()}
    for name in sorted(known):
        shape, number, _, _ = known[name]
        sizes = tuple(places[name][3] if name in places else 0 for places in every)
        offset = mine[name][2] if name in mine else 0
        found[homes[number]].append(Matrix(shape, offset, sizes, rank))
    return {home: matrices for home, matrices in found.items() if matrices}
