"""A plugin of pytest: the tests of the head by the Triton kernel, which Triton's interpreter runs on the CPU,
and by products as a GPU has them: float32, with rows that begin at multiples of 8 elements."""

from typing import Any

import torch

from dsft.model import head, products
from dsft.model.softmax import Softmax, SoftmaxChoice
from dsft.model.softmax_kernel import TritonSoftmax


def pytest_configure(config: Any) -> None:
    head.choose_softmax = by_kernel  # type: ignore[assignment]
    products.TILE["cpu"] = 8


def by_kernel(plain: Softmax, dtype: torch.dtype, device: torch.device) -> SoftmaxChoice:
    return SoftmaxChoice(TritonSoftmax(plain.shaping, plain.smoothing))
