"""Compute the experts of a mixture whose weights are stored in 4 bits.

transformers stores the weights of all experts of a layer in two parameters, (experts, out, in), and
multiplies the tokens, sorted by expert, with all of them at once (`grouped_mm_experts_forward`). Here the
same is computed with weights that are whole only while their product is computed, in the forward and again in
the backward; expert by expert where `choose_experts` has chosen another implementation.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsft.model.quantize import dequantized
from dsft.plan.storage import Form


def stack(experts: nn.Module, forms: dict[str, Form]) -> None:
    """Make a module of experts one of which these parameters are, or will be, stored in 4 bits, in place.
    forms: by the parameter's name in it."""
    shapes = {name: tuple(experts.get_parameter(name).shape) for name in forms}
    cls: Any = type(experts)
    experts.__class__ = _stacked(cls)
    assert isinstance(experts, StackedExperts)
    experts.forms, experts.shapes = forms, shapes


@cache
def _stacked(cls: Any) -> type[Any]:
    return type(f"Stacked{cls.__name__}", (StackedExperts, cls), {})


class StackedExperts(nn.Module):
    """Mixed in before one of transformers' classes of experts. forms: of the parameters that are stored in 4
    bits, by name; shapes: (experts, out, in) of these."""

    forms: dict[str, Form]
    shapes: dict[str, tuple[int, ...]]

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (tokens, hidden) of hidden states of this shape, the experts of each token (tokens, top_k),
        and their weights (tokens, top_k)."""
        experts, order = top_k_index.flatten().sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        inputs = hidden_states[order // top_k_index.shape[1]]
        up = _Product.apply(inputs, ends, self, "gate_up_proj" if self.has_gate else "up_proj")
        between = self._apply_gate(up) if self.has_gate else self.act_fn(up)
        outputs = _Product.apply(between, ends, self, "down_proj")
        if getattr(self, "has_post_expert_norm", False):  # which transformers 5.17 lacks
            outputs = self.post_expert_norm(outputs)
        weighted = outputs * top_k_weights.flatten()[order, None]
        in_order = torch.empty_like(weighted).index_copy(0, order, weighted)
        return in_order.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def product(self: Any, inputs: Tensor, ends: Tensor, name: str, turned: bool) -> Tensor:
        """Return the products (n, out) of inputs (n, in), sorted by expert, with each one's weight of this
        name; turned: (n, in) of (n, out). ends: (experts,) int32, where each expert's rows end."""
        weight, form = self._parameters[name].detach(), self.forms.get(name)
        shape = self.shapes.get(name, weight.shape)
        if self.config._experts_implementation == "grouped_mm":
            whole = weight if form is None else dequantized(weight, form, shape)
            return F.grouped_mm(inputs, whole if turned else whole.transpose(1, 2), offs=ends)
        found = inputs.new_zeros(len(inputs), shape[2 if turned else 1])
        begin = 0
        for one, end in zip(weight.view(shape[0], -1), ends.tolist(), strict=True):
            if begin < end:
                whole = one.view(shape[1:]) if form is None else dequantized(one, form, shape[1:])
                torch.mm(inputs[begin:end], whole if turned else whole.t(), out=found[begin:end])
            begin = end
        return found


class _Product(torch.autograd.Function):
    """The product with frozen weights of all experts. Saves nothing: ZeRO 3 gathers the module again for the
    backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, ends: Tensor, experts: StackedExperts, name: str) -> Tensor:
        ctx.ends, ctx.experts, ctx.name = ends, experts, name
        return experts.product(inputs, ends, name, turned=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return (
            ctx.experts.product(gradients[0].contiguous(), ctx.ends, ctx.name, turned=True),
            None,
            None,
            None,
        )
