from __future__ import annotations

import json
from typing import Any

import pytest

from dsft.plan.ds_config import (
    ABSENT,
    LARGEST_BUCKET,
    SMALLEST_BUCKET,
    Elements,
    bucket_size,
    deepspeed_config,
    entries,
    sized,
)
from dsft.spec.batch import batch_sizes

CASES = [
    (precision, stage, offload)
    for precision in ("fp32", "bf16", "fp16")
    for stage in range(4)
    for offload in (False, True)
]


@pytest.mark.parametrize(("precision", "stage", "offload"), CASES)
def test_deepspeed_takes_the_configuration(make_spec: Any, precision: str, stage: int, offload: bool) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    device = "cpu" if offload and stage else "none"
    spec = make_spec(
        train={"precision": precision},
        parallel={"zero_stage": stage, "offload_optimizer": {"device": device}},
    )
    config = deepspeed_config(spec, batch_sizes(spec.train, 1))
    parsed = DeepSpeedConfig(json.loads(json.dumps(config)))
    assert parsed.train_batch_size == 6
    one_rank = stage == 1 and not offload  # where stage 2 shards as much, nothing
    assert parsed.zero_optimization_stage == (2 if one_rank else stage)
    assert parsed.bfloat16_config.enabled == (precision == "bf16")
    assert parsed.float16_config.enabled == (precision == "fp16")
    assert parsed.float16_config.hysteresis == (1 if precision == "fp16" else 2)  # 2: DeepSpeed's default
    assert (parsed.zero_config.offload_optimizer is not None) == (device == "cpu")
    for key, value in config["zero_optimization"].items():
        if not isinstance(value, dict):
            assert getattr(parsed.zero_config, key.removeprefix("stage3_")) == value


def test_every_entry_has_a_reason_and_none_is_auto(make_spec: Any) -> None:
    for precision, stage, _ in CASES:
        found = entries(make_spec(train={"precision": precision}, parallel={"zero_stage": stage}), None)
        keys = [entry.key for entry in found]
        assert len(keys) == len(set(keys))
        for entry in found:
            assert entry.reason and entry.value != "auto"


def test_clipping_is_always_written(make_spec: Any) -> None:
    def clipping(**sections: Any) -> float:
        return float(deepspeed_config(make_spec(**sections), None)["gradient_clipping"])

    assert clipping(train={"max_grad_norm": 0.5}, parallel={"zero_stage": 1}) == 0.5
    assert clipping(train={"max_grad_norm": 0.0}, parallel={"zero_stage": 2}) == 0.0
    assert clipping(train={"max_grad_norm": 0.5}, parallel={"zero_stage": 0}) == 0.0
    assert clipping(train={"max_grad_norm": 0.5, "precision": "bf16"}, parallel={"zero_stage": 0}) == 0.5


def test_gradients_accumulate_in_fp32_where_deepspeed_can(make_spec: Any) -> None:
    def accumulated(stage: int, precision: str) -> Any:
        spec = make_spec(train={"precision": precision}, parallel={"zero_stage": stage})
        return deepspeed_config(spec, None)["data_types"]["grad_accum_dtype"]

    assert [accumulated(stage, "bf16") for stage in range(4)] == ["bf16", "fp32", "fp32", "fp32"]
    assert [accumulated(stage, "fp32") for stage in range(4)] == ["fp32"] * 4


@pytest.mark.parametrize(
    ("ranks", "sections", "stays"),
    [
        (1, {}, True),
        (2, {}, False),
        (2, {"train": {"reduce_dtype": "bf16"}}, True),
        (1, {"train": {"accumulation_steps": 2}}, False),
        (1, {"train": {"precision": "fp32"}}, False),
        (1, {"parallel": {"zero_stage": 2}}, False),
        (1, {"parallel": {"offload_optimizer": {"device": "cpu"}}}, False),
        (1, {"data": {"packing": True}}, True),
        (1, {"data": {"packing": True, "max_tokens_per_micro_batch": 2 * 2048}}, True),
        (1, {"data": {"packing": True, "max_tokens_per_micro_batch": 2 * 2048 - 1}}, False),
    ],
)
def test_bf16_gradients_stay_where_nothing_is_added_to_them_in_fp32(
    make_spec: Any, ranks: int, sections: dict[str, Any], stays: bool
) -> None:
    given = {
        "train": {"precision": "bf16", "accumulation_steps": 1} | sections.get("train", {}),
        "parallel": {"zero_stage": 3} | sections.get("parallel", {}),
        "data": sections.get("data", {}),
    }
    spec = make_spec(**given)
    config = deepspeed_config(spec, batch_sizes(spec.train, ranks, spec.data, spec.task))
    assert config["data_types"]["grad_accum_dtype"] == ("bf16" if stays else "fp32")
    assert deepspeed_config(spec, None)["data_types"]["grad_accum_dtype"] == "fp32"  # the world is not known


def test_the_reduction_type_is_a_key(make_spec: Any) -> None:
    spec = make_spec(train={"precision": "bf16", "reduce_dtype": "bf16"})
    assert deepspeed_config(spec, None)["communication_data_type"] == "bf16"
    assert deepspeed_config(make_spec(train={"precision": "bf16"}), None)["communication_data_type"] == "fp32"


def test_without_a_cluster_the_size_that_follows_is_left_out(make_spec: Any) -> None:
    config = deepspeed_config(make_spec(), None)
    assert "train_batch_size" not in config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (2, 3)
    spec = make_spec(train={"global_batch_size": 64, "accumulation_steps": None})
    config = deepspeed_config(spec, None)
    assert config["train_batch_size"] == 64 and "gradient_accumulation_steps" not in config
    absent = [entry for entry in entries(spec, None) if entry.value is ABSENT]
    assert [entry.key for entry in absent] == ["gradient_accumulation_steps"]
    assert "computed from the other two" in absent[0].reason


def test_a_pipeline_neither_overlaps_nor_recomputes_whole_stages(make_spec: Any) -> None:
    config = deepspeed_config(make_spec(parallel={"pipeline_stages": 2, "zero_stage": 1}), None)
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["pipeline"] == {"activation_checkpoint_interval": 0, "use_reentrant": False}


def test_offloaded_parameters_have_a_section(make_spec: Any) -> None:
    def section(**offload: Any) -> Any:
        parallel = {"zero_stage": 3, "offload_parameters": offload}
        return deepspeed_config(make_spec(parallel=parallel), None)["zero_optimization"].get("offload_param")

    assert section() is None
    assert section(device="cpu") == {"device": "cpu", "pin_memory": True}
    assert section(device="cpu", pin_memory=False) == {"device": "cpu", "pin_memory": False}


def test_offload_asks_for_deepspeeds_adam_unless_the_spec_allows_another(make_spec: Any) -> None:
    def forced(**sections: Any) -> Any:
        return deepspeed_config(make_spec(**sections), None)["zero_force_ds_cpu_optimizer"]

    offloaded = {"zero_stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert forced(parallel=offloaded) is True
    assert forced(parallel={**offloaded, "allow_torch_adam": True}) is False
    assert forced(parallel=offloaded, optim={"name": "sgd"}) is False
    assert forced(parallel={"zero_stage": 3}) is False


@pytest.mark.parametrize(
    ("elements", "size"),
    [
        (None, LARGEST_BUCKET),
        (8_000_000_000, LARGEST_BUCKET),
        (100_000_000, 25_000_000),
        (8_000_002, 2_000_000),
        (2_000_000, SMALLEST_BUCKET),
        (500_001, 500_002),  # even
    ],
)
def test_a_bucket_is_a_quarter_of_the_model_within_bounds(elements: int | None, size: int) -> None:
    assert bucket_size(elements) == size


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buckets_sized_at_the_start_of_a_run_are_those_of_the_generated_file(
    make_spec: Any, stage: int
) -> None:
    spec, elements = make_spec(parallel={"zero_stage": stage}), Elements(40_000_000, 8_000_000)
    generated = deepspeed_config(spec, None, elements)
    assert sized(deepspeed_config(spec, None), elements) == generated
    zero = generated["zero_optimization"]
    assert zero.get("reduce_bucket_size") == (None if stage == 0 else 2_000_000)
    assert zero.get("stage3_prefetch_bucket_size") == (10_000_000 if stage == 3 else None)


def test_buckets_that_a_file_decides_are_kept(make_spec: Any) -> None:
    config = deepspeed_config(make_spec(parallel={"zero_stage": 2}), None)
    zero = sized(config, Elements(100, 100), fixed={"reduce_bucket_size"})["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (LARGEST_BUCKET, 100)
    assert config["zero_optimization"]["allgather_bucket_size"] == LARGEST_BUCKET


def test_the_reason_of_a_bucket_has_the_numbers(make_spec: Any) -> None:
    reasons = {e.key: e.reason for e in entries(make_spec(parallel={"zero_stage": 2}), None, Elements(9, 8))}
    assert "8 trained ones" in reasons["zero_optimization.reduce_bucket_size"]
    unknown = {e.key: e.reason for e in entries(make_spec(parallel={"zero_stage": 2}), None)}
    assert "a run computes it from the model" in unknown["zero_optimization.reduce_bucket_size"]
