import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dsft.errors import MissingInputError, SpecError
from dsft.plan.census import Elements
from dsft.plan.config_file import FIXED, SPEC_DECIDES, merge_config_file
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import HostFacts
from dsft.plan.ds_keys import problems
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.not_offered import NOT_OFFERED
from dsft.spec.schema import Spec


class Merged(NamedTuple):
    """A spec merged with a file, and the configuration that follows."""

    spec: Spec
    config: dict[str, Any]
    notes: tuple[str, ...]


def merged_with(
    spec: Spec, batch: BatchSizes, path: Path, facts: HostFacts | None = None, **keys: Any
) -> Merged:
    spec, file = merge_config_file(spec, batch, path, **keys)
    return Merged(spec, deepspeed_config(spec, batch, facts, file), file.notes)


@pytest.fixture
def merge(tmp_path: Path, make_spec: Any) -> Any:
    def run(file: Any, *, strict: bool = False, facts: HostFacts | None = None, **sections: Any) -> Merged:
        path = tmp_path / "zero3.json"
        path.write_text(file if isinstance(file, str) else json.dumps(file))
        spec = make_spec(**sections)
        return merged_with(spec, batch_sizes(spec.train, 4), path, facts, strict=strict)

    return run


def not_offered(key: str) -> str:
    return next(one.clause() for one in NOT_OFFERED if key in one.in_json.split())


HUGGING_FACE = {  # the shape of the files that users of the Trainer have
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def autos(config: Any) -> bool:
    return config == "auto" or (isinstance(config, dict) and any(map(autos, config.values())))


def test_a_trainers_file_is_filled_from_the_spec_and_decides_the_stage(merge: Any) -> None:
    merged = merge(HUGGING_FACE)
    assert merged.spec.parallel.zero_stage == 3
    assert not autos(merged.config)
    assert merged.config["train_batch_size"] == 24
    assert merged.config["zero_optimization"]["sub_group_size"] == 1e9
    assert merged.config["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    assert merged.config["steps_per_print"] == 2000
    assert "optimizer" not in merged.config and "scheduler" not in merged.config
    assert merged.notes == (
        "zero3.json: sets parallel.zero_stage to 3 (in the spec: 1)",
        'zero3.json: scheduler.type "WarmupLR", but the spec\'s "linear" is used',
    )


def test_deepspeed_takes_what_comes_out(merge: Any) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = merge(HUGGING_FACE).config | {"train_batch_size": 6}  # one process here
    assert DeepSpeedConfig(config).zero_config.gather_16bit_weights_on_model_save is True


def test_the_loss_scale_of_fp16_is_dsfts_own(make_spec: Any, tmp_path: Path) -> None:
    """dsft's scaler replaces DeepSpeed's: a fixed scale in the file would silently have no effect."""
    path = tmp_path / "zero2.json"
    path.write_text(json.dumps({"fp16": {"enabled": True, "loss_scale": 128, "min_loss_scale": 1}}))
    spec = make_spec(train={"global_batch_size": 24, "micro_batch_size": 2, "precision": "fp16"})
    merged = merged_with(spec, batch_sizes(spec.train, 4), path)
    assert merged.config["fp16"] == deepspeed_config(spec, batch_sizes(spec.train, 4))["fp16"]
    assert merged.notes == ("zero2.json: fp16.loss_scale 128, but the spec's 0 is used",)


def test_values_that_the_spec_decides_are_reported_and_not_used(merge: Any) -> None:
    file = {
        "train_batch_size": 16,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "Lamb", "params": {"lr": 3e-5, "weight_decay": 0.0, "torch_adam": True}},
        "wandb": {"enabled": True},
    }
    merged = merge(file)
    assert merged.config["train_batch_size"] == 24 and merged.config["gradient_clipping"] == 1.0
    assert merged.notes == (
        "zero3.json: train_batch_size 16, but the spec's 24 is used",
        "zero3.json: gradient_clipping 0.3, but the spec's 1.0 is used",
        'zero3.json: optimizer.type "Lamb", but the spec\'s "adamw" is used',
        "zero3.json: optimizer.params.lr 3e-05, but the spec's 0.001 is used",
        "zero3.json: optimizer.params.torch_adam is left out: the engine builds the optimizer from the spec",
        "zero3.json: wandb.enabled is left out: the spec's wandb section is used",
    )
    with pytest.raises(SpecError) as error:
        merge(file, strict=True)
    assert len(error.value.problems) == 6
    assert "train_batch_size: 16, but the spec's 24 is used; with --strict the file must agree" in str(
        error.value
    )


def test_the_examples_of_a_step_count_once_for_each_rank_of_a_group(make_spec: Any, tmp_path: Path) -> None:
    """As `dsft generate` writes it, so that its own file agrees."""
    spec = make_spec(parallel={"sequence_parallel": 2})
    path = tmp_path / "zero1.json"

    def notes(size: int) -> tuple[str, ...]:
        path.write_text(json.dumps({"train_batch_size": size}))
        return merged_with(spec, batch_sizes(spec.train, 2, sequence_parallel=2), path).notes

    assert notes(24) == ()
    assert notes(12) == (
        "zero1.json: train_batch_size 12, but the spec's 24 is used: global_batch_size × sequence_parallel "
        "2, since DeepSpeed counts examples by rank",
    )


def test_values_that_agree_are_silent_and_pass_strict(merge: Any) -> None:
    file = {
        "train_batch_size": 24,
        "gradient_clipping": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    assert merge(file, strict=True).notes == ()


def test_clipping_is_compared_with_what_happens(merge: Any) -> None:
    merged = merge({"zero_optimization": {"stage": 0}, "gradient_clipping": 1.0})
    assert merged.config["gradient_clipping"] == 0.0  # dsft clips
    assert merged.notes == ("zero3.json: sets parallel.zero_stage to 0 (in the spec: 1)",)


def test_the_file_decides_offload_precision_and_communication(merge: Any) -> None:
    file = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
    }
    merged = merge(file)
    assert merged.spec.parallel.offload_optimizer.device == "cpu"
    assert (merged.spec.train.precision, merged.spec.train.reduce_dtype) == ("bf16", "bf16")
    assert merged.config["zero_optimization"]["offload_optimizer"]["pin_memory"] is False
    assert merged.config["data_types"]["grad_accum_dtype"] == "fp32"
    assert merged.config["zero_force_ds_cpu_optimizer"] is True


def test_the_other_name_of_bf16_is_understood(merge: Any) -> None:
    merged = merge({"bfloat16": {"enabled": True}})
    assert merged.spec.train.precision == "bf16"
    assert merged.config["bf16"]["enabled"] is True and "bfloat16" not in merged.config


def test_a_file_without_offload_switches_it_off(merge: Any) -> None:
    merged = merge(
        {"zero_optimization": {"stage": 2}},
        parallel={"zero_stage": 3, "offload_optimizer": {"device": "cpu"}},
    )
    assert merged.spec.parallel.offload_optimizer.device == "none"
    assert "offload_optimizer" not in merged.config["zero_optimization"]


def test_the_file_decides_on_copies_of_the_parameters(merge: Any) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2}
    merged = merge({"zero_optimization": zero}, parallel={"zero_stage": 3})
    assert merged.spec.parallel.zero_hpz_partition_size == 2
    assert merged.config["zero_optimization"]["zero_hpz_partition_size"] == 2
    with pytest.raises(SpecError, match="2 is for ZeRO 3"):
        merge({"zero_optimization": zero | {"stage": 2}})


def test_an_empty_file_is_the_specs_own_configuration(merge: Any, make_spec: Any) -> None:
    spec = make_spec()
    assert merge({}).config == deepspeed_config(spec, batch_sizes(spec.train, 4))


@pytest.mark.parametrize(("file", "problem"), [
    ({"zero_optimisation": {"stage": 3}},
     "zero_optimisation: DeepSpeed does not know this key; did you mean"),
    ({"elasticity": {"enabled": True}}, "elasticity: DeepSpeed has removed this feature"),
    ({"fp16": {"enabled": True}}, "fp16.enabled: true, but dsft supports only false; set train.precision"),
    ({"prescale_gradients": True}, "prescale_gradients: true"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: dsft does not offer tensor parallelism"),
    *(
        ({feature: {"enabled": True}}, f"{feature}: {not_offered(feature)}")
        for feature in ("compile", "autotuning", "data_efficiency", "hybrid_engine")
    ),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size: dsft does not offer sequence parallelism by"),
    ({"zero_optimization": {"stage": 4}},
     "zero_optimization.stage: 4, but it must be 0, 1, 2 or 3; correct it"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: true, but it must be 0, 1, 2 or 3"),
    ({"zero_optimization": True}, "zero_optimization: true is not a section"),
    ({"zero_optimization": {"stage": 2, "sub_group_size": "auto"}},
     'zero_optimization.sub_group_size: "auto", but'),
    ({"communication_data_type": "fp8"}, "train.reduce_dtype: 'fp8'"),
    ('{"a": 1, "a": 2}', "has the key 'a' twice"),
    ({"zero_optimization": {"offload_optimizer": True}}, "offload_optimizer: true is not a section"),
    ({"zero_optimization": {"stage": 2, "overlap_comm": 1}}, "overlap_comm: 1, but it must be true or false"),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}}, '"5e8", but it must be a whole'),
    ({"zero_optimization": {"stage": 1.0}}, "zero_optimization.stage: 1.0, but it must be 0, 1, 2 or 3"),
    *(
        (
            {"zero_optimization": {"stage": 3, key: value}},
            f"zero_optimization.{key}: {value}, but it must"
        )
        for key, value in (
            ("reduce_bucket_size", 0),
            ("reduce_bucket_size", -5),
            ("allgather_bucket_size", 0),
            ("sub_group_size", 0),
            ("stage3_prefetch_bucket_size", -7),
            ("stage3_max_live_parameters", -1),
            ("stage3_max_reuse_distance", 0.5),
            ("reduce_bucket_size", 10**20),
            ("reduce_bucket_size", [5]),
        )
    ),
    ('{"zero_optimization": {"reduce_bucket_size": Infinity}}', "holds the number Infinity, which is not"),
    ({"data_types": {"grad_accum_dtype": "../../x"}}, '"../../x", but it must be "fp32", "fp16"'),
    ({"flops_profiler": {"enabled": True, "output_file": "/tmp/x"}}, '"/tmp/x", but it must be null'),
    ({"optimizer": {"type": "AdamW", "params": 3}}, "optimizer.params: 3, but it must be a section"),
    ({"bfloat16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states: "),
    ({"bfloat16": 3}, "bf16: 3 is not a section"),
    ('{"a":' * 100_000, "is nested more than 100 levels deep"),
    ("[" * 100_000, "is nested more than 100 levels deep"),
    ('{"steps_per_print": ' + "9" * 5_000 + "}", "holds an integer of more than 300 digits"),
    ('{"steps_per_print": 1e999}', "holds the number 1e999, which is not finite"),
    (" " * 2**20 + "{}", "is larger than 1,048,576 bytes"),
    ("{", "is not JSON at line 1"),
    ("[]", "is not a JSON object"),
])  # fmt: skip
def test_files_that_cannot_be_used(merge: Any, file: Any, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        merge(file)
    assert problem in str(error.value)


def test_a_number_of_the_file_is_kept_and_an_auto_is_sized_by_the_model(merge: Any) -> None:
    zero = {"stage": 2, "reduce_bucket_size": 1000, "allgather_bucket_size": "auto"}
    config = merge({"zero_optimization": zero}, facts=HostFacts(Elements(8_000_000, 8_000_000))).config
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert config["zero_optimization"]["allgather_bucket_size"] == 2_000_000


def test_a_file_with_a_disk_gets_the_runs_own_folder_and_the_models_buffers(merge: Any) -> None:
    disk = {"device": "nvme", "nvme_path": "/disk"}
    zero = {"stage": 3, "offload_param": {**disk, "buffer_count": 7}, "offload_optimizer": disk}
    own = {"offload_parameters": "/disk/own", "offload_optimizer": "/disk/own"}
    found = merge(
        {"zero_optimization": zero, "aio": {"queue_depth": 64}},
        facts=HostFacts(largest_part=3000, swap=own),
        train={"precision": "bf16"},
    )
    assert found.spec.parallel.offload_parameters.nvme_path == "/disk"
    parameters = found.config["zero_optimization"]["offload_param"]
    assert [parameters[key] for key in ("nvme_path", "buffer_count", "buffer_size")] == ["/disk/own", 7, 3000]
    assert found.config["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/disk/own"
    assert (found.config["aio"]["queue_depth"], found.config["aio"]["block_size"]) == (64, 1_048_576)


def test_without_pin_memory_in_the_file_the_host_decides(merge: Any) -> None:
    facts = HostFacts(pin=(False, "no room"))
    for section, expected in (({}, False), ({"pin_memory": True}, True)):
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu", **section}}
        config = merge({"zero_optimization": zero}, facts=facts).config
        assert config["zero_optimization"]["offload_optimizer"]["pin_memory"] is expected


def test_a_file_that_is_not_there(make_spec: Any, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="there is no such file"):
        merge_config_file(make_spec(), None, tmp_path / "absent.json")


def test_what_is_refused_or_left_out_are_keys_of_deepspeed() -> None:
    for name in (*SPEC_DECIDES, *FIXED):
        nested: Any = None
        for key in reversed(name.split(".")):
            nested = {key: nested}
        assert list(problems(nested)) == []
