import json
from dataclasses import replace
from typing import Any

import pytest

from dsft.plan.census import Elements
from dsft.plan.ds_config import LARGEST_BUCKET, SMALLEST_BUCKET, bucket_size, deepspeed_config, entries
from dsft.plan.ds_entries import ABSENT, HostFacts, UserConfig, nested
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


@pytest.mark.parametrize(("ranks", "sections", "stays"), [
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
])  # fmt: skip
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


@pytest.mark.parametrize(("elements", "size"), [
    (None, LARGEST_BUCKET),
    (8_000_000_000, LARGEST_BUCKET),
    (100_000_000, 25_000_000),
    (8_000_002, 2_000_000),
    (2_000_000, SMALLEST_BUCKET),
    (500_001, 500_002),  # even
])  # fmt: skip
def test_a_bucket_is_a_quarter_of_the_model_within_bounds(elements: int | None, size: int) -> None:
    assert bucket_size(elements) == size


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buckets_have_the_size_that_the_model_gives(make_spec: Any, stage: int) -> None:
    facts = HostFacts(Elements(40_000_000, 8_000_000))
    zero = deepspeed_config(make_spec(parallel={"zero_stage": stage}), None, facts)["zero_optimization"]
    assert zero.get("reduce_bucket_size") == (None if stage == 0 else 2_000_000)
    assert zero.get("stage3_prefetch_bucket_size") == (10_000_000 if stage == 3 else None)


def test_what_the_users_file_decides_is_kept_and_the_reason_names_the_file(make_spec: Any) -> None:
    spec, facts = make_spec(parallel={"zero_stage": 2}), HostFacts(Elements(100, 100))
    values = {
        "zero_optimization.reduce_bucket_size": 4096,
        "comms_logger.enabled": True,
        "log_level": "warning",
    }
    found = {one.key: one for one in entries(spec, None, facts, UserConfig("mine.json", values))}
    assert found["zero_optimization.allgather_bucket_size"].value == 100
    size, logger = found["zero_optimization.reduce_bucket_size"], found["comms_logger.enabled"]
    assert size.value == 4096
    assert size.reason.startswith("mine.json sets it; without the file 100: elements per reduction")
    assert (logger.value, logger.reason) == (True, "mine.json sets it")
    assert "mine.json" not in found["log_level"].reason, "the same value as without the file"
    assert list(found)[-1] == "comms_logger.enabled"


OFFLOADS = {"zero_stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_parameters": {"device": "cpu"}}
DISK = {"device": "nvme", "nvme_path": "/disk"}
ON_DISK = {"zero_stage": 3, "offload_optimizer": DISK, "offload_parameters": DISK}
FOUND = HostFacts(
    Elements(4_000_000, 4_000_000), 1000, (False, "no room"), {"offload_parameters": "/disk/own"}, True
)


@pytest.mark.parametrize(("parallel", "expected"), [
    (OFFLOADS, {
        "offload_optimizer.pin_memory": (False, "no room"),
        "offload_param.pin_memory": (False, "no room"),
        "reduce_bucket_size": (1_000_000, "a quarter of the 4,000,000"),
        "zero_force_ds_cpu_optimizer": (True, "CPU Adam is there"),
    }),
    ({**OFFLOADS, "offload_parameters": {"device": "cpu", "pin_memory": True}}, {
        "offload_optimizer.pin_memory": (False, "no room"),
        "offload_param.pin_memory": (True, "parallel.offload_parameters.pin_memory"),
    }),
    (ON_DISK, {
        "offload_optimizer.nvme_path": ("/disk", "parallel.offload_optimizer.nvme_path"),
        "offload_optimizer.pin_memory": (True, "faster copies"),
        "offload_param.nvme_path": ("/disk/own", "this run's own folder"),
        "offload_param.buffer_size": (1000, "the largest parameter's shard"),
        "stage3_prefetch_bucket_size": (0, "no prefetch"),
    }),
])  # fmt: skip
def test_facts_of_the_host_decide_values_and_reasons(
    make_spec: Any, parallel: dict[str, Any], expected: dict[str, tuple[Any, str]]
) -> None:
    spec = make_spec(parallel=parallel)
    facts = FOUND if parallel is ON_DISK else replace(FOUND, swap={})
    rows = entries(spec, None, facts)
    found = {entry.key.removeprefix("zero_optimization."): entry for entry in rows}
    for key, (value, reason) in expected.items():
        assert found[key].value == value and reason in found[key].reason, key
    assert [entry.key for entry in rows] == [entry.key for entry in entries(spec, None)], "the same keys"
    assert nested(rows) == deepspeed_config(spec, None, facts)


def test_the_reason_of_a_bucket_has_the_numbers(make_spec: Any) -> None:
    reasons = {
        e.key: e.reason
        for e in entries(make_spec(parallel={"zero_stage": 2}), None, HostFacts(Elements(9, 8)))
    }
    assert "8 trained ones" in reasons["zero_optimization.reduce_bucket_size"]
    unknown = {e.key: e.reason for e in entries(make_spec(parallel={"zero_stage": 2}), None)}
    assert "a run computes it from the model" in unknown["zero_optimization.reduce_bucket_size"]
