"""What the reference is, where it is stored, and its DeepSpeed JSON."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dsft.generate.files import drift, files
from dsft.plan.census import Elements
from dsft.plan.ds_keys import problems
from dsft.plan.reference import (
    reference_config,
    reference_entries,
    reference_layout,
    reference_line,
    reference_model,
    reference_stage,
)
from dsft.spec.layout import Layout
from dsft.spec.schema import Experts, Spec
from tests.specs import minimal_spec


def spec(model: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **dpo: Any) -> Spec:
    return minimal_spec(
        "dpo", model={"name_or_path": "start", **(model or {})}, data={"train": [{"path": "pairs.jsonl"}]},
        train={"global_batch_size": 4}, optim={"learning_rate": 1e-5}, parallel=parallel or {}, dpo=dpo,
    )  # fmt: skip


def test_nothing_of_the_reference_is_trained() -> None:
    trained = {"gradient_checkpointing": True, "trainable": ["*norm*"], "add_tokens": ["<x>"]}
    model = reference_model(spec(trained))
    assert (model.name_or_path, model.trainable, model.gradient_checkpointing) == ("start", None, False)
    assert model.add_tokens == ("<x>",)  # it reads the same tokens


def test_a_balance_loss_is_the_policys_alone() -> None:
    balanced = {"balance": "sequence", "balance_weight": 1e-4, "implementation": "eager"}
    assert reference_model(spec({"experts": balanced})).experts == Experts(implementation="eager")
    other = spec({"experts": balanced}, reference_model="other")  # which may be dense
    assert reference_model(other).experts == Experts()


def test_a_new_adapter_has_no_part_in_the_reference_and_a_continued_one_has() -> None:
    assert reference_model(spec({"lora": {"rank": 4}})).lora is None
    lora = reference_model(spec({"lora": {"rank": 4, "path": "adapter", "dropout": 0.1}})).lora
    assert lora is not None and (lora.path, lora.rank, lora.dropout) == ("adapter", 4, 0.0)


def test_another_reference_reads_the_policys_tokens() -> None:
    model = reference_model(spec({"lora": {"path": "adapter"}}, reference_model="other"))
    assert (model.name_or_path, model.tokenizer, model.lora) == ("other", "start", None)
    assert reference_model(spec({"tokenizer": "words"}, reference_model="other")).tokenizer == "words"
    fresh = {"name_or_path": None, "from_config": {"model_type": "llama"}}
    model = reference_model(spec(fresh, reference_model="other"))
    assert (model.name_or_path, model.from_config) == ("other", None)


@pytest.mark.parametrize(
    ("policy", "asked", "stage"),
    [(0, None, 0), (1, None, 0), (2, None, 0), (3, None, 3), (3, 0, 0), (1, 3, 3)],
)
def test_a_frozen_model_is_whole_or_sharded(policy: int, asked: int | None, stage: int) -> None:
    assert reference_stage(spec(parallel={"zero_stage": policy}, reference_zero_stage=asked)) == stage


def test_the_reference_has_the_policys_stages_by_default() -> None:
    staged = {"pipeline_stages": 2}
    assert reference_layout(spec(parallel=staged), 4) == Layout(4, 2)
    assert reference_layout(spec(parallel=staged, reference_zero_stage=0), 4) == Layout(4, 1)
    assert reference_layout(spec(parallel=staged, reference_zero_stage=3), 3) == Layout(3, 1)


@pytest.mark.parametrize(("made", "words"), [
    (spec(), "the policy as it starts, whole on every rank, since ZeRO 2 shards nothing"),
    (spec(reference_zero_stage=0), "whole on every rank (dpo.reference precomputed)"),
    (spec(parallel={"zero_stage": 3}), "sharded over all ranks (ZeRO 3)"),
    (spec(reference_zero_stage=3, reference_offload="cpu", reference="live"),
     "sharded over all ranks (ZeRO 3), in host memory (dpo.reference live)"),
    (spec(parallel={"pipeline_stages": 2}), "in the policy's 2 pipeline stages"),
    (spec(reference_model="other"), "other, another checkpoint than the policy's start"),
    (spec(reference_model="other", reference_quantize="fp4"), "(dpo.reference_model), in fp4, whole"),
    (spec({"quantize": "nf4", "lora": {}}), "the model without its adapter, in nf4, whole on every rank"),
    (spec({"lora": {}}, reference="adapter"), "without its adapter, by the policy's own engine"),
    (spec({"lora": {"path": "a"}}), "a frozen copy of the adapter that training starts from"),
])  # fmt: skip
def test_the_line_on_the_reference_and_its_reason(made: Spec, words: str) -> None:
    assert words in reference_line(made)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deepspeed_knows_every_key_and_none_is_left_to_it(stage: int, offload: str, precision: str) -> None:
    made = spec(reference_zero_stage=stage, reference_offload=offload)
    made = made.model_copy(update={"train": made.train.model_copy(update={"precision": precision})})
    config = reference_config(made)
    assert list(problems(config)) == []
    assert not [entry for entry in reference_entries(made) if entry.value == "auto"]
    assert config["zero_optimization"]["stage"] == stage
    assert config["bf16"]["enabled"] == (precision == "bf16")
    assert ("offload_param" in config["zero_optimization"]) == (stage == 3 and offload == "cpu")
    assert all(dataclasses.astuple(entry)[2] for entry in reference_entries(made))


def test_what_is_gathered_ahead_follows_the_references_own_size() -> None:
    sized = reference_config(spec(reference_zero_stage=3), Elements(whole=40_000_000, trained=40_000_000))
    assert sized["zero_optimization"]["stage3_prefetch_bucket_size"] == 10_000_000
    assert "optimizer" not in sized and "offload_param" not in sized["zero_optimization"]


@pytest.mark.parametrize(("dpo", "parallel", "is_there"), [
    ({"reference": "live"}, {}, True),
    ({"reference": "live", "reference_zero_stage": 3}, {"pipeline_stages": 2}, True),
    ({"reference": "live"}, {"pipeline_stages": 2}, False),
    ({}, {}, False),
    ({"reference": "live", "loss_type": "simpo"}, {}, False),
])  # fmt: skip
def test_a_live_reference_gets_a_file_of_its_own(
    dpo: dict[str, Any], parallel: dict[str, Any], is_there: bool, make_spec: Any, tmp_path: Path
) -> None:
    texts = files(make_spec(task="dpo", dpo=dpo, parallel=parallel), tmp_path / "small.yaml", tmp_path)
    name = "ds_configs/small.reference.json"
    assert (name in texts) == is_there
    if is_there:
        assert json.loads(texts[name])["zero_optimization"]["stage"] == dpo.get("reference_zero_stage", 0)
        assert drift(texts, tmp_path).count("reference.json (on disk)") == 1
