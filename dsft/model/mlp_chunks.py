"""Compute the MLPs of checkpointed layers in chunks of rows (tokens), so that what is inside an MLP never
exists for all tokens at once.

An MLP is found by its form, since each architecture has a name of its own for it: a child of a layer that
takes hidden states alone and consists of linear layers. The experts of a mixture are left as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from dsft.errors import Problem, SpecError
from dsft.model.experts import ROUTERS
from dsft.spec.schema import Model

CHUNKED = "dsft_chunked"
"""Attribute of the class of an MLP that is computed in chunks."""


def mlps_of(causal_lm: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the MLPs that can be computed in chunks, by name: children of a layer whose forward takes one
    tensor and nothing else, with at least two matrices, all of linear layers, of which one takes hidden
    states and one returns them, and no router."""
    width = causal_lm.config.get_text_config().hidden_size
    return {
        f"{name}.{child}": module
        for name, layer in causal_lm.named_modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for child, module in layer.named_children()
        if _is_mlp(module, width)
    }


def _is_mlp(module: nn.Module, width: int) -> bool:
    parts = list(module.modules())
    matrices = [part for part in parts if any(p.ndim > 1 for p in part.parameters(recurse=False))]
    ends = [_ends(part) for part in matrices]
    kinds = [parameter.kind for parameter in inspect.signature(module.forward).parameters.values()]
    return (
        len(matrices) > 1
        and None not in ends
        and {width} <= {end and end[0] for end in ends} & {end and end[1] for end in ends}
        and kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD]
        and not any(hasattr(part, router) for part in parts for router in ROUTERS)
    )


def _ends(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a linear layer's input and output; None for other modules."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else None


def check_layers(causal_lm: PreTrainedModel, model: Model) -> None:
    """Raise SpecError where model.mlp_chunks has nothing to compute in chunks, and where
    model.gradient_checkpointing has fewer layers than it takes one of."""
    every, layers = model.gradient_checkpointing, causal_lm.config.num_hidden_layers
    if isinstance(every, int) and every > layers:
        message = f"{every} is more than the model's {layers} layers; write true, or a number up to {layers}"
        raise SpecError("The model cannot be trained.", [Problem("model.gradient_checkpointing", message)])
    chunks, kind = model.mlp_chunks or 1, causal_lm.config.model_type
    if chunks > 1 and not mlps_of(causal_lm):
        message = f"{chunks} has no effect, since this {kind} model has no dense MLP in its layers; "
        message += "leave it out"
        raise SpecError("The model cannot be trained.", [Problem("model.mlp_chunks", message)])


def chunk_mlps(causal_lm: PreTrainedModel, chunks: int, tokens: int | None = None) -> None:
    """Let the MLPs of checkpointed layers compute `tokens` rows in `chunks` chunks, and fewer rows in fewer
    chunks of the same size; without `tokens` any number of rows in so many. Parameters and names stay."""
    for name, module in mlps_of(causal_lm).items():
        if not causal_lm.get_submodule(name.rpartition(".")[0]).gradient_checkpointing:
            continue
        cls = type(module)
        members = {"forward": _forward_of(cls, chunks, tokens), CHUNKED: chunks}
        module.__class__ = type(f"Chunked{cls.__name__}", (cls,), members)


def is_chunked(module: nn.Module) -> bool:
    return hasattr(type(module), CHUNKED)


def _forward_of(cls: type[nn.Module], chunks: int, tokens: int | None) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Return the MLP's output (…, H) for hidden states (…, H)."""
        rows = hidden_states.flatten(0, -2)
        mlp = _Mlp(lambda part: cls.forward(self, part), -(-(tokens or len(rows)) // chunks))
        if not torch.is_grad_enabled():
            return mlp.forward(rows).view(*hidden_states.shape[:-1], -1)
        trained = [p for p in self.parameters() if p.requires_grad]
        saved = _Saved.apply(rows.new_empty(0, requires_grad=True), rows).grad_fn
        output: Tensor = _InChunks.apply(rows, mlp, saved, *trained)
        return output.view(*hidden_states.shape[:-1], -1)

    return forward


class _Mlp:
    """An MLP and the number of rows of a chunk. It keeps the state of the random numbers, so that dropout in
    the backward pass draws those of the forward pass."""

    def __init__(self, call: Callable[[Tensor], Tensor], size: int) -> None:
        self._call, self._size = call, size

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output (n, H) of rows (n, H)."""
        self._random = torch.get_rng_state(), get_device_states(rows)
        return torch.cat([self._call(part) for part in rows.split(self._size)])

    def gradients(
        self, rows: Tensor, upstream: Tensor, by_rows: bool, trained: list[nn.Parameter]
    ) -> list[Tensor | None]:
        """Return the gradients by the rows, None unless `by_rows`, and by the parameters, which are added up
        in float32 at least."""
        found: list[Tensor | None] = [torch.empty_like(rows) if by_rows else None]
        sums: list[Tensor | None] = [None] * len(trained)
        with torch.enable_grad(), self._random_numbers():
            for begin in range(0, len(rows), self._size):
                here = slice(begin, begin + self._size)
                part = rows[here].detach().requires_grad_(by_rows)
                inputs = [part, *trained] if by_rows else trained
                own = list(torch.autograd.grad(self._call(part), inputs, upstream[here], allow_unused=True))
                if found[0] is not None:
                    found[0][here] = own.pop(0)
                sums = [_added(total, gradient) for total, gradient in zip(sums, own, strict=True)]
                del own  # else they would be in memory beside those of the next chunk
        return found + [
            None if total is None else total.to(p.dtype) for total, p in zip(sums, trained, strict=True)
        ]

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        state, (devices, states) = self._random
        with torch.random.fork_rng(devices):
            torch.set_rng_state(state)
            set_device_states(devices, states)
            yield


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) if total is None else total.add_(gradient)


class _Saved(torch.autograd.Function):
    """Saves the rows for the backward pass before the MLP computes anything. The recomputation of a
    checkpointed layer ends with the last tensor that was saved, so where nothing after the MLP saves any, the
    layer is recomputed only up to the MLP."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return torch.empty_like(empty)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("nothing is computed from its output")


class _InChunks(torch.autograd.Function):
    """Computes an MLP chunk by chunk without a graph; the backward pass computes each chunk again. All
    parameters are inputs, so each gets one gradient for all chunks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mlp: _Mlp, saved: Any, *trained: nn.Parameter) -> Tensor:
        ctx.mlp, ctx.saved, ctx.trained = mlp, saved, list(trained)
        return mlp.forward(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved.saved_tensors
        ctx.saved = None  # no backward frees it, nor the layer's input, which the checkpoint keeps for it
        by_rows, *by_parameters = ctx.mlp.gradients(rows, upstream, ctx.needs_input_grad[0], ctx.trained)
        return by_rows, None, None, *by_parameters
