"""train.tf32 reaches torch, on GPUs alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dsft.engine.initialize import set_tf32

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_a_gpu_multiplies_as_the_spec_says() -> None:
    set_tf32(True, GPU)
    assert torch.get_float32_matmul_precision() == "high"  # can be asked: torch.compile does
    assert torch.backends.cuda.matmul.allow_tf32
    set_tf32(False, GPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_cpu_computes_as_it_did() -> None:
    set_tf32(True, CPU)
    assert torch.get_float32_matmul_precision() == "highest"
