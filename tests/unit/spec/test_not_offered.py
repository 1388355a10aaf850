from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsft.errors import SpecError
from dsft.plan.config_file import merge_config_file
from dsft.spec.aliases import ALIASES, LOCAL_ALIASES, NO_KEY_FOR_IT, keys, suggestion
from dsft.spec.not_offered import NOT_OFFERED, config_findings, in_json, is_off, of_key, of_value
from dsft.spec.schema import Spec

SPEC = Spec.model_validate(
    {
        "name": "x",
        "task": "sft",
        "model": {"name_or_path": "a/b"},
        "data": {"train": [{"path": "builtin:quickstart"}]},
        "train": {"micro_batch_size": 1, "accumulation_steps": 1},
        "optim": {"learning_rate": 1.0},
    }
)


def test_every_name_stands_once_and_is_no_key_of_ours() -> None:
    names = [key for one in NOT_OFFERED for key in one.keys.split()]
    assert sorted(names) == sorted(set(names))
    ours = {key.rpartition(".")[2] for key in keys()}
    assert not set(names) & (ours | set(ALIASES) | set(LOCAL_ALIASES) | set(NO_KEY_FOR_IT))
    values = [
        (key, value) for one in NOT_OFFERED for key, text in one.values.items() for value in text.split()
    ]
    assert sorted(values) == sorted(set(values))


@pytest.mark.parametrize("one", NOT_OFFERED, ids=lambda one: one.title[:30])
def test_each_is_refused_by_its_names(one: Any) -> None:
    for key in one.keys.split():
        assert suggestion("parallel", key.upper().replace("_", "-"), 2) == one.clause(), key
        assert suggestion("parallel", key, False) == "leave it out", key
    assert one.clause().count(" is not offered; ") == 1


def test_values_of_keys_that_mean_something_else() -> None:
    assert suggestion("", "adapter", "QLoRA").startswith(
        "QLoRA and other training on quantized weights is not"
    )
    assert suggestion("", "adapter", "lora") == "did you mean model.lora?"
    assert suggestion("", "stage", "ppo").endswith("the tasks are sft, pretrain and dpo")
    assert of_value("optim.name", "paged-adamw-8bit") is of_key("galore_rank")
    assert of_value("optim.name", "adamw") is None and of_value("task", "dpo") is None


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


def test_a_file_with_all_of_it_off_is_taken(tmp_path: Path) -> None:
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
    merged = merge_config_file(SPEC, None, path)
    assert not {"compile", "tensor_parallel", "sequence_parallel_size"} & merged.config.keys()
    assert merged.config["zero_optimization"]["zero_hpz_partition_size"] == 1


def test_what_is_off() -> None:
    assert all(is_off(value) for value in (None, False, 0, 1, 1.0, "auto", {}, {"a": {"b": 0}}))
    assert not any(is_off(value) for value in (True, 2, 0.5, "inductor", {"enabled": True}, {"a": [1]}))
    assert list(in_json({"zero_optimization": None})) == []


def test_a_model_whose_weights_are_quantized() -> None:
    (found,) = config_findings({"quantization_config": {"quant_method": "mxfp4"}})
    assert "('mxfp4')" in found.message
    assert list(config_findings({"quantization_config": None})) == []
