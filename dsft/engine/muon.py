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

from dsft.engine.api import StateKind
from dsft.engine.base_optimizer import BaseAdam, Ranks, Samples, StateShard
from dsft.plan.flops import ITERATIONS
from dsft.spec.patterns import is_layers_matrix

MATRICES = "matrices"
"""Key that dsft adds to an optimizer's groups: whether Muon updates their parameters."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
LIKE_ADAMW = 0.2
"""Root mean square of a matrix's update at a learning rate of 1, about that of AdamW's."""
EXPECTED = 0.02
"""Change of a matrix's element that is expected to be seen, at a learning rate of 1: a tenth of their root
mean square."""
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


class Muon(BaseAdam):
    """Muon with Nesterov momentum for the groups with `MATRICES`, torch's fused AdamW for the others.

    momentum  factor of the momentum, an average of gradients, as AdamW's first moment
    dtype     in which singular values are brought near 1
    matrices  those in each tensor that has such, on all ranks in the same order
    ranks     see `Ranks`
    """

    def __init__(self, groups: Iterable[Any], *, momentum: float, dtype: torch.dtype, **adamw: Any) -> None:
        self._adamw = torch.optim.AdamW([{"params": []}], **adamw, fused=True)
        super().__init__(groups, self._adamw.defaults)
        self.momentum, self.dtype = momentum, dtype
        self.matrices: dict[Tensor, list[Matrix]] = {}
        self.ranks: Ranks = None

    def set_parts(self, parts: Mapping[str, StateShard], homes: Sequence[Tensor], ranks: Ranks) -> None:
        self.ranks, self.matrices = ranks, {}
        numbers = {id(home): number for number, home in enumerate(homes)}
        mine = {name: part for name, part in parts.items() if is_layers_matrix(name, part.shape)}
        sent = {name: (part.shape, numbers[id(part.home)], part.size) for name, part in mine.items()}
        every, rank = [sent], 0
        if ranks is not None:
            every, rank = [sent] * dist.get_world_size(ranks), dist.get_rank(ranks)
            dist.all_gather_object(every, sent, ranks)
        known = {name: place for places in every for name, place in places.items()}
        for name, (shape, number, _) in sorted(known.items()):
            sizes = tuple(places[name][2] if name in places else 0 for places in every)
            matrix = Matrix(shape, mine[name].offset if name in mine else 0, sizes, rank)
            self.matrices.setdefault(homes[number], []).append(matrix)

    def kinds_of(self, home: Tensor) -> tuple[StateKind, ...]:
        return ("momentum_buffer",) if home in self.matrices else super().kinds_of(home)

    def expected_change(self, gradients: Tensor, after: Samples, step: int) -> Tensor:
        change = super().expected_change(gradients, after, step)
        return torch.where(after["momentum_buffer"].isnan(), change, EXPECTED)

    def first_moments(self, after: Samples) -> Tensor | None:
        """Return AdamW's, and the momentum of matrices as the same multiple of the gradient."""
        factor, momentum = (1 - self.defaults["betas"][0]) / (1 - self.momentum), after["momentum_buffer"]
        return torch.where(momentum.isnan(), after["exp_avg"], momentum * factor)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._adamw.state = self.state
        self._adamw.param_groups = [group for group in self.param_groups if not group[MATRICES]]
        self._adamw.step()
        for group in self.param_groups:
            for home in group["params"] if group[MATRICES] else ():
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
