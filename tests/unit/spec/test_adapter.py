"""A saved adapter's config against the spec that continues it."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsft.spec.load import load_spec
from tests.unit.spec.conftest import Write
from tests.unit.spec.test_load import messages

SAVED: dict[str, Any] = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 12, "lora_dropout": 0.1,
    "target_modules": ["v_proj", "q_proj"], "use_rslora": True,
    "use_dora": False, "modules_to_save": None, "bias": "none", "rank_pattern": {},
}  # fmt: skip


def save(**changed: Any) -> str:
    Path("saved").mkdir(exist_ok=True)
    Path("saved/adapter_config.json").write_text(json.dumps(SAVED | changed), encoding="utf-8")
    return "saved"


def test_what_is_left_out_is_taken_from_the_saved_adapter(write: Write) -> None:
    spec = load_spec(
        write(), [f"model.lora={{path: {save()}, dropout: 0.5, target_modules: [q_proj, v_proj]}}"]
    )
    lora = spec.model.lora
    assert (lora.rank, lora.alpha, lora.use_rslora, lora.modules_to_save) == (8, 12.0, True, ())
    assert (lora.dropout, lora.target_modules) == (0.5, ("q_proj", "v_proj"))  # of the training; in any order
    full = {
        "target_modules": ["model.layers.0.q_proj", "model.layers.1.q_proj"],
        "modules_to_save": ["m.lm_head"],
    }
    path = f"model.lora.path={save(**full)}"
    short = load_spec(
        write(), [path, "model.lora.target_modules=[q_proj]", "model.lora.modules_to_save=[lm_head]"]
    )
    assert short.model.lora and short.model.lora.target_modules == ("q_proj",)
    for wrong in ("[q_proj, v_proj]", "[model.layers.0.q_proj]", "[proj]"):
        assert f"{wrong} differs" in " ".join(messages(write(), path, f"model.lora.target_modules={wrong}"))


def test_pefts_target_parameters_are_experts_among_target_modules(write: Write) -> None:
    wanted = ["experts.down_proj", "experts.gate_up_proj"]
    mixture = "model.from_config={model_type: qwen3_moe}"
    path = f"model.lora.path={save(target_modules=['q_proj'], target_parameters=wanted)}"
    for given in ([], ["model.lora.target_modules=[q_proj, experts]"]):
        lora = load_spec(write(), [mixture, path, *given]).model.lora
        assert lora and lora.target_modules == (("q_proj", "experts") if given else (*wanted, "q_proj"))
    assert "[q_proj] differs" in " ".join(
        messages(write(), mixture, path, "model.lora.target_modules=[q_proj]")
    )
    for none in ([], None):
        path = f"model.lora.path={save(target_modules=none, target_parameters=wanted)}"
        lora = load_spec(write(), [mixture, path]).model.lora
        assert lora and lora.target_modules == tuple(wanted)


def test_a_contradiction_is_reported_with_both_values(write: Write) -> None:
    lora = f"model.lora={{path: {save()}, rank: 16, target_modules: [q_proj], use_dora: true}}"
    found = " ".join(messages(write(), lora))
    assert "model.lora.rank: 16 differs from the saved adapter's 8 (r in its adapter_config.json)" in found
    assert "[q_proj] differs from the saved adapter's [q_proj, v_proj]" in found
    assert "model.lora.use_dora: true differs from the saved adapter's false" in found


@pytest.mark.parametrize(("changed", "message"), [
    ({"peft_type": "IA3"}, "has peft_type 'IA3', but dsft can only continue plain LoRA"),
    ({"bias": "all"}, "has bias 'all'"),
    ({"rank_pattern": {"q_proj": 4}}, "has rank_pattern {'q_proj': 4}"),
    ({"r": "eight"}, "is not the config of a saved adapter"),
    ({"target_modules": "all-linear", "target_parameters": ["experts.down_proj"]}, "is not the config of a"),
])  # fmt: skip
def test_an_adapter_of_another_kind_is_refused(write: Write, changed: Any, message: str) -> None:
    assert message in " ".join(messages(write(), f"model.lora={{path: {save(**changed)}}}"))


def test_a_folder_without_an_adapter_is_refused(write: Write) -> None:
    assert "'nowhere' is not a folder" in messages(write(), "model.lora={path: nowhere}")[0]
    Path("empty").mkdir()
    assert (
        "'empty' is a folder without adapter_config.json" in messages(write(), "model.lora={path: empty}")[0]
    )


def test_an_adapter_in_the_models_place_is_refused(write: Write) -> None:
    [found] = messages(write(), f"model={{name_or_path: {save()}}}")
    assert "give its base model here, and this folder in model.lora.path" in found
