"""A layer's experts and its activations in host memory on a GPU, and the messages on one that is too old."""

from __future__ import annotations

from typing import Any

import pytest

from dsft.plan.memory.offload import allocator
from tests.specs import minimal_spec
from tests.standin.gpu import answer, torch_version

pytestmark = pytest.mark.standin
WORKER = "layers_worker"
LAYERS, EXPERTS = 6, 16
"""Of the worker's models."""


@pytest.fixture(scope="module")
def answered() -> Any:
    spec = minimal_spec(
        train={"max_steps": 1},
        model={
            "from_config": {"model_type": "llama"},
            "gradient_checkpointing": True,
            "activation_offload": True,
        },
    )
    return answer(WORKER, mode="numbers", **allocator(spec, {}, torch_version()))


def test_grouped_matmul_waits_less_than_the_loop_over_experts(answered: Any) -> None:
    found = answered["experts"]
    grouped, fallback, eager = found["auto bf16"], found["auto fp16"], found["eager fp16"]
    assert grouped["stream_syncs"] == 0 and grouped["products"] <= 3
    assert 0 < fallback["stream_syncs"] <= 6  # two products in the forward, four in the backward
    assert eager["stream_syncs"] > 5 * EXPERTS and eager["launches"] > 8 * fallback["launches"]
    assert "expert by expert" in fallback["line"] and "expert by" not in grouped["line"]


def test_activation_offload_overlaps_without_a_wait(answered: Any) -> None:
    kept, all_of_them, half = answered["kept"], answered["all"], answered["half"]
    assert kept["numbers"] == all_of_them["numbers"] == half["numbers"]
    for case, copied in ((all_of_them, LAYERS), (half, LAYERS // 2)):
        assert case["waits"] == kept["waits"] and case["beside"]
        more = {name: n - kept["counts"][name] for name, n in case["counts"].items() if name != "launches"}
        assert more["to_host"] == copied and more["to_device"] == copied - 1  # the last is still there
        assert (more["stream_syncs"], more["event_syncs"], more["pageable"]) == (0, 0, 0)


def test_inputs_are_prefetched_during_recomputation(answered: Any) -> None:
    forward = [step for n in range(LAYERS) for step in ("out", f"layer {n}")]
    backward = [step for n in reversed(range(1, LAYERS)) for step in ("back", f"layer {n}")]
    assert answered["all"]["order"] == [*forward, *backward, "layer 0"]


def test_at_most_two_layers_inputs_are_on_the_device(answered: Any) -> None:
    peaks = {name: answered[name]["memory"]["allocated"] for name in ("kept", "all")}
    saved = (peaks["kept"] - peaks["all"]) / answered["input"]
    assert LAYERS - 3 <= saved <= LAYERS


def test_pinned_blocks_are_not_reused_for_larger_ones(answered: Any) -> None:
    """torch looks for a block by the power of two alone, unless large ones are not cached. Before 2.13 all
    are as large as that power."""
    is_rounded = tuple(int(part) for part in torch_version().split(".")[:2]) < (2, 13)
    assert answered["pinned"] == is_rounded


def test_unsupported_gpu_gives_one_sentence(answered: Any) -> None:
    found = answered["old"]
    assert all(len(lines) == 1 for name, lines in found.items() if name != "liger"), found
    assert "PYTORCH_ALLOC_CONF= " in found["device"][0]
    assert "expert by expert" in found["experts"][0]
    assert "pip install 'dsft[gpu]'" in found["auto, no package"][0]
    assert "capability 7.5" in found["auto"][0] and "capability 7.5" in found["liger"][-1]
    assert "torch.compile" in found["compile"][0]
