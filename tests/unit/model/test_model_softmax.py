"""The softmax part of the head: the Triton kernel against torch's operations, and which of them is used; the
products in parts that a GPU's alignment asks for."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsft.model import products
from dsft.model.products import aligned_empty, multiply, pieces, product
from dsft.model.softmax import (
    Shaping,
    Softmax,
    SoftmaxChoice,
    choose_exact,
    choose_softmax,
    largest_differences,
)

HERE = Path(__file__).parent
CPU = torch.device("cpu")
SHAPINGS = (Shaping(), Shaping(scale=0.0625), Shaping(softcap=30.0), Shaping(scale=2.5, softcap=4.0))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 from the start")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="this starts itself")
def test_softmax_kernel_passes_the_tests_of_the_head() -> None:
    """In a process of its own, since Triton reads the variable when it is imported. Without the test that
    finds logits by the width of the vocabulary, which aligned rows do not have."""
    files = [Path(__file__), HERE / "test_model_head.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.unit.model.interpreted", *map(str, files)]
    command += ["-k", "not logits_of_all_tokens_are_never_allocated"]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


# --- which is used ----------------------------------------------------------------------------------------


class Wrong(Softmax):
    """Its gradient is off by 3 %."""

    def gradient(self, *given: Tensor) -> Tensor:  # type: ignore[override]
        return super().gradient(*given) * 1.03


def test_fallback_to_torch_operations_is_explained() -> None:
    plain = Softmax()
    assert choose_softmax(plain, torch.bfloat16, CPU) == SoftmaxChoice(plain)
    if not torch.cuda.is_available():
        found = choose_softmax(plain, torch.bfloat16, torch.device("cuda"))
        assert found.softmax == plain and "as the Triton kernel failed (" in found.description


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_with_wrong_numbers_is_not_used(dtype: torch.dtype) -> None:
    plain, same, wrong = Softmax(smoothing=0.1), Softmax(smoothing=0.1), Wrong(smoothing=0.1)
    assert choose_exact(plain, same, dtype, CPU).softmax is same
    found = choose_exact(plain, wrong, dtype, CPU)
    assert found.softmax is plain and "0.03 of the largest gradient" in found.description


# --- products as a GPU has them ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "borders"), [(128, [0, 128]), (136, [0, 136]), (131, [0, 128, 131]), (3, [0, 3])]
)
def test_remainder_of_the_vocabulary_is_computed_separately(words: int, borders: list[int]) -> None:
    found = list(pieces(words, 1, 10**6, tile=64))
    assert [piece.start for piece in found] + [words] == borders and found[-1].stop == words


def test_chunks_begin_at_multiples() -> None:
    found = list(pieces(1000, 10, 8 * 10 * 200, tile=64))
    assert [i for piece in found for i in range(piece.start, piece.stop)] == list(range(1000))
    assert all(piece.start % 64 == 0 for piece in found) and len(found) == 5
    assert max(piece.stop - piece.start for piece in found) <= 192 + 64


@pytest.mark.parametrize("words", [64, 72, 77, 5])
def test_matmul_in_parts(monkeypatch: pytest.MonkeyPatch, words: int) -> None:
    monkeypatch.setitem(products.TILE, "cpu", 64)
    hidden, weight, bias = torch.randn(9, 12), torch.randn(words, 12), torch.randn(words)
    found = product(hidden, weight, bias)
    assert found.stride(0) % 64 == 0 and found.shape == (9, words)
    torch.testing.assert_close(found, hidden @ weight.t() + bias)
    assert aligned_empty(weight, 3, words, torch.bfloat16).stride(0) % 64 == 0


@pytest.mark.parametrize("add", [False, True])
def test_matmul_output_may_be_wider_than_the_product(add: bool) -> None:
    left, right, out = torch.randn(9, 12).bfloat16(), torch.randn(12, 7).bfloat16(), torch.ones(9, 7)
    multiply(left, right, out, add)
    torch.testing.assert_close(out, (left @ right).float() + (1.0 if add else 0.0))


# --- the kernel -------------------------------------------------------------------------------------------


def both(shaping: Shaping, smoothing: float) -> tuple[Softmax, Softmax]:
    from dsft.model.softmax_kernel import TritonSoftmax

    return Softmax(shaping, smoothing), TritonSoftmax(shaping, smoothing)


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_kernel_is_used(shaping: Shaping, smoothing: float, dtype: torch.dtype) -> None:
    plain, kernel = both(shaping, smoothing)
    assert choose_exact(plain, kernel, dtype, CPU).softmax is kernel, largest_differences(
        plain, kernel, dtype, CPU
    )


@in_the_interpreter
@pytest.mark.parametrize("words", [1, 37, 4096, 4097])
@pytest.mark.parametrize("shaping", SHAPINGS, ids=str)
def test_kernel_equals_float64(shaping: Shaping, words: int) -> None:
    """Values, sums and gradients, of the first rows alone, and of words that have no probability."""
    plain, kernel = both(shaping, 0.0)
    torch.manual_seed(2)
    given, targets = torch.randn(6, words) * 5.0, torch.randint(words, (6,))
    given[:, 1::3] = -1e30 if shaping.softcap else -float("inf")
    targets -= targets % 3  # none of those
    kept, exact_kept = torch.full((4, words), 7.0), torch.empty(4, words, dtype=torch.float64)
    exact, exact_sums, _ = plain.values(given.double(), targets, torch.float64, exact_kept)
    values, sums, _ = kernel.values(given.clone(), targets, torch.float32, kept)
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(sums.double(), exact_sums, rtol=4e-6, atol=4e-6)
    torch.testing.assert_close(kept.double(), exact_kept, rtol=1e-5, atol=1e-6)


@in_the_interpreter
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # numpy's
@pytest.mark.parametrize("hole", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(hole: float) -> None:
    plain, kernel = both(Shaping(), 0.0)
    given, targets = torch.randn(3, 50), torch.tensor([1, 2, 3])
    given[1, 7] = hole
    given[2] = -float("inf")
    values, _, gradient = kernel.values(given.clone(), targets, torch.float32)
    exact, _, exactly = plain.values(given.clone(), targets, torch.float32)
    assert values.isnan().tolist() == exact.isnan().tolist() == [False, True, True]
    torch.testing.assert_close(gradient[0], exactly[0])
    assert gradient[1:].isnan().any(1).all() and exactly[1:].isnan().any(1).all()
