"""Keep the inputs of checkpointed layers in pinned host memory until the backward pass.

transformers uses torch's `save_on_cpu`, which copies on the stream that computes, so each layer waits for its
copies. Here they have a stream of their own: a layer's inputs leave the GPU while the layer is computed, and
return while the layer behind it is recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel


def offload_activations(causal_lm: PreTrainedModel) -> None:
    """Let the layers of `causal_lm`, for which checkpointing is enabled, keep their inputs in host memory."""
    copies = _Copies()
    for module in causal_lm.modules():
        checkpoint: Any = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None:
            wrapped: Any = copies.around(checkpoint)
            module._gradient_checkpointing_func = wrapped


class _Inputs:
    """The tensors that one call of a layer saves. The graph owns them.

    before   those of the call before, which the backward needs next
    left     event after the copies to the host
    arrived  event after the copies to the device
    buffers  memory of on_host, which goes back to `free`
    """

    def __init__(self, before: weakref.ref[_Inputs] | None, free: list[Tensor]) -> None:
        self.before = before
        self.on_device: list[Tensor] = []
        self.on_host: list[Tensor] = []
        self.left: torch.cuda.Event | None = None
        self.arrived: torch.cuda.Event | None = None
        self.buffers: list[Tensor] = []
        self._free = free

    def __del__(self) -> None:
        self._free.extend(self.buffers)


class _Copies:
    """Copies on a stream of their own. Memory of the device is allocated and freed on the stream that
    computes, which waits for a copy before it frees or reads what was copied. Buffers of the host are used
    again as soon as the graph is freed, since all copies are in the order of one stream."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._last: weakref.ref[_Inputs] | None = None
        self._free: list[Tensor] = []

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Return `checkpoint` (of torch.utils.checkpoint), with the inputs that it saves in host memory."""

        def offloaded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return checkpoint(function, *args, **kwargs)
            inputs = self._begin()
            with saved_tensors_hooks(lambda tensor: self._leave(inputs, tensor), self._saved):
                return checkpoint(function, *args, **kwargs)

        return offloaded

    def _begin(self) -> _Inputs:
        """Free the inputs of the call before this one on the device, once they are copied."""
        last = None if self._last is None else self._last()
        if last is not None and last.left is not None:
            torch.cuda.current_stream().wait_event(last.left)
            last.on_device.clear()
        inputs = _Inputs(self._last, self._free)
        self._last = weakref.ref(inputs)
        return inputs

    def _leave(self, inputs: _Inputs, tensor: Tensor) -> Any:
        """Start the copy of `tensor` to the host. Return its place in `inputs`; the tensor itself if it is on
        the host already."""
        if not tensor.is_cuda:
            return tensor
        inputs.buffers.append(self._buffer(tensor.nbytes))
        host = inputs.buffers[-1][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        inputs.left = self._copied([(host, tensor.detach())])
        inputs.on_host.append(host)
        inputs.on_device.append(tensor.detach())
        return inputs, len(inputs.on_host) - 1

    def _buffer(self, size: int) -> Tensor:
        """Return the smallest free buffer of at least `size` bytes, or a new one in place of a free one."""
        fitting = [(len(buffer), number) for number, buffer in enumerate(self._free) if len(buffer) >= size]
        if fitting:
            return self._free.pop(min(fitting)[1])
        del self._free[-1:]
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _saved(self, packed: Any) -> Tensor:
        """Return a saved tensor, on its device, and let those of the call before return."""
        if isinstance(packed, Tensor):
            return packed
        inputs, number = packed
        self._return(inputs)
        if inputs.arrived is not None:
            torch.cuda.current_stream().wait_event(inputs.arrived)
        before = None if inputs.before is None else inputs.before()
        if before is not None:
            self._return(before)
        tensor: Tensor = inputs.on_device[number]
        return tensor

    def _return(self, inputs: _Inputs) -> None:
        """Start the copies to the device, unless they are there."""
        if not inputs.on_device:
            inputs.on_device = [torch.empty_like(host, device="cuda") for host in inputs.on_host]
            inputs.arrived = self._copied(list(zip(inputs.on_device, inputs.on_host, strict=True)))

    def _copied(self, pairs: list[tuple[Tensor, Tensor]]) -> torch.cuda.Event:
        """Copy to the first of each pair from the second after what is computed so far. Return the event
        after these copies."""
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for to, of in pairs:
                to.copy_(of, non_blocking=True)
        return self._stream.record_event()
