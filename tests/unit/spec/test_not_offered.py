import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from dsft.errors import SpecError
from dsft.plan.config_file import merge_config_file
from dsft.plan.ds_config import deepspeed_config
from dsft.spec.aliases import ALIASES, VALUES, fields, keys, suggestion
from dsft.spec.architecture import model_findings
from dsft.spec.not_offered import NOT_OFFERED, feature_of_key, feature_of_value, in_json, is_off
from dsft.spec.task import TASKS
from tests.specs import minimal_spec

SPEC = minimal_spec("sft", model={"name_or_path": "a/b"})


def test_no_key_or_alias_asks_for_a_feature_that_is_not_offered() -> None:
    names = {key.rpartition(".")[2] for key in (*keys(), *ALIASES)}
    assert [name for name in names if feature_of_key(name)] == []


@pytest.mark.parametrize("one", NOT_OFFERED, ids=lambda one: one.title[:30])
def test_each_is_refused_by_its_names(one: Any) -> None:
    for name in one.keys.split():
        for key in (name, f"use_{name}", f"{name}_size"):
            assert suggestion("parallel", key.upper().replace("_", "-"), 2) == one.clause(), key
        assert suggestion("parallel", name, False) == "leave it out", name
    for key, value in itertools.product(one.of, one.values.split()):
        assert feature_of_value(key, value) is one, (key, value)
    assert one.clause().startswith("dsft does not offer ") and "; " in one.clause()


@pytest.mark.parametrize(("key", "title"), [
    ("load_in_4bit", "QLoRA"),
    ("bnb_4bit_quant_type", "QLoRA"),
    ("tensor_model_parallel_size", "tensor parallelism"),
    ("ring_attention", "context parallelism"),
    ("fsdp_transformer_layer_cls_to_wrap", "parallel engines other"),
    ("expert_model_parallel_size", "expert parallelism"),
    ("fp8_enable_fsdp_float8_all_gather", "parallel engines other"),
    ("freeze_vision_tower", "training on images"),
    ("zero_quantized_weights", "other ways to shard"),
    ("ppo_epochs", "training with generated"),
])  # fmt: skip
def test_names_in_other_tools(key: str, title: str) -> None:
    assert suggestion("", key, 4).startswith(f"dsft does not offer {title}")


def test_a_name_fits_whole_words_only() -> None:
    for key, ours in (("tokenizer_sp", "model.tokenizer"), ("warmup_ep", "optim.warmup_steps")):
        assert suggestion("train", key, 1) == f"did you mean {ours}?"
    assert suggestion("", "pipeline_model_parallel_size", 2) == "did you mean parallel.pipeline_stages?"
    assert feature_of_key("spam") is None and feature_of_key("tpu") is None
    assert feature_of_value("task", "pretrained") is None


def test_values_of_other_tools_name_the_specs_own() -> None:
    for key, values in VALUES.items():
        annotation = fields()[key].annotation
        offered = [choice for part in (annotation, *get_args(annotation)) for choice in get_args(part)]
        offered = [choice for choice in (*offered, *get_args(annotation)) if isinstance(choice, str)]
        offered += TASKS if key == "task" else []
        assert {value.split()[0] for value in values.values()} <= set(offered), key


def test_values_of_keys_that_mean_something_else() -> None:
    assert suggestion("", "adapter", "QLoRA").startswith(
        "dsft does not offer QLoRA by other keys than model.quantize"
    )
    assert suggestion("", "adapter", "lora") == "did you mean model.lora?"
    tasks = "; the tasks are sft, pretrain, dpo, kto, reward, classify or distill"
    assert tasks in suggestion("", "stage", "ppo")
    assert feature_of_value("optim.name", "paged-adamw-8bit") is feature_of_key("galore_rank") is not None
    assert feature_of_value("optim.name", "adamw") is None and feature_of_value("task", "dpo") is None


@pytest.mark.parametrize("key", [key for one in NOT_OFFERED for key in one.in_json.split()])
def test_a_file_that_switches_one_on_is_refused(tmp_path: Path, key: str) -> None:
    file: Any = {"enabled": True} if "." not in key and not key.endswith("_size") else 4
    for part in reversed(key.split(".")):
        file = {part: file}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    with pytest.raises(SpecError) as error:
        merge_config_file(SPEC, None, path)
    assert [problem.where for problem in error.value.problems] == [key]


def test_a_file_that_switches_all_of_them_off_is_accepted(tmp_path: Path) -> None:
    file = {
        "sequence_parallel_size": 1,
        "tensor_parallel": {"autotp_size": 0},
        "compile": {"enabled": False, "backend": "inductor"},
        "zero_optimization": {
            "stage": 3,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "offload_optimizer": {"device": "cpu", "ratio": 1.0},
        },
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    spec, decided = merge_config_file(SPEC, None, path)
    config = deepspeed_config(spec, None, file=decided)
    assert not {"compile", "tensor_parallel", "sequence_parallel_size"} & config.keys()
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 1


def test_values_that_switch_a_feature_off() -> None:
    assert all(is_off(value) for value in (None, False, 0, 1, 1.0, "auto", {}, {"a": {"b": 0}}))
    assert not any(is_off(value) for value in (True, 2, 0.5, "inductor", {"enabled": True}, {"a": [1]}))
    assert list(in_json({"zero_optimization": None})) == []


def test_a_model_whose_weights_are_quantized() -> None:
    (found,) = model_findings(SPEC, {"quantization_config": {"quant_method": "mxfp4"}})
    assert "('mxfp4')" in found.message
    assert list(model_findings(SPEC, {"quantization_config": None})) == []


def test_a_multimodal_config_is_judged_by_its_text_model() -> None:
    spec = SPEC.model_copy(update={"parallel": SPEC.parallel.model_copy(update={"pipeline_stages": 2})})
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2}
    assert list(model_findings(spec, {"model_type": "gemma3", "text_config": text})) == []
    assert (
        list(model_findings(spec, {"model_type": "qwen2_5_vl", "vision_config": {}, "num_hidden_layers": 2}))
        == []
    )
    (found,) = model_findings(spec, {"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}})
    assert "looks up tokens again" in found.message
