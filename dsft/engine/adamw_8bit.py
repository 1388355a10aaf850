"""AdamW whose moments are stored in 8 bits, by bitsandbytes (Dettmers et al. 2022, arXiv 2110.02861).

256 elements in a row of a parameter are a block: a code of 8 bits each, and one float32 scale. DeepSpeed
gives the optimizer flat tensors of several parameters, or a rank's part of one. The blocks are the
parameters' own here, as without ZeRO; only one that lies on two ranks has two scales. Parameters of fewer
than 4,096 elements keep moments of 32 bits, as with bitsandbytes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dsft.model.quantize import bitsandbytes
from dsft.plan.storage import MOMENT_BLOCK, MOMENT_LEAST

KINDS: tuple[Literal["exp_avg", "exp_avg_sq"], ...] = ("exp_avg", "exp_avg_sq")
_SLICE = 1 << 14  # blocks that are encoded at once: 16 MiB of values


@dataclass(frozen=True)
class Part:
    """The elements of one parameter in a flat tensor.

    start   index of the first in the flattened parameter
    offset  index of the first in the flat tensor
    size    their number
    numel   number of elements of the whole parameter
    """

    start: int
    offset: int
    size: int
    numel: int

    @property
    def in_8_bits(self) -> bool:
        return self.numel >= MOMENT_LEAST

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Yield (elements, blocks) of this part: those of a block that begins before it, if it has such, and
        the rest."""
        head = min(-self.start % MOMENT_BLOCK, self.size)
        if head:
            yield slice(0, head), slice(0, 1)
        if head < self.size:
            yield slice(head, self.size), slice(bool(head), None)

    @property
    def blocks(self) -> int:
        head = min(-self.start % MOMENT_BLOCK, self.size)
        return bool(head) + -(-(self.size - head) // MOMENT_BLOCK)


class Moments:
    """Both moments of a part: in 8 bits codes (2, size) uint8 and scales (2, blocks) float32, otherwise
    values (2, size) float32."""

    def __init__(self, part: Part, device: torch.device) -> None:
        self.part = part
        if part.in_8_bits:
            self.codes = torch.zeros(2, part.size, dtype=torch.uint8, device=device)
            self.scales = torch.zeros(2, part.blocks, device=device)
        else:
            self.values = torch.zeros(2, part.size, device=device)

    def read(self, kind: int) -> Tensor:
        """Return one of the two, (size,) float32: a copy, or a view of moments in 32 bits."""
        if not self.part.in_8_bits:
            return self.values[kind]
        code = _maps(self.codes.device)[kind]
        pieces = [
            bitsandbytes(KEY).dequantize_blockwise(
                self.codes[kind, elements],
                absmax=self.scales[kind, blocks],
                code=code,
                blocksize=MOMENT_BLOCK,
            )
            for elements, blocks in self.part.pieces()
        ]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def write(self, kind: int, values: Tensor) -> None:
        """Set one of the two to values (size,) float32, quantized where it is stored in 8 bits. Values that
        `read` has returned of the same part stay as they are."""
        if not self.part.in_8_bits:
            self.values[kind].copy_(values)
            return
        code = _maps(self.codes.device)[kind]
        for elements, blocks in self.part.pieces():
            mine, codes, scales = values[elements], self.codes[kind, elements], self.scales[kind, blocks]
            for first in range(0, len(scales), _SLICE):
                some = slice(first * MOMENT_BLOCK, (first + _SLICE) * MOMENT_BLOCK)
                found, scale = encoded(mine[some].to(codes.device), code)
                codes[some], scales[first : first + _SLICE] = found, scale

    def update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any], step: int) -> None:
        """Make one step with this part of a flat tensor, parameter and gradient (size,)."""
        functional, (beta1, beta2), eps = bitsandbytes(KEY), group["betas"], group["eps"]
        decay, rate = group["weight_decay"], group["lr"]
        if not self.part.in_8_bits:
            first, second = self.values
            functional.optimizer_update_32bit(
                "adam", gradient, parameter, first, beta1, eps, step, rate, second, beta2, weight_decay=decay
            )
            return
        for elements, blocks in self.part.pieces():
            functional.optimizer_update_8bit_blockwise(
                "adam", gradient[elements], parameter[elements], *self.codes[:, elements], beta1, beta2, 0.0,
                0.0, eps, step, rate, *_maps(parameter.device), *self.scales[:, blocks], weight_decay=decay,
            )  # fmt: skip


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits. `parts` must be set before the first step: the parts of parameters that
    each of its tensors has; the others, which pad it, are not changed."""

    parts: Mapping[Tensor, Iterable[Part]]

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.parts = {}

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
        """Set the moments of a tensor to zeros, as after `steps` steps."""
        parts = self.parts.get(home, ())
        self.state[home] = {"step": steps, "moments": [Moments(part, home.device) for part in parts]}

    def moments(self, home: Tensor, offset: int) -> Moments | None:
        """Return the moments of the part with the element `offset` of a tensor; None before the first
        step."""
        found: list[Moments] = self.state.get(home, {}).get("moments", [])
        return next((m for m in found if 0 <= offset - m.part.offset < m.part.size), None)


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
