"""AdamW whose moments are stored in 8 bits, by bitsandbytes (Dettmers et al. 2022, arXiv 2110.02861).

256 elements in a row of a parameter are a block: a code of 8 bits each, and one float32 scale. DeepSpeed
gives the optimizer flat tensors of several parameters, or a rank's part of one. The blocks are the
parameters' own here, as without ZeRO; only one that lies on two ranks has two scales. Parameters of fewer
than 4,096 elements keep moments of 32 bits, as with bitsandbytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dsft.engine.api import StateKind
from dsft.engine.base_optimizer import BaseAdam, StateShard
from dsft.model.quantize import bitsandbytes
from dsft.plan.storage import MOMENT_BLOCK, MOMENT_LEAST

KINDS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")
_SLICE = 1 << 14  # blocks that are encoded at once: 16 MiB of values
NOISE_8_BITS = 0.3
"""Largest error of first moments in 8 bits, as `first_step.NOISE`: that of their codes from a thousandth of a
block's largest on."""


class Moments:
    """Both moments of a part: in 8 bits codes (2, size) uint8 and scales (2, blocks) float32, otherwise
    values (2, size) float32."""

    def __init__(self, part: StateShard) -> None:
        self.part, device, self.in_8_bits = part, part.home.device, math.prod(part.shape) >= MOMENT_LEAST
        self.head = min(-part.start % MOMENT_BLOCK, part.size)  # elements of a block that begins before it
        if self.in_8_bits:
            blocks = bool(self.head) + -(-(part.size - self.head) // MOMENT_BLOCK)
            self.codes = torch.zeros(2, part.size, dtype=torch.uint8, device=device)
            self.scales = torch.zeros(2, blocks, device=device)
        else:
            self.values = torch.zeros(2, part.size, device=device)

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yield (elements, blocks) of this part: those of a block that begins before it, if it has such, and
        the rest."""
        if self.head:
            yield slice(0, self.head), slice(0, 1)
        if self.head < self.part.size:
            yield slice(self.head, self.part.size), slice(bool(self.head), None)

    def read(self, kind: int) -> Tensor:
        """Return one of the two, (size,) float32: a copy, or a view of moments in 32 bits."""
        if not self.in_8_bits:
            return self.values[kind]
        code = _maps(self.codes.device)[kind]
        pieces = [
            bitsandbytes(KEY).dequantize_blockwise(
                self.codes[kind, elements],
                absmax=self.scales[kind, blocks],
                code=code,
                blocksize=MOMENT_BLOCK,
            )
            for elements, blocks in self.pieces()
        ]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def write(self, kind: int, values: Tensor) -> None:
        """Set one of the two to values (size,) float32, quantized where it is stored in 8 bits. Values that
        `read` has returned of the same part stay as they are."""
        if not self.in_8_bits:
            self.values[kind].copy_(values)
            return
        code = _maps(self.codes.device)[kind]
        for elements, blocks in self.pieces():
            mine, codes, scales = values[elements], self.codes[kind, elements], self.scales[kind, blocks]
            for first in range(0, len(scales), _SLICE):
                some = slice(first * MOMENT_BLOCK, (first + _SLICE) * MOMENT_BLOCK)
                found, scale = encoded(mine[some].to(codes.device), code)
                codes[some], scales[first : first + _SLICE] = found, scale

    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], step: int) -> None:
        """Make one step with this part of a flat tensor, parameter and gradient (size,)."""
        functional, (beta1, beta2), eps = bitsandbytes(KEY), group["betas"], group["eps"]
        decay, rate = group["weight_decay"], group["lr"]
        if not self.in_8_bits:
            first, second = self.values
            functional.optimizer_update_32bit(
                "adam", gradient, parameter, first, beta1, eps, step, rate, second, beta2, weight_decay=decay
            )
            return
        for elements, blocks in self.pieces():
            functional.optimizer_update_8bit_blockwise(
                "adam", gradient[elements], parameter[elements], *self.codes[:, elements], beta1, beta2, 0.0,
                0.0, eps, step, rate, *_maps(parameter.device), *self.scales[:, blocks], weight_decay=decay,
            )  # fmt: skip


class AdamW8bit(BaseAdam):
    """AdamW with moments in 8 bits, those of the parts of parameters that each of its tensors has; the other
    elements, which pad it, are not changed."""

    noise = NOISE_8_BITS

    def __init__(self, groups: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.parts: dict[Tensor, list[StateShard]] = {}

    def set_parts(self, parts: Mapping[str, StateShard], homes: object, ranks: object) -> None:
        for part in parts.values():
            self.parts.setdefault(part.home, []).append(part)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for home in group["params"]:
                if home.grad is not None:
                    self._step(home, home.grad.reshape(-1), group)

    def _step(self, home: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        if not self.state[home]:
            self.allocate(home, 0)
        state = self.state[home]
        state["step"] += 1
        flat = home.detach().view(-1)
        for moments in state["moments"]:
            here = slice(moments.part.offset, moments.part.offset + moments.part.size)
            moments.update(flat[here], gradient[here], group, state["step"])

    def allocate(self, home: Tensor, steps: int) -> None:
        self.state[home] = {"step": steps, "moments": [Moments(part) for part in self.parts.get(home, ())]}

    def moments(self, shard: StateShard) -> Moments | None:
        """Return the moments that have those of a shard; None before the first step."""
        found: list[Moments] = self.state.get(shard.home, {}).get("moments", [])
        return next((m for m in found if 0 <= shard.offset - m.part.offset < m.part.size), None)

    def reader(self, shard: StateShard, kind: StateKind) -> Callable[[], Tensor] | None:
        moments = self.moments(shard)
        if moments is None:
            return None
        first = shard.offset - moments.part.offset
        return lambda: moments.read(KINDS.index(kind))[first : first + shard.size]

    def write(self, shard: StateShard, kind: StateKind, values: Tensor) -> None:
        moments = self.moments(shard)
        assert moments is not None
        moments.write(KINDS.index(kind), values)


KEY = "optim.name: adamw_8bit"


def encoded(values: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (n,) uint8 of values (n,) float32, and the scales of their blocks.

    The scale is the block's largest absolute value. If a negative value has it, its code is not -1, which
    `code` does not have, but its nearest. Values that were read from 8 bits would then get another scale and
    other codes. So the scale with which all of a block's values are codes is looked for too."""
    blocks = -(-len(values) // MOMENT_BLOCK)
    padded = torch.nn.functional.pad(values, (0, blocks * MOMENT_BLOCK - len(values)))
    padded = padded.view(blocks, MOMENT_BLOCK)
    scales = padded.abs().amax(1)
    codes, exact = _nearest(padded, scales, code)
    if code[0] < 0:
        guess = scales / -code[0]
        for scale in (guess, guess.nextafter(guess * 2), guess.nextafter(guess * 0)):
            rows = (~exact).nonzero()[:, 0]
            again, exact[rows] = _nearest(padded[rows], scale[rows], code)
            found = exact[rows]
            codes[rows[found]], scales[rows[found]] = again[found], scale[rows[found]]
    return codes.view(-1)[: len(values)].to(torch.uint8), scales


def _nearest(values: Tensor, scales: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (n, 256) of values, and for each block (n,) whether they are the values."""
    middles = (code[1:] + code[:-1]) / 2
    codes = torch.bucketize(values / scales.clamp(min=_TINY)[:, None], middles, out_int32=True)
    return codes, (code[codes] * scales[:, None] == values).all(1)


_TINY = torch.finfo(torch.float32).tiny


@functools.cache
def _maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of the 256 codes: of the first moment, and of the second, which has no sign."""
    signed, unsigned = (bitsandbytes(KEY).create_dynamic_map(signed=signed) for signed in (True, False))
    return signed.to(device), unsigned.to(device)
