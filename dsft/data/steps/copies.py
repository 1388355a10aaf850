"""Copies between the host and a GPU for which the host does not wait: takes tensors, gives tensors.

A copy is asynchronous where the host's side is page-locked memory; from other memory it waits for the stream.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; what is on the host goes to a GPU through page-locked memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy `tensor` to the host, into page-locked memory. What is returned waits until the copy is
    there, and gives it."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    is_there = torch.Event(tensor.device)
    is_there.record(torch.cuda.current_stream(tensor.device))

    def wait() -> Tensor:
        is_there.synchronize()
        return copy

    return wait
