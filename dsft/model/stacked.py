"""Compute the experts of a mixture whose weights are stored in 4 bits, or have adapters.

transformers stores the weights of all experts of a layer in two parameters, (experts, out, in), and
multiplies the tokens, sorted by expert, with all of them at once (`grouped_mm_experts_forward`). Here the
same is computed with weights in 4 bits, whole only while their product is computed, in the forward and again
in the backward; and with adapters each expert's W x + s B A x. Where grouped products are not possible
(`choose_experts`), or the rank is no multiple of `ALIGNED`, expert by expert.

peft has the same adapters (`LoraConfig.target_parameters`), with A of all experts as one matrix (experts ×
rank, in) and B as (out, rank × experts), and adds B·A to the weights before their product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsft.errors import Problem, SpecError
from dsft.model.experts import ALIGNED, stacks
from dsft.model.quantize import dequantized
from dsft.plan.storage import Form
from dsft.spec.schema import Model


def stack(experts: nn.Module) -> StackedExperts:
    """Make a module of transformers' experts one of these, in place."""
    if not isinstance(experts, StackedExperts):
        shapes, cls = stacks(experts), type(experts)
        experts.__class__ = _stacked(cls)  # type: ignore[arg-type]
        assert isinstance(experts, StackedExperts)
        experts.shapes, experts.forms, experts.scale = shapes, {}, 0.0
    return experts


@cache
def _stacked(cls: Any) -> type[Any]:
    return type(f"Stacked{cls.__name__}", (StackedExperts, cls), {})


class StackedExperts(nn.Module):
    """Mixed in before one of transformers' classes of experts.

    shapes  (experts, out, in) of the weights, by their names
    forms   of those that are stored in 4 bits
    scale   of B·A; the factors of the weight NAME are the parameters NAME_lora_A, (experts, rank, in), and
            NAME_lora_B, (experts, out, rank)
    """

    shapes: dict[str, tuple[int, ...]]
    forms: dict[str, Form]
    scale: float
    _disable_adapters = False  # as in peft's layers

    def adapt(self, names: Collection[str], rank: int, scale: float) -> None:
        """Add adapters of these weights, on the meta device."""
        self.scale = scale
        for name in names:
            experts, rows, columns = self.shapes[name]
            for factor, shape in (("A", (experts, rank, columns)), ("B", (experts, rows, rank))):
                self.register_parameter(
                    f"{name}_lora_{factor}", nn.Parameter(torch.empty(shape, device="meta"))
                )

    @property
    def adapted(self) -> list[str]:
        """The names of the weights that have adapters, in the order in which peft wraps them."""
        return [name for name in self.shapes if f"{name}_lora_A" in self._parameters]

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (tokens, hidden) of hidden states of this shape, the experts of each token (tokens, top_k),
        and their weights (tokens, top_k)."""
        experts, order = top_k_index.flatten().sort(stable=True)
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        inputs = hidden_states[order // top_k_index.shape[1]]
        up = self._product(inputs, ends, "gate_up_proj" if self.has_gate else "up_proj")
        between = self._apply_gate(up) if self.has_gate else self.act_fn(up)
        outputs = self._product(between, ends, "down_proj")
        if getattr(self, "has_post_expert_norm", False):  # which transformers 5.17 lacks
            outputs = self.post_expert_norm(outputs)
        weighted = outputs * top_k_weights.flatten()[order, None]
        in_order = torch.empty_like(weighted).index_copy(0, order, weighted)
        return in_order.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def _product(self, inputs: Tensor, ends: Tensor, name: str) -> Tensor:
        factors: list[Tensor | None] = [None, None]
        if name in self.adapted and not self._disable_adapters:
            factors = [self._parameters[f"{name}_lora_{factor}"] for factor in "AB"]
        product: Tensor = _Product.apply(inputs, ends, self, name, *factors)
        return product

    def of_weight(self, inputs: Tensor, ends: Tensor, name: str, turned: bool) -> Tensor:
        """Return the products (n, out) of inputs (n, in), sorted by expert, with each one's weight of this
        name; turned: (n, in) of (n, out). ends: (experts,) int32, where each expert's rows end."""
        weight, form, shape = self._parameters[name], self.forms.get(name), self.shapes[name]
        assert weight is not None
        if form is None:
            return self.multiply(inputs, ends, weight.detach(), turned)
        if self.is_grouped(inputs):
            return _grouped(inputs, ends, dequantized(weight.detach(), form, shape), turned)
        each = weight.detach().view(shape[0], -1)
        return _one_by_one(inputs, ends, lambda n: dequantized(each[n], form, shape[1:]), shape, turned)

    def multiply(self, inputs: Tensor, ends: Tensor, weights: Tensor, turned: bool) -> Tensor:
        """Return the same for weights (experts, out, in)."""
        if self.is_grouped(inputs) and not any(width % ALIGNED for width in weights.shape[1:]):
            return _grouped(inputs, ends, weights, turned)
        return _one_by_one(inputs, ends, weights.__getitem__, weights.shape, turned)

    def outer(self, left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
        """Return the sums over each expert's rows of the outer products of (n, a) and (n, b): (experts, a,
        b)."""
        if self.is_grouped(left) and not (left.shape[1] % ALIGNED or right.shape[1] % ALIGNED):
            return F.grouped_mm(left.t(), right, offs=ends)
        found = left.new_zeros(len(ends), left.shape[1], right.shape[1])
        for expert, begin, end in _rows(ends):
            torch.mm(left[begin:end].t(), right[begin:end], out=found[expert])
        return found

    def is_grouped(self: Any, inputs: Tensor) -> bool:
        """Whether products with all experts at once are chosen, and torch has them on this device."""
        is_chosen: bool = self.config._experts_implementation == "grouped_mm"
        return is_chosen and not (inputs.is_cuda and torch.cuda.get_device_capability(inputs.device)[0] < 8)


def _grouped(inputs: Tensor, ends: Tensor, weights: Tensor, turned: bool) -> Tensor:
    return F.grouped_mm(inputs, weights if turned else weights.transpose(1, 2), offs=ends)


def _one_by_one(
    inputs: Tensor, ends: Tensor, weight_of: Callable[[int], Tensor], shape: tuple[int, ...], turned: bool
) -> Tensor:
    found = inputs.new_zeros(len(inputs), shape[2 if turned else 1])
    for expert, begin, end in _rows(ends):
        weight = weight_of(expert)
        torch.mm(inputs[begin:end], weight if turned else weight.t(), out=found[begin:end])
    return found


def _rows(ends: Tensor) -> list[tuple[int, int, int]]:
    """Return number and rows, from begin to end, of each expert that has any."""
    last = ends.tolist()
    return [row for row in zip(range(len(last)), [0, *last], last, strict=False) if row[1] < row[2]]


class _Product(torch.autograd.Function):
    """The product with frozen weights of all experts, and with their adapters if there are any. Of the
    weights it saves nothing: ZeRO 3 gathers the module again for the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        ends: Tensor,
        experts: StackedExperts,
        name: str,
        a: Tensor | None,
        b: Tensor | None,
    ) -> Tensor:
        ctx.ends, ctx.experts, ctx.name = ends, experts, name
        product = experts.of_weight(inputs, ends, name, turned=False)
        if a is not None and b is not None:
            inner = experts.multiply(inputs, ends, a, turned=False) * experts.scale
            product += experts.multiply(inner, ends, b, turned=False)
            ctx.save_for_backward(inputs, inner, a, b)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        upstream, experts, ends, of_a, of_b = gradients[0].contiguous(), ctx.experts, ctx.ends, None, None
        found = experts.of_weight(upstream, ends, ctx.name, turned=True)
        if saved := ctx.saved_tensors:
            inputs, inner, a, b = saved
            of_b = experts.outer(upstream, inner, ends)
            of_inner = experts.multiply(upstream, ends, b, turned=True) * experts.scale
            of_a = experts.outer(of_inner, inputs, ends)
            found += experts.multiply(of_inner, ends, a, turned=True)
        return found, None, None, None, of_a, of_b


def check_stacked(causal_lm: nn.Module, model: Model) -> None:
    """Raise SpecError where experts in 4 bits or with adapters would not be computed as the spec says."""
    if not any(isinstance(module, StackedExperts) for module in causal_lm.modules()):
        return
    for key, value, other in (
        ("model.compile", model.compile, "false"),
        ("model.experts.implementation", model.experts.implementation == "batched_mm", "auto"),
    ):
        if value:
            message = f"is not supported for experts in 4 bits or with adapters; set it to {other}"
            raise SpecError("The experts cannot be trained so.", [Problem(key, message)])


LORA_A, LORA_B, INNER = ".lora_A.weight", ".lora_B.weight", ".base_layer"


def _is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and name.endswith((LORA_A, LORA_B))


def peft_name(name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return peft's name of a tensor of an adapter. For the adapters of experts, whose shapes have three
    dimensions, peft wraps the module once for each weight, the last one, down_proj, outside. shapes: of all
    tensors, by their names here."""
    if not _is_stacked(name, shapes.get(name, ())):
        return name
    path, factor = name[: -len(LORA_A)], name[-len(LORA_A) :]
    module, _, weight = path.rpartition(".")
    is_inner = weight != "down_proj" and f"{module}.down_proj{factor}" in shapes
    return f"{module}{INNER if is_inner else ''}{factor}"


def peft_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that peft gives a tensor of an adapter."""
    if not _is_stacked(name, shape):
        return shape
    experts, rows, columns = shape
    return (experts * rows, columns) if name.endswith(LORA_A) else (rows, columns * experts)


def to_peft(name: str, value: Tensor) -> Tensor:
    """Return peft's form of a tensor of an adapter: A as (experts × rank, in), B as (out, rank × experts)."""
    if not _is_stacked(name, value.shape):
        return value
    return value.flatten(0, 1) if name.endswith(LORA_A) else value.permute(1, 2, 0).flatten(1)


def from_peft(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of an adapter of this shape from peft's form."""
    if not _is_stacked(name, shape) or name.endswith(LORA_A):
        return value.view(shape)
    return value.view(*shape[1:], shape[0]).permute(2, 0, 1)
