"""Page-locked memory: how much, and who decides."""

from typing import Any

import pytest

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut
from dsft.plan.memory.offload import allocator, locked_bytes, may_pin
from dsft.plan.memory.sizes import GIB
from dsft.spec.layout import Layout

CPU, NONE = {"device": "cpu"}, {"device": "none"}


@pytest.mark.parametrize(("zero", "optimizer", "parameters", "precision", "each"), [
    (1, CPU, NONE, "bf16", 4 + 4 + 2),
    (2, CPU, NONE, "bf16", 4 + 4 + 2),
    (2, CPU, NONE, "fp32", 4 + 4 + 4 + 4),
    (3, CPU, NONE, "bf16", 4 + 4),
    (3, CPU, CPU, "bf16", 4 + 4 + 2),
    (3, NONE, CPU, "bf16", 2),
    (3, NONE, NONE, "bf16", 0),
])  # fmt: skip
def test_bytes_that_deepspeed_locks_for_each_element(
    make_spec: Any, zero: int, optimizer: Any, parameters: Any, precision: str, each: int
) -> None:
    parallel = {"zero_stage": zero, "offload_optimizer": optimizer, "offload_parameters": parameters}
    spec = make_spec(parallel=parallel, train={"precision": precision})
    layers = tuple(Parameter(f"layer {layer}", (10, 100), layer, False, ()) for layer in range(3))
    counted = Census("X", 3, None, (*layers, Parameter("frozen", (10, 10), 0, False, (), trained=False)))
    kept = 50 * 2 if parameters == CPU else 0
    assert locked_bytes(counted, spec, Layout(2, 1), 0, Cut((3,))) == each * 3 * 500 + kept


def test_a_stage_of_a_pipeline_locks_its_own(make_spec: Any) -> None:
    parallel = {"zero_stage": 1, "pipeline_stages": 2, "offload_optimizer": CPU}
    spec = make_spec(parallel=parallel, train={"precision": "bf16"})
    layers = tuple(Parameter(f"layer {layer}", (10, 10), layer, False, ()) for layer in range(4))
    counted, cut = Census("X", 4, None, layers), Cut((1, 3))
    assert [locked_bytes(counted, spec, Layout(2, 2), stage, cut) for stage in (0, 1)] == [1000, 3000]


def test_all_ranks_of_a_host_count_and_one_full_host_is_enough() -> None:
    value, reason = may_pin([("a", 30 * GIB, 128 * GIB), ("a", 33 * GIB, 128 * GIB), ("b", GIB, 4 * GIB)])
    assert value and reason == "which pins 63.0 GiB of a's 128.0 GiB"
    value, reason = may_pin([("a", 30 * GIB, 128 * GIB), ("a", 35 * GIB, 128 * GIB), ("b", GIB, 4 * GIB)])
    assert not value and reason.startswith("since it would pin 65.0 GiB of a's 128.0 GiB, more than half;")
    assert not may_pin([("a", 1, 128 * GIB), ("b", 3 * GIB, 4 * GIB)])[0]


def test_torchs_allocator_grows_segments_and_locks_what_is_requested(make_spec: Any) -> None:
    offloaded = make_spec(parallel={"zero_stage": 1, "offload_optimizer": CPU})
    kept = make_spec(model={"gradient_checkpointing": True, "activation_offload": True})
    grows, exact = "expandable_segments:True", "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"
    for version in ("2.13.0", "2.13.0+cu130", "2.15.0a0+b4e4ee81d3.nv26.12"):
        for spec in (offloaded, kept):
            assert allocator(spec, {}, version) == {"PYTORCH_ALLOC_CONF": f"{grows},{exact}"}
        assert allocator(make_spec(), {}, version) == {"PYTORCH_ALLOC_CONF": grows}
    assert allocator(offloaded, {}, "2.12.1") == {"PYTORCH_ALLOC_CONF": grows}


def test_segments_do_not_grow_under_wsl(make_spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "5.15.90.1-microsoft-standard-WSL2")
    assert allocator(make_spec(), {}, "2.13.0") == {}


def test_the_users_allocator_settings_stay_and_other_devices_have_no_segments(make_spec: Any) -> None:
    offloaded = make_spec(parallel={"zero_stage": 1, "offload_optimizer": CPU})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator(offloaded, {name: "max_split_size_mb:512"}, "2.13.0") == {}
    for version in ("2.13.0+cpu", "2.13.0+rocm7.0", "2.13.0+xpu"):
        assert allocator(offloaded, {}, version) == {}
