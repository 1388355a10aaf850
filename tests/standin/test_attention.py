"""Attention over packed rows on a GPU: which is chosen, which kernels it calls, and how many it launches."""

from __future__ import annotations

from typing import Any

import pytest

from tests.standin.gpu import answer, torch_version

pytestmark = pytest.mark.standin
WORKER = "attention_worker"
BEFORE_WINDOWS = torch_version().startswith("2.10.")
"""Whether torch's varlen_attn has no windows yet, nor torch cuDNN before FlashAttention."""
ONE_CALL, CUDNN = ["_varlen_attn"], ["_scaled_dot_product_cudnn_attention"]
BY_HAND = ["_softmax", "_softmax_backward_data"]
EFFICIENT, FLASH = "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"


@pytest.fixture(scope="module")
def report() -> Any:
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
def test_which_kernels_attention_calls(report: Any, model: str, kernels: list[str]) -> None:
    """Segments of three lengths, one of which continues a prompt; heads in groups of four."""
    if BEFORE_WINDOWS and model in ("mistral", "gemma3"):
        kernels = [EFFICIENT, FLASH]
    assert report["models"][f"{model} bf16"] == kernels
    if model != "gemma2":  # none makes all scores, though heads are in groups
        assert report["models"][f"{model} fp32"] == [EFFICIENT]


def test_launches_per_layer_do_not_depend_on_segments(report: Any) -> None:
    found = report["launches"]
    for heads in (16, 4):
        one = found[f"auto {heads} 1"]["launches"]
        assert one <= 104
        assert {found[f"auto {heads} {segments}"]["launches"] for segments in ("1", "20", "41")} == {one}
        assert found[f"auto {heads} pairs"]["launches"] <= one + 6  # two gathers, and their gradients
        assert found[f"sdpa {heads} 41"]["launches"] > 2 * one
    for case in found.values():
        assert (case["syncs"], case["to_device"], case["waits"]) == (0, 0, {})


BY_CUDNN = {
    "llama": {"four of 1024", "one of 512", "four of the longest"},
    "mistral": {"one of 512"},  # a window of 600
    "gemma3": {"four of 1024", "one of 512", "four of the longest"},  # in its layers without a window
}
"""The layouts that go through cuDNN. Not: lengths that are not one, or are neither a multiple of 256 nor
data.max_length, and answers that share a prompt."""


def test_equal_rows_use_cudnn_on_hopper(report: Any) -> None:
    found = report["shapes"]
    assert "not cuDNN for rows of one length: " in found["cuDNN fails"]
    for model, expected in BY_CUDNN.items():
        line = found[model].pop("line")
        if BEFORE_WINDOWS and model != "llama":
            continue
        assert line.endswith("by cuDNN, with plans for at most 16 shapes")
        for layout, seen in found[model].items():
            kernels = CUDNN if layout in expected else ONE_CALL
            windowed = ONE_CALL if model == "gemma3" else []
            assert (layout, seen["kernels"]) == (layout, sorted({*kernels, *windowed}))
            assert seen["waits"] == 0
    padded = found["padded"]
    assert padded["line"].startswith("attention of padded rows: torch's; rows of one length")
    assert padded["4 of 1024"] == padded["2 of 1000"] == CUDNN and padded["2 of 1001"] == [FLASH]
    assert found["left on"] is False, "cuDNN is on around dsft's own calls alone"


def test_plans_and_bounds_of_segments_are_few(report: Any) -> None:
    """Of 20 shapes, each twice; segments of up to 4,096 tokens."""
    assert len(report["shapes"]["plans"]) == 16
    assert report["shapes"]["bounds"] == [128, 256, 512, 1024, 2048, 4096]


def test_other_gpus_do_not_try_cudnn(report: Any) -> None:
    found = report["on Ampere"]
    for model in BY_CUDNN:
        assert "cuDNN" not in found[model].pop("line")
        for seen in found[model].values():
            assert BEFORE_WINDOWS or (seen["kernels"], seen["waits"]) == (ONE_CALL, 0)
    assert (found["plans"], found["padded"]["line"], found["padded"]["4 of 1024"]) == ([], "", [FLASH])


def test_torch_never_takes_cudnn_by_itself(report: Any) -> None:
    """It makes a plan for each new length. Torch chooses it unless it is switched off, as `join` does."""
    kernels, left_on = report["kernels"], report["cudnn"]
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
