"""train.tf32 reaches torch, on GPUs alone."""

from collections.abc import Iterator

import pytest
import torch

from dsft.engine.initialize import set_tf32

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


def test_gpu_matmul_precision_follows_the_spec() -> None:
    set_tf32(True, GPU)
    assert torch.get_float32_matmul_precision() == "high"  # can be asked: torch.compile does
    assert torch.backends.cuda.matmul.allow_tf32
    set_tf32(False, GPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


def test_cpu_matmul_precision_is_unchanged() -> None:
    set_tf32(True, CPU)
    assert torch.get_float32_matmul_precision() == "highest"
