"""Attention over packed rows on a GPU: which is chosen, which kernels it calls, and how many it launches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.standin.gpu import answer, torch_version

pytestmark = pytest.mark.standin
WORKER = "tests.standin.attention_worker"
BEFORE_WINDOWS = torch_version().startswith("2.10.")
"""Whether torch's varlen_attn has no windows yet, nor torch cuDNN before FlashAttention."""
ONE_CALL = ["_varlen_attn"]
BY_HAND = ["_softmax", "_softmax_backward_data"]
EFFICIENT, FLASH = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"


@pytest.fixture(scope="module")
def told() -> Any:
    return answer(WORKER)


@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        ("llama", ONE_CALL),
        ("mistral", ONE_CALL),
        ("gemma3", ONE_CALL),
        ("gemma2", BY_HAND),  # no kernel has soft-caps
        ("heads of 12", ["_safe_softmax", FLASH, BY_HAND[1]]),  # not a multiple of 8
        ("heads of 512", [EFFICIENT]),  # more than FlashAttention takes
        ("dropout", [EFFICIENT, FLASH]),
    ],
)
def test_which_kernels_attention_calls(told: Any, model: str, kernels: list[str]) -> None:
    """Segments of three lengths, one of which goes on from a prompt; heads in groups of four."""
    if BEFORE_WINDOWS and model in ("mistral", "gemma3"):
        kernels = [EFFICIENT, FLASH]
    assert told["models"][f"{model} bf16"] == kernels
    if model != "gemma2":  # none makes all scores, though heads are in groups
        assert told["models"][f"{model} fp32"] == [EFFICIENT]


def test_what_a_layer_launches_does_not_depend_on_the_number_of_segments(told: Any) -> None:
    found = told["launches"]
    for heads in (16, 4):
        one = found[f"auto {heads} 1"]["launches"]
        assert one <= 104
        assert {found[f"auto {heads} {segments}"]["launches"] for segments in ("1", "20", "41")} == {one}
        assert found[f"auto {heads} pairs"]["launches"] <= one + 6  # two gathers, and their gradients
        assert found[f"sdpa {heads} 41"]["launches"] > 2 * one
    for case in found.values():
        assert (case["syncs"], case["to_device"], case["waits"]) == (0, 0, {})


def test_torch_never_takes_cudnn(told: Any) -> None:
    """It makes a plan for each new length. Torch chooses it where it is not switched off, as `join` does."""
    kernels, left_on = told["kernels"], told["cudnn"]
    assert left_on["bf16 8 128 causal"] == ("flash" if BEFORE_WINDOWS else "cudnn")
    assert "cudnn" not in kernels.values()
    for name, kernel in kernels.items():
        dtype, heads, _, form = name.split()
        if dtype == "fp32" and heads == "8":
            assert kernel == "efficient"
        elif dtype != "fp32" and form == "causal":
            assert kernel == "flash"
        elif heads == "8":
            assert kernel == "efficient"
