# ruff: noqa: E402  the packages are looked for before torch is imported, as train.py does
"""Runs over the stand-in GPU in numbers mode: plants faults in a forward and backward pass and tells what was
found."""

from __future__ import annotations

import sys
from typing import Any

from dsft.system.packages import check_packages

check_packages()

import torch

from tests.standin.inside import counted, peak, report, waits


def loss(weights: Any, rows: Any, mask: Any) -> Any:
    return (rows @ weights).log_softmax(-1).masked_fill(mask, 0.0).sum()


def left_on_cpu(weights: Any, rows: Any, mask: Any) -> Any:
    return loss(weights, rows, mask.cpu())


def waited_for(weights: Any, rows: Any, mask: Any) -> Any:
    value = loss(weights, rows, mask)
    value.item()  # the planted wait
    return value


def tried(planted: Any) -> dict[str, Any]:
    """Return the error's first line or None, where the host waited, what was counted, the gradient's sum."""
    torch.manual_seed(0)
    weights = torch.randn(8, 16).cuda().requires_grad_()
    rows, mask = torch.randn(4, 8).cuda(), (torch.arange(16) % 3 == 0).cuda().expand(4, 16)
    with waits(within="finding_worker") as places, counted() as counts:
        try:
            planted(weights, rows, mask).backward()
        except RuntimeError as error:
            return {"error": str(error).splitlines()[0]}
    return {"error": None, "waits": places, "counts": counts, "gradient": weights.grad.double().sum().item()}


def memory() -> dict[str, Any]:
    """Peaks of what no host holds: 8 GiB of weights, and as much again within; then more than there is."""
    weights = torch.empty(4 << 30, dtype=torch.bfloat16, device="cuda")
    with peak() as found:
        weights + weights
    try:
        torch.empty(32 << 30, dtype=torch.bfloat16, device="cuda")
    except torch.OutOfMemoryError as error:
        return found | {"refused": str(error).splitlines()[0]}
    return found


if __name__ == "__main__":
    passes = (loss, left_on_cpu, waited_for)
    report(memory() if sys.argv[1] == "memory" else {planted.__name__: tried(planted) for planted in passes})
