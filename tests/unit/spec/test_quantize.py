"""What model.quantize and moments in 8 bits are refused with, by name."""

from typing import Any

import pytest

from dsft.spec.combinations import combinations
from tests.specs import minimal_spec

MODEL = {"name_or_path": "owner/name", "lora": {"rank": 4}, "quantize": "nf4"}
SAVED = {"rank": 4, "modules_to_save": ["up_proj"]}


def found(task: str = "sft", **sections: Any) -> dict[str, str]:
    spec = minimal_spec(task, **sections | {"model": MODEL | sections.get("model", {})})
    return {".".join(map(str, one.path)): one.message for one in combinations(spec)}


@pytest.mark.parametrize(("sections", "reason"), [
    ({"model": {"lora": None}}, "add model.lora"),
    ({"model": {"from_config": {"model_type": "llama"}, "name_or_path": None}}, "give name_or_path"),
    ({"model": {"lora": {"rank": 4, "use_dora": True, "dropout": 0.1}}},
     "with the dropout of DoRA, which keeps all weights dequantized"),
    ({"model": {"compile": True}}, "not supported with model.compile; set that to false"),
    ({"train": {"precision": "fp16"}}, "not supported with train.precision 'fp16'; set that to bf16"),
    ({"parallel": {"zero_stage": 3, "offload_parameters": {"device": "nvme", "nvme_path": "/nvme"}}},
     "not supported with parallel.offload_parameters.device 'nvme'"),
    ({"task": "dpo", "model": {"lora": SAVED}},
     "modules_to_save is not supported with dpo.reference precomputed, which would quantize"),
])  # fmt: skip
def test_what_is_not_supported_is_refused(sections: dict[str, Any], reason: str) -> None:
    assert reason in found(**sections)["model.quantize"]


@pytest.mark.parametrize(("sections", "reason"), [
    ({"dpo": {"reference_quantize": "nf4"}}, "has no effect without reference_model"),
    ({"dpo": {"reference_quantize": "nf4", "reference": "adapter"}}, "has no effect with reference adapter"),
    ({"train": {"precision": "fp16"}}, "not supported with train.precision 'fp16'; set that to bf16"),
])  # fmt: skip
def test_a_reference_in_4_bits_is_refused_where_it_is_not_supported(
    sections: dict[str, Any], reason: str
) -> None:
    other = {"dpo": {"reference_model": "owner/other", "reference_quantize": "nf4"}}
    key = "dpo.reference_quantize"
    assert key not in found("dpo", model={"quantize": None}, **other)
    assert set(found("distill", distill=other["dpo"] | {"reference_model": None})) == {
        "distill.reference_model"
    }
    assert reason in found("dpo", model={"quantize": None}, **other | sections)[key]


def test_skipping_weights_without_quantizing_is_refused() -> None:
    skip = {"quantize_skip": ["*.down_proj.weight"]}
    assert "model.quantize_skip" not in found(model=skip)
    message = found(model={"quantize": None} | skip)["model.quantize_skip"]
    assert message.startswith("['*.down_proj.weight'] ")
    assert message.endswith("has no effect without model.quantize; add model.quantize: nf4, or leave it out")


@pytest.mark.parametrize("sections", [
    {},
    {"parallel": {"zero_stage": 3}, "data": {"train": [{"path": "builtin:quickstart"}], "packing": True}},
    {"task": "dpo", "dpo": {"reference": "adapter"}},
    {"task": "dpo", "dpo": {"loss_type": "orpo"}},
    {"task": "dpo"},
    {"task": "dpo", "dpo": {"reference": "live"}},
    {"task": "dpo", "dpo": {"reference_model": "owner/other"}, "model": {"lora": SAVED}},
    {"task": "dpo", "model": {"lora": SAVED | {"path": "adapter"}}},
    {"parallel": {"zero_stage": 1, "pipeline_stages": 2}, "train": {"precision": "fp32"}},
    {"parallel": {"zero_stage": 3, "sequence_parallel": 2, "offload_parameters": {"device": "cpu"}}},
])  # fmt: skip
def test_what_is_supported_is_not(sections: dict[str, Any]) -> None:
    assert "model.quantize" not in found(**sections)


@pytest.mark.parametrize(("optim", "sections", "key", "reason"), [
    ({}, {"parallel": {"offload_optimizer": {"device": "cpu"}}}, "optim.name",
     "is not supported with parallel.offload_optimizer.device 'cpu'; use adamw"),
    ({"momentum": 0.9}, {}, "optim.momentum", "has no effect with adamw_8bit, whose momentum"),
])  # fmt: skip
def test_moments_in_8_bits(optim: dict[str, Any], sections: dict[str, Any], key: str, reason: str) -> None:
    adamw = {"learning_rate": 1e-4, "name": "adamw_8bit"}
    assert key not in found(optim=adamw)
    assert reason in found(optim=adamw | optim, **sections)[key]
