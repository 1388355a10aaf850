"""AdamW with moments in 8 bits: the update is bitsandbytes' own, and what a checkpoint has of the moments
gives the same ones again."""

from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_blockwise, quantize_blockwise
from bitsandbytes.optim import AdamW8bit as Theirs
from torch import Tensor, nn

from dsft.engine.adamw_8bit import AdamW8bit
from dsft.engine.base_optimizer import StateShard
from dsft.plan.memory.setup import RankSetup

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
NUMEL = 5000


def gradient(step: int, size: int) -> Tensor:
    """Values of very different sizes, as a block of 8 bits finds hardest."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(size, generator=draw) * torch.rand(size, generator=draw) ** 6 * 1e-3


def optimizer(home: nn.Parameter, parts: list[StateShard]) -> AdamW8bit:
    found = AdamW8bit([{"params": [home], "weight_decay": 0.1}], **SETTINGS)
    found.set_parts({str(number): part for number, part in enumerate(parts)}, [home], None)
    return found


def test_update_of_several_parameters_in_one_tensor_is_that_of_each() -> None:
    """One of 8 bits, one too small for them, and padding, which does not change."""
    sizes = NUMEL, 300
    home = nn.Parameter(torch.randn(sum(sizes) + 20))
    ours = optimizer(home, [StateShard(0, NUMEL, home, 0, (NUMEL,)), StateShard(0, 300, home, NUMEL, (300,))])
    each = [nn.Parameter(part.clone()) for part in home.detach()[: sum(sizes)].split(sizes)]
    theirs, padding = Theirs(each, weight_decay=0.1, **SETTINGS), home.detach()[sum(sizes) :].clone()
    for step in range(5):
        home.grad = gradient(step, len(home))
        for parameter, part in zip(each, home.grad[: sum(sizes)].split(sizes), strict=True):
            parameter.grad = part.clone()
        ours.step()
        theirs.step()
    assert torch.equal(home.detach(), torch.cat([*(p.detach() for p in each), padding]))


@pytest.mark.parametrize(("start", "size"), [(0, NUMEL), (100, 4000), (256, 256), (7, 3), (NUMEL - 1, 1)])
def test_moments_that_are_read_and_written_are_the_same(start: int, size: int) -> None:
    """Also where a negative value is a block's largest, which bitsandbytes' quantizing does not restore."""
    home = nn.Parameter(torch.randn(size))
    part = StateShard(start, size, home, 0, (NUMEL,))
    end = part.part(start + size - 1, NUMEL)
    ours, again, changed = optimizer(home, [part]), optimizer(home, [part]), 0
    for step in range(1, 30):
        home.grad = gradient(step, size)
        ours.step()
        again.allocate(home, step)
        old, new = ours.moments(part), again.moments(end)
        for kind in (0, 1):
            new.write(kind, old.read(kind))
            assert torch.equal(new.read(kind), old.read(kind)), (step, kind)
        codes, quantized = quantize_blockwise(old.read(0), blocksize=256)
        changed += not torch.equal(dequantize_blockwise(codes, quantized), old.read(0))
    assert changed or size < 256, "quantizing the values again, without the search, changes them"


def test_other_values_are_quantized_to_the_nearest_code() -> None:
    home = nn.Parameter(torch.randn(NUMEL))
    part = StateShard(0, NUMEL, home, 0, (NUMEL,))
    mine = optimizer(home, [part])
    mine.allocate(home, 1)
    moments, values = mine.moments(part), torch.randn(NUMEL)
    moments.write(0, values)
    codes, quantized = quantize_blockwise(values, blocksize=256)
    ours, theirs = moments.read(0) - values, dequantize_blockwise(codes, quantized) - values
    assert (ours.abs() <= theirs.abs() + 1e-6).all() and ours.abs().max() < 0.1


@pytest.mark.parametrize("zero", [0, 3])
def test_plan_counts_the_bytes(zero: int) -> None:
    sizes, ranks = (NUMEL, 4096, 4095, 10), 1 if zero == 0 else 2
    home = nn.Parameter(torch.zeros(sum(-(-size // ranks) for size in sizes)))
    parts, offset = [], 0
    for size in sizes:
        parts.append(StateShard(0, -(-size // ranks), home, offset, (size,)))
        offset += parts[-1].size
    ours = optimizer(home, parts)
    ours.allocate(home, 1)
    held = [
        getattr(m, name, home[:0])
        for m in ours.state[home]["moments"]
        for name in ("codes", "scales", "values")
    ]
    setup = object.__new__(RankSetup)
    vars(setup).update(trained=sizes, zero=zero, ranks=ranks, in_8_bits=True, fewer=0)
    assert setup.moments.total == sum(tensor.numel() * tensor.element_size() for tensor in held)
