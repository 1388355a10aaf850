"""Compute an adapted linear layer, W x + s B A x, with the factor s on the product with A and the sum inside
the product with B.

peft multiplies and adds whole outputs, in the forward and again in the backward: with adapters on all layers
of 8 billion parameters 61 of 575 ms of a step on an H200 (docs/gpu.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from dsft.model.names import ADAPTER


def sum_in_product(layer: Any) -> None:
    """Change one of peft's adapted layers, which is no DoRA's, in place."""
    cls: Any = type(layer)
    layer.__class__ = _summed(cls)
    layer.lora_B[ADAPTER].__class__ = SummedLinear


class SummedLinear(nn.Linear):
    """B of an adapter. It adds its product to the output of the layer that it adapts."""

    def forward(self, input: Tensor, output: Tensor) -> Tensor:  # type: ignore[override]
        """Return output + input Bᵀ, in the shape of `output` (…, out); input: (…, rank)."""
        found: Tensor = _Sum.apply(input.flatten(0, -2), output.flatten(0, -2), self.weight)
        return found.view_as(output)


class _Sum(torch.autograd.Function):
    """addmm that saves the weight as it is, not transposed: ZeRO 3 can then release it until the backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, output: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(input, weight)
        return torch.addmm(output, input, weight.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        [upstream], (input, weight) = gradients, ctx.saved_tensors
        return upstream @ weight, upstream, upstream.t() @ input


@cache
def _summed(cls: Any) -> type[Any]:
    """Return a subclass of peft's `cls` that computes the same with `SummedLinear`."""
    plain = cls.forward

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.disable_adapters or self.merged:
            return plain(self, x, *args, **kwargs)
        output = self.base_layer(x, *args, **kwargs)
        scaled = self.lora_A[ADAPTER](self.lora_dropout[ADAPTER](x)) * self.scaling[ADAPTER]
        return self.lora_B[ADAPTER](scaled, output)

    return type(f"Summed{cls.__name__}", (cls,), {"forward": forward})
