"""Check in a run's first applied step that the optimizer has got the gradients that autograd has computed.

Between the two DeepSpeed adds up micro-batches, reduces over ranks, shards, clips, offloads and swaps, and a
fault there loses or mixes gradients without an error. Each rank samples every gradient as autograd returns
it. After the step, AdamW's first moment must be the same multiple of their sum over micro-batches and ranks,
element by element: (1 - β1) × clipping × the scale of the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from zlib import crc32

import torch
from torch import Tensor, nn

from dsft.engine.api import Fragment
from dsft.engine.world import World
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
_SHOWN = 3


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


def check_moments(samples: GradientSamples, fragments: Iterable[Fragment], world: World) -> None:
    """Compare the samples with the first moments in `fragments`. A collective. Raises WorldError with the
    names of the parameters whose moments do not follow from their gradients."""
    names = list(dict.fromkeys(name for given in world.gather(list(samples.positions)) for name in given))
    index = {name: number for number, name in enumerate(names)}
    compared = torch.zeros(len(names), 3, SAMPLES, dtype=torch.float64, device=world.device)
    for name, sums in samples.sums.items():
        compared[index[name], :2] += sums
    for fragment in fragments:
        if fragment.kind == "exp_avg":
            row = compared[index[fragment.name], 2]
            positions = samples.positions[fragment.name] - fragment.start
            here = ((positions >= 0) & (positions < len(fragment.data))).nonzero().flatten()
            values = fragment.data[positions[here].to(fragment.data.device)]
            row[here] = values.to(row)
    gradients, squares, moments = world.sum(compared).cpu().unbind(1)
    faulty = [names[index] for index in mismatches(gradients, squares, moments)]
    if faulty:
        more = f" and {len(faulty) - _SHOWN} more" if len(faulty) > _SHOWN else ""
        raise WorldError(
            f"step 1: the optimizer did not get the gradients of {', '.join(faulty[:_SHOWN])}{more} that the "
            "backward pass computed, so the run would train something else. Nothing was saved. Either "
            "DeepSpeed loses gradients in this layout, or a device, disk or link is faulty: try another ZeRO "
            "stage or offload, check the hardware, and report the spec."
        )


def mismatches(gradients: Tensor, squares: Tensor, moments: Tensor) -> list[int]:
    """Return the indices of the parameters whose moments are no positive multiple of their gradients. All are
    (n, SAMPLES) float64: sums of gradients and of their squares over micro-batches and ranks; moments.
    Elements whose gradients cancel are not compared, as their sum is rounding noise."""
    noise = squares.sqrt()
    compared = gradients.abs() > 0.5 * noise
    quotients = torch.where(compared, moments / gradients, torch.nan).nanmedian(dim=1).values
    usual = quotients.nanmedian()
    off = (moments - quotients[:, None] * gradients).abs() > quotients[:, None] * NOISE * (
        noise + gradients.abs()
    )
    share = (off & compared).sum(1) / compared.sum(1).clamp(min=1)
    is_multiple = (quotients > usual / FACTOR) & (quotients < usual * FACTOR) & (share <= MOST_OFF)
    return (compared.any(1) & ~is_multiple).nonzero().flatten().tolist()


def _positions(name: str, shape: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randint(torch.Size(shape).numel(), (SAMPLES,), generator=draw)
