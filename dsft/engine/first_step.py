"""Check in a start's first applied steps that the optimizer has got the gradients that autograd has computed,
and that it has changed the weights.

Between the two DeepSpeed adds up micro-batches, reduces over ranks, shards, clips, offloads and swaps, and a
fault there loses or mixes gradients without an error. Each rank samples every gradient as autograd returns
it. After a run's first step, AdamW's first moment must be the same multiple of their sum over micro-batches
and ranks, element by element: (1 - β1) × clipping × the scale of the loss. After a start's first step whose
learning rate is not 0, some of the samples of each parameter must have another value, on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor, nn

from dsft.dist.world import World
from dsft.engine.api import Fragment, StateKind
from dsft.errors import WorldError

SAMPLES = 256
"""Elements of each parameter that are compared, drawn at random."""
NOISE = 0.1
"""Largest error that rounding may cause in a sum of gradients, relative to the sum and to the root of the
sum of squares: about 0.06 if 1,024 gradients are reduced in bf16, 1e-5 in fp32."""
MOST_OFF = 0.25
"""Share of a parameter's samples that may differ by more: one of five ranks may be wrong unseen."""
FACTOR = 4.0
"""Largest quotient of two parameters' multiples. They are equal, except that of a parameter whose MLP is
computed in chunks each chunk's gradient is added, and then their sum."""
ROUNDING = 2.0**-20
"""Smallest change that is expected to change a value, relative to it: 16 times float32's rounding."""
_SMALLEST = 1e-30
_SHOWN = 3
_CAUSES = (
    "This step was not saved. Either DeepSpeed loses gradients or weights in this layout, or a device, disk "
    "or link is faulty: try another ZeRO stage or offload, check the hardware, and report the spec."
)


@dataclass
class GradientSamples:
    """The samples of this rank's gradients.

    positions  of the sampled elements in the flattened parameter, (SAMPLES,) int64 on the device, by name
    sums       by name, (2, SAMPLES) float64: sum of the gradients, and of their squares
    """

    positions: Mapping[str, Tensor]
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, gradient: Tensor) -> None:
        index = torch.unravel_index(self.positions[name], gradient.shape)
        sampled = gradient.detach()[index].double()
        added = torch.stack([sampled, sampled.square()])
        self.sums[name] = self.sums[name] + added if name in self.sums else added


@contextmanager
def sampled_gradients(
    trained: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> Iterator[GradientSamples]:
    """Sample the gradients of all backward passes in the block. shapes: full ones, by name; device: of the
    gradients."""
    samples = GradientSamples({name: _positions(name, shape).to(device) for name, shape in shapes.items()})
    with ExitStack() as hooks:
        for name, parameter in trained.items():
            hooks.callback(parameter.register_hook(functools.partial(samples.add, name)).remove)
        yield samples


def sampled_state(
    samples: GradientSamples, fragments: Iterable[Fragment], kinds: Sequence[StateKind]
) -> dict[StateKind, Tensor]:
    """Return (n, SAMPLES) float64 on the device by kind, in the order of `samples.positions`, with NaN for
    elements that another rank owns."""
    rows = {name: row for row, name in enumerate(samples.positions)}
    nothing = torch.stack(tuple(samples.positions.values())).double() * torch.nan
    found = {kind: nothing.clone() for kind in kinds}
    for fragment in fragments:
        if fragment.kind in found:
            positions = samples.positions[fragment.name] - fragment.start
            here = ((positions >= 0) & (positions < fragment.size)).nonzero().flatten()
            data = fragment.data
            values = data[positions[here].to(data.device)]
            found[fragment.kind][rows[fragment.name], here] = values.to(nothing)
    return found


def check_gradients(
    samples: GradientSamples, moments: Tensor | None, world: World, noise: float = NOISE
) -> tuple[Tensor, Tensor]:
    """Add up the samples of all ranks, and compare them with the optimizer's first moments, if given, as
    `sampled_state` returns them. noise: as `NOISE`. Return the sums of the gradients and of their
    squares, each (n, SAMPLES). A collective. Raises WorldError with the names of the parameters whose moments
    do not follow from their gradients."""
    names = list(dict.fromkeys(name for given in world.gather(list(samples.positions)) for name in given))
    index = {name: number for number, name in enumerate(names)}
    mine = [index[name] for name in samples.positions]
    compared = torch.zeros(len(names), 3, SAMPLES, dtype=torch.float64, device=world.device)
    for name, sums in samples.sums.items():
        compared[index[name], :2] += sums
    if moments is not None:
        compared[mine, 2] = moments.nan_to_num(nan=0.0)
    gradients, squares, summed = world.sum(compared).unbind(1)
    if moments is not None:
        faulty = mismatches(gradients.cpu(), squares.cpu(), summed.cpu(), noise)
        if faulty:
            raise WorldError(
                "first applied step: the optimizer did not get the gradients of "
                f"{_listed([names[i] for i in faulty])} that the backward pass computed, so the run would "
                f"train something else. {_CAUSES}"
            )
    return gradients[mine], squares[mine]


def check_values(samples: GradientSamples, faulty: Tensor, world: World) -> None:
    """Raise WorldError on all ranks with the names of the parameters that are `unchanged` on any of them. A
    collective."""
    names = [name for name, is_faulty in zip(samples.positions, faulty.tolist(), strict=True) if is_faulty]
    ranks: dict[str, int] = {}
    for rank, given in enumerate(world.gather(names)):
        ranks.update({name: rank for name in given if name not in ranks})
    if ranks:
        shown = _listed([f"{name} (on rank {rank})" for name, rank in ranks.items()])
        raise WorldError(
            f"first checked step: the optimizer has not changed {shown}, whose gradient and learning rate "
            f"are not 0, so the run would not train it. {_CAUSES}"
        )


def unchanged(
    gradients: Tensor,
    squares: Tensor,
    before: Tensor,
    after: Tensor,
    change: Tensor | float,
    settings: Tensor,
) -> Tensor:
    """Return (n,) bool: whether none of a parameter's samples has changed, although some should have: their
    gradient is not 0, and the optimizer changes them by more than float32's rounding and weight decay. All
    samples are (n, SAMPLES) float64. Values that another rank owns are NaN and not compared. change: as
    `BaseOptimizer.expected_change` returns it; settings: learning rates and weight decays (2, n, 1)."""
    rates, decays = settings
    size = before.abs().clamp(min=_SMALLEST)
    due = (gradients.abs() > 0.5 * squares.sqrt()) & (rates * (change - decays * size) > ROUNDING * size)
    return due.any(1) & ~(due & (before != after)).any(1)


def mismatches(gradients: Tensor, squares: Tensor, moments: Tensor, relative: float = NOISE) -> list[int]:
    """Return the indices of the parameters whose moments are no positive multiple of their gradients. All are
    (n, SAMPLES) float64: sums of gradients and of their squares over micro-batches and ranks; moments.
    Elements whose gradients cancel are not compared, as their sum is rounding noise."""
    noise = squares.sqrt()
    compared = gradients.abs() > 0.5 * noise
    quotients = torch.where(compared, moments / gradients, torch.nan).nanmedian(dim=1).values
    usual = quotients.nanmedian()
    off = (moments - quotients[:, None] * gradients).abs() > quotients[:, None] * relative * (
        noise + gradients.abs()
    )
    share = (off & compared).sum(1) / compared.sum(1).clamp(min=1)
    is_multiple = (quotients > usual / FACTOR) & (quotients < usual * FACTOR) & (share <= MOST_OFF)
    return (compared.any(1) & ~is_multiple).nonzero().flatten().tolist()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def _positions(name: str, shape: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randint(torch.Size(shape).numel(), (SAMPLES,), generator=draw)
