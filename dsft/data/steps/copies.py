"""Copy tensors between host and GPU asynchronously.

A copy is asynchronous only if the host's side is pinned memory; otherwise it waits for the stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; a copy from the host to a GPU goes through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy `tensor` to pinned memory of the host. Return a function that waits for the
    copy and then returns it."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    is_there = torch.Event(tensor.device)
    is_there.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        is_there.synchronize()
        return copy

    return wait
