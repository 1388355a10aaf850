"""Compute the softmax part of the output layer: from the product of a chunk of hidden states and the weight,
the targets' log-probabilities and the gradient by the product.

There are two implementations: torch's operations, here, and a Triton kernel for GPUs, in softmax_kernel.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsft.model.products import room_of


@dataclass(frozen=True)
class Shaping:
    """What a model does with its output layer's product: z = scale × product, then softcap × tanh(z ÷
    softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        """Return the logits, at least float32; differentiable."""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the shaped logits by the product."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


@dataclass(frozen=True)
class Softmax:
    """The softmax part by torch's operations, on any device.

    With smoothing s, a row's value is (1 - s) × z_target + s × mean(z) - log Σ exp(z), whose gradient by z is
    (1 - s) × one_hot + s ÷ V - softmax(z).
    """

    shaping: Shaping = Shaping()
    smoothing: float = 0.0

    keeps_gradient: ClassVar[bool] = True
    """Whether `values` can keep the gradient of a row, of one value, which the upstream gradient scales."""
    num_stats: ClassVar[int] = 2
    """Of a row's statistics: the maximum of z and Σ exp(z - maximum)."""

    def num_values(self, targets: Tensor) -> tuple[int, ...]:
        """Return the shape of what `values` returns for each target."""
        return ()

    def values(
        self, product: Tensor, targets: Tensor, dtype: torch.dtype, stored: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute from a product (n, V), which is overwritten, and targets (n,): the log-probabilities (n,);
        the statistics of each row, (n, 2); the gradient of the log-probabilities
        with respect to the product, (n, V) in `dtype`. stored (k, V): if given, the gradient is computed for
        the first k rows only, written to it and returned."""
        logits = self.shaping(product)
        values, rows = self._of_targets(logits, targets), len(product) if stored is None else len(stored)
        slope = self.shaping.slope(logits[:rows])
        stats = normalize_(logits)
        columns = targets[:rows, None]
        gradient = self._gradient(logits[:rows], columns, torch.ones_like(columns), product.shape[1])
        if not is_one(slope):
            gradient.mul_(slope)
        logps = values - log_sum(stats)
        return logps, stats, _of_type(gradient, dtype, product) if stored is None else stored.copy_(gradient)

    def gradient(
        self,
        product: Tensor,
        targets: Tensor,
        stats: Tensor,
        upstream: Tensor,
        vocabulary: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the gradient by the product, (n, v) in `dtype`, for an upstream gradient (n,) of the
        log-probabilities. product (n, v), which is overwritten, has v columns of the whole vocabulary;
        targets (n,) are counted from the first of these; stats (n, 2): from `values`."""
        logits = self.shaping(product)
        slope = self.shaping.slope(logits)
        top, total = stats.split(1, dim=1)
        columns = targets[:, None]
        inside = (columns >= 0) & (columns < product.shape[1])
        logits.sub_(top).exp_().div_(total)
        gradient = self._gradient(logits, columns.clamp(0, product.shape[1] - 1), inside, vocabulary)
        if not is_one(slope):
            gradient.mul_(slope)
        return _of_type(gradient.mul_(upstream[:, None]), dtype, product)

    def _of_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return (1 - s) × z_target + s × mean(z), (n,)."""
        chosen = logits.gather(1, targets[:, None]).squeeze(1)
        return chosen if not self.smoothing else torch.lerp(chosen, logits.mean(1), self.smoothing)

    def _gradient(self, probabilities: Tensor, columns: Tensor, shares: Tensor, vocabulary: int) -> Tensor:
        """Return the gradient by z, in place of `probabilities` (n, v). columns, shares: (n, 1), the target's
        column, and how much of the target is in these columns."""
        gradient = probabilities.neg_()
        if self.smoothing:
            gradient.add_(self.smoothing / vocabulary)
        return gradient.scatter_add_(1, columns, shares.to(gradient.dtype) * (1.0 - self.smoothing))


def normalize_(logits: Tensor) -> Tensor:
    """Turn (n, V) logits into probabilities in place; return their maximum and Σ exp(z - maximum), (n, 2).
    These stay separate, since the rounding of a large log-sum would carry over to every probability."""
    top = logits.amax(1, keepdim=True)
    total = logits.sub_(top).exp_().sum(1, keepdim=True)
    logits.div_(total)
    return torch.cat((top, total), 1)


def log_sum(stats: Tensor) -> Tensor:
    """Return log Σ exp(z), (n,)."""
    return stats[:, 0] + stats[:, 1].log()


def _of_type(gradient: Tensor, dtype: torch.dtype, product: Tensor) -> Tensor:
    return gradient if gradient.dtype == dtype else room_of(product, dtype).copy_(gradient)


def is_one(slope: Tensor | float) -> bool:
    return isinstance(slope, float) and slope == 1.0


# --- choice of the implementation -------------------------------------------------------------------------

TRIAL = (5, 9_001)  # rows and vocabulary size: two blocks of the kernel and a part of a third
VALUES_APART = 1e-4  # nats; z is a few tens
GRADIENTS_APART = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest difference, relative to the largest gradient. In 16 bits it is the unit in the last place, as two
nearly equal numbers may be rounded to neighbors."""


@dataclass(frozen=True)
class SoftmaxChoice:
    """The softmax that a head uses. description: a clause about it, empty where there is no choice."""

    softmax: Softmax
    description: str = ""


@functools.cache
def choose_softmax(plain: Softmax, dtype: torch.dtype, device: torch.device) -> SoftmaxChoice:
    """Return the implementation that a head with weights of `dtype` uses on `device`: on a GPU the Triton
    kernel, where it compiles and agrees with torch's operations on random logits; else `plain`, which uses
    those."""
    if device.type != "cuda":
        return SoftmaxChoice(plain)
    try:
        from dsft.model.softmax_kernel import TritonSoftmax  # here: only GPU builds come with Triton

        return choose_exact(plain, TritonSoftmax(plain.shaping, plain.smoothing), dtype, device)
    except Exception as error:  # what Triton, its compilers, a C compiler and the driver raise
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return SoftmaxChoice(
            plain, f"its softmax by torch's operations, as the Triton kernel failed ({reason})"
        )


def choose_exact(plain: Softmax, kernel: Softmax, dtype: torch.dtype, device: torch.device) -> SoftmaxChoice:
    """Return `kernel` if it agrees with `plain`, else `plain`."""
    values, gradients = largest_differences(plain, kernel, dtype, device)
    found = f"{values:.1g} nats and {gradients:.1g} of the largest gradient from torch's operations"
    if values <= VALUES_APART and gradients <= GRADIENTS_APART[dtype]:
        return SoftmaxChoice(kernel, f"its softmax by a Triton kernel, {found}")
    return SoftmaxChoice(plain, f"its softmax by torch's operations, as the Triton kernel was {found}")


def largest_differences(
    plain: Softmax, kernel: Softmax, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """Return how far two implementations differ on random logits: values in nats, gradients relative to the
    largest."""
    (rows, vocabulary), generator = TRIAL, torch.Generator().manual_seed(0)
    product = torch.randn(TRIAL, generator=generator).mul_(8.0).to(device)
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(device)
    upstream = torch.randn(rows, generator=generator).to(device)
    first = vocabulary // 3
    found = []
    for softmax in (plain, kernel):
        logps, stats, gradient = softmax.values(product.clone(), targets, dtype)
        part = product[:, first:].clone()
        of_part = softmax.gradient(part, targets - first, stats, upstream, vocabulary, dtype)
        found.append((logps.double(), gradient.double(), of_part.double()))
    (exact, *exactly), (value, *gradients) = found
    by_largest = [(a - b).abs().max() / b.abs().max() for a, b in zip(gradients, exactly, strict=True)]
    return float((value - exact).abs().max()), float(torch.stack(by_largest).max())
