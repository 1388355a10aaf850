"""Warnings about unusual values, and refusals of what the named GPU or the named folder cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsft.errors import SpecError
from dsft.spec.load import load_spec
from dsft.spec.rules import warnings
from tests.specs import minimal_spec

PRETRAINED = {"name_or_path": "a/b"}
LORA = PRETRAINED | {"lora": {"rank": 8}}
FRESH = {"from_config": {"model_type": "llama"}}
SPEC = """name: small
task: sft
model: {name_or_path: a/b}
data: {train: [{path: "builtin:quickstart"}], max_length: 128}
train: {micro_batch_size: 2, accumulation_steps: 4}
optim: {learning_rate: 1e-5}
"""


def test_a_loss_that_the_models_config_asks_for_gives_a_warning(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC.replace("a/b", f"{tmp_path}, tokenizer: a/b"))
    for keys, count in (
        ({"model_type": "mixtral", "output_router_logits": True}, 1),
        ({"model_type": "mixtral", "output_router_logits": False}, 0),
        ({"model_type": "qwen3_vl_moe", "text_config": {"output_router_logits": True}}, 1),
    ):
        (tmp_path / "config.json").write_text(json.dumps(keys))
        found = warnings(load_spec(tmp_path / "spec.yaml"))
        assert [warning.startswith("the model's config.json has output_router") for warning in found] == [
            True
        ] * count
        assert warnings(load_spec(tmp_path / "spec.yaml"), check_files=False) == ()


def rate_warnings(task: str, model: dict[str, Any], rate: float, optimizer: str = "adamw") -> list[str]:
    data, optim = {"train": [{"path": "rows.jsonl"}]}, {"learning_rate": rate, "name": optimizer}
    spec = minimal_spec(task, model=model, data=data, optim=optim)
    return [warning for warning in warnings(spec) if "learning_rate" in warning]


@pytest.mark.parametrize(("task", "model", "optimizer", "good", "low", "high", "usual"), [
    ("sft", PRETRAINED, "adamw", 2e-5, 1e-8, 1e-3, "full fine-tuning, 1e-06 to 5e-05"),
    ("sft", LORA, "adamw", 2e-4, 1e-6, 5e-3, "LoRA, 2e-05 to 0.0005"),
    ("dpo", PRETRAINED, "adamw", 5e-7, 1e-8, 1e-4, "preference training of all weights, 1e-07 to 1e-05"),
    ("dpo", LORA, "adamw", 5e-6, 1e-7, 1e-3, "preference training with LoRA, 1e-06 to 0.0001"),
    ("pretrain", PRETRAINED, "adamw", 3e-4, 1e-7, 5e-3, "continued pretraining, 5e-06 to 0.0005"),
    ("sft", FRESH, "adamw", 3e-3, 1e-6, 1.0, "AdamW on newly initialized weights, 6e-05 to 0.003"),
    ("sft", PRETRAINED, "sgd", 0.1, 1e-6, 10.0, "SGD, 0.0001 to 1"),
])  # fmt: skip
def test_a_learning_rate_far_outside_the_usual_range_is_warned_about(
    task: str, model: dict[str, Any], optimizer: str, good: float, low: float, high: float, usual: str
) -> None:
    assert rate_warnings(task, model, good, optimizer) == []
    for rate, side in ((low, "below"), (high, "above")):
        (warning,) = rate_warnings(task, model, rate, optimizer)
        assert f"is far {side} the usual range for {usual}; check it" in warning


def refusal(path: Path, *overrides: str) -> str:
    (path / "spec.yaml").write_text(SPEC)
    with pytest.raises(SpecError) as raised:
        load_spec(path / "spec.yaml", overrides)
    return str(raised.value)


@pytest.mark.parametrize("name", ["T4", "Tesla T4", "Tesla V100-SXM2-16GB", "GeForce RTX 2080 Ti", "P100"])
def test_bf16_is_refused_for_gpus_that_have_none(name: str, tmp_path: Path) -> None:
    gpu = f"cluster={{hosts: {{a: 1}}, accelerator: {{name: {name}}}}}"
    assert refusal(tmp_path, gpu).endswith(
        f"train.precision: 'bf16' cannot be computed on {name}: it needs compute capability 8.0 (Ampere, "
        "such as A100 or RTX 3090); use fp16 or fp32"
    )
    assert load_spec(tmp_path / "spec.yaml", [gpu, "train.precision=fp32"]).train.precision == "fp32"


@pytest.mark.parametrize("name", ["A100", "H200", "RTX 4090", "RTX A4000", "L40S", "cpu", "RTX 6000 Ada"])
def test_bf16_is_allowed_on_other_devices(name: str, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(SPEC)
    load_spec(tmp_path / "spec.yaml", [f"cluster={{hosts: {{a: 1}}, accelerator: {{name: {name}}}}}"])


def test_a_misspelled_folder_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models" / "qwen3-tiny").mkdir(parents=True)
    message = refusal(tmp_path, "model.name_or_path=models/qwen3-tny")
    assert message.endswith(
        "'models/qwen3-tny' does not exist, although models is a folder here; write models/qwen3-tiny, or, "
        "if the model is on the hub, download it first: hf download models/qwen3-tny"
    )
    assert load_spec("spec.yaml", ["model.name_or_path=owner/qwen3-tny"])
    (tmp_path / "cache" / "models--models--qwen3-tny").mkdir(parents=True)
    assert load_spec("spec.yaml", ["model.name_or_path=models/qwen3-tny"])


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    folder = f"model.name_or_path={tmp_path / 'model'}"
    message = refusal(tmp_path, folder)
    assert "has no tokenizer files (such as tokenizer.json); copy them from the model" in message
    assert load_spec(tmp_path / "spec.yaml", [folder, "model.tokenizer=a/b"])
    (tmp_path / "model" / "tokenizer.json").touch()
    assert load_spec(tmp_path / "spec.yaml", [folder])
