"""Attention over packed rows on a GPU: which is chosen, which kernels it calls, and how many it launches."""

from __future__ import annotations

import pytest

from tests.standin.gpu import answer

pytestmark = pytest.mark.standin
WORKER = "tests.standin.attention_worker"
NO_3 = "not FlashAttention 3: No module named 'flash_attn_interface'"
VARLEN, LOOP = f"varlen_attn of torch; {NO_3}", f"segment by segment; {NO_3}; not varlen_attn of torch: "
ONE_CALL = ["_varlen_attn"]
BY_HAND = ["_softmax", "_softmax_backward_data"]
EFFICIENT, FLASH = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"


def test_which_attention_is_chosen() -> None:
    """Segments of three lengths, one of which goes on from a prompt; heads in groups of four."""
    models = answer(WORKER, "models")
    for name in ("llama", "mistral", "gemma3"):
        assert models[f"{name} bf16"] == {"said": f"attention of packed rows: {VARLEN}", "kernels": ONE_CALL}
    for name, why, kernels in (
        ("gemma2", "it computes no soft-caps", BY_HAND),
        ("heads of 12", "head_size must be a multiple of 8", ["_safe_softmax", FLASH, BY_HAND[1]]),
        ("heads of 512", "FlashAttention forward only supports head dimension at most 256", [EFFICIENT]),
        ("dropout", "it computes no dropout", [EFFICIENT, FLASH]),
    ):
        assert models[f"{name} bf16"]["said"].startswith(f"attention of packed rows: {LOOP}{why}")
        assert models[f"{name} bf16"]["kernels"] == kernels
    for name in ("llama", "mistral", "gemma3", "heads of 12", "heads of 512", "dropout"):
        fp32 = models[f"{name} fp32"]
        assert fp32["said"].endswith("segment by segment, as FlashAttention does not compute in float32")
        assert fp32["kernels"] == [EFFICIENT]  # none makes all scores, though heads are in groups


def test_what_a_layer_launches_does_not_depend_on_the_number_of_segments() -> None:
    found = answer(WORKER, "launches")
    for heads in (16, 4):
        one = found[f"auto {heads} 1"]["launches"]
        assert one <= 104
        assert {found[f"auto {heads} {segments}"]["launches"] for segments in ("1", "20", "41")} == {one}
        assert found[f"auto {heads} pairs"]["launches"] <= one + 6  # two gathers, and their gradients
        assert found[f"sdpa {heads} 41"]["launches"] > 2 * one
    for case in found.values():
        assert (case["syncs"], case["to_device"], case["waits"]) == (0, 0, {})


def test_torch_never_takes_cudnn() -> None:
    """It makes a plan for each new length. Torch chooses it where it is not switched off, as `join` does."""
    kernels, left_on = answer(WORKER, "kernels"), answer(WORKER, "kernels", "cudnn")
    assert left_on["bf16 8 128 causal"] == "cudnn" and "cudnn" not in kernels.values()
    for name, kernel in kernels.items():
        dtype, heads, _, form = name.split()
        if dtype == "fp32" and heads == "8":
            assert kernel == "efficient"
        elif dtype != "fp32" and form == "causal":
            assert kernel == "flash"
        elif heads == "8":
            assert kernel == "efficient"
