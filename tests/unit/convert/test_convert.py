"""`dsft convert`: what a config of another tool means is what the spec says, key by key; nothing is left out
without a reason; the spec is valid. The configs have the keys and values that users of these tools write."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dsft.cli import app
from dsft.convert.arguments import Tool
from dsft.convert.command import TOOLS, Converted, convert_file, listed
from dsft.errors import MissingInputError, SpecError
from dsft.spec.aliases import LEFT_OUT, keys
from dsft.spec.load import load_spec
from dsft.spec.schema import Reward, Spec

ROWS = '{"instruction": "a", "input": "", "output": "b"}\n'


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in ("identity.json", "pairs.json", "wiki.txt"):
        Path("data", name).write_text(ROWS)
    info: dict[str, Any] = {
        "identity": {"file_name": "identity.json"},
        "chats": {
            "file_name": "identity.json", "formatting": "sharegpt", "num_samples": 7,
            "columns": {"messages": "turns", "system": "sys"},
            "tags": {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "bot"},
        },
        "openai": {
            "file_name": "identity.json", "formatting": "sharegpt", "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
        },
        "pairs": {
            "file_name": "pairs.json", "ranking": True, "formatting": "sharegpt",
            "columns": {"messages": "conversations", "chosen": "good", "rejected": "bad"},
        },
        "tagged": {
            "file_name": "identity.json", "formatting": "sharegpt",
            "columns": {"messages": "messages", "kto_tag": "label"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user"},
        },
        "wiki": {"file_name": "wiki.txt", "columns": {"prompt": "text"}},
        "hub": {"hf_hub_url": "owner/name", "subset": "en", "split": "train"},
        "elsewhere": {"ms_hub_url": "owner/name"},
    }  # fmt: skip
    Path("data/dataset_info.json").write_text(json.dumps(info))


def converted(config: dict[str, Any], *args: Any, **options: Any) -> tuple[Spec, Converted]:
    file = Path("config.yaml")
    file.write_text(yaml.safe_dump(config))
    out = Path("spec.yaml")
    out.unlink(missing_ok=True)
    done = convert_file(file, *args, out=out, **options)
    assert done.mistakes is None, f"{done.mistakes}\n{out.read_text()}"
    spec = load_spec(out, check_files=False)
    for name, value in config.items():  # nothing goes without a trace
        assert value in (None, 0, False, "full", "steps", "auto", "none") or name in out.read_text(), name
    return spec, done


def assert_has(section: Any, wanted: str) -> None:
    """Assert that a section of a spec has these values. wanted: keys and values as YAML."""
    values = section.model_dump(mode="json")
    expected = yaml.safe_load(f"{{{wanted}}}")
    assert {key: values[key] for key in expected} == expected


TRL = {"model_name_or_path": "a/b", "dataset_name": "x/y"}
SWIFT = {"model": "a/b", "dataset": "data/identity.json"}
SFT = {"stage": "sft", "model_name_or_path": "a/b"}
LLAMA_FACTORY = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507", "trust_remote_code": True, "stage": "sft",
    "do_train": True, "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all",
    "dataset": "identity,chats", "template": "qwen3_nothink", "cutoff_len": 2048, "max_samples": 1000,
    "preprocessing_num_workers": 16, "output_dir": "saves/qwen3-4b/lora/sft", "logging_steps": 10,
    "save_steps": 500, "plot_loss": True, "report_to": "none", "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8, "learning_rate": "1.0e-4", "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "bf16": True, "resume_from_checkpoint": None,
    "val_size": 0.1, "eval_strategy": "steps", "eval_steps": 500, "deepspeed": "ds_z3_offload_config.json",
}  # fmt: skip


def test_llamafactory() -> None:
    spec, done = converted(LLAMA_FACTORY)
    assert (spec.name, spec.output_dir, spec.task) == ("sft", "saves/qwen3-4b/lora", "sft")
    assert_has(spec.model, "name_or_path: Qwen/Qwen3-4B-Instruct-2507, gradient_checkpointing: true")
    assert_has(spec.model.lora, "rank: 8, alpha: 16, dropout: 0, target_modules: all-linear")
    assert_has(spec.train, "micro_batch_size: 1, accumulation_steps: 8, global_batch_size: null")
    assert_has(spec.train, "num_train_epochs: 3, precision: bf16, eval_every: 500, log_every: 10")
    assert_has(spec.optim, "name: adamw, learning_rate: 1.0e-4, weight_decay: 0, lr_scheduler_type: cosine")
    assert_has(spec.optim, "warmup_ratio: 0.1, warmup_steps: null")
    one, two = spec.data.train
    assert_has(one, "path: data/identity.json, columns: {}, max_rows: 1000")
    assert_has(two, "columns: {conversations: turns, system: sys}, max_rows: 1000")
    assert_has(spec.data, "max_length: 2048, on_too_long: truncate, eval_fraction: 0.1")
    assert (spec.parallel.zero_stage, spec.parallel.offload_optimizer.device) == (3, "cpu")
    assert (spec.checkpoint.every, spec.wandb.mode) == (500, "disabled")
    assert "'bot'" in done.left["dataset_info.json, chats, assistant_tag"]
    assert "dsft preview" in done.left["template"]
    assert "never runs code" in done.left["trust_remote_code"]


@pytest.mark.parametrize(("more", "thinking"), [
    ({}, "empty"),  # dsft's default: templates of another family have no thoughts
    ({"template": "qwen3"}, "keep"),
    ({"template": "deepseekr1", "mask_history": True}, "empty"),
    ({"template": "qwen3", "mask_history": True, "preserve_thinking": True}, "keep"),
    ({"template": "qwen3", "enable_thinking": False}, "strip"),
    ({"enable_thinking": True, "mask_history": True}, "empty"),
])  # fmt: skip
def test_thoughts_of_llamafactory(more: dict[str, Any], thinking: str) -> None:
    spec, _ = converted({**LLAMA_FACTORY, **more})
    assert spec.data.thinking == thinking


def test_defaults_of_the_tool_are_written_out() -> None:
    """What the config leaves out is what that tool would have taken, not what dsft takes."""
    spec, _ = converted({**SFT, "dataset": "openai", "cutoff_len": 64})
    assert_has(spec.train, "micro_batch_size: 8, accumulation_steps: 1, num_train_epochs: 3, precision: fp32")
    assert_has(spec.optim, "learning_rate: 5.0e-5, lr_scheduler_type: linear")
    assert spec.model.lora is not None and spec.data.train[0].columns == {}
    datasets = [{"path": "x/y", "type": "alpaca"}]
    spec, _ = converted({"base_model": "a/b", "datasets": datasets, "learning_rate": 1e-4})
    assert (spec.train.micro_batch_size, spec.data.max_length, spec.data.on_too_long) == (1, 512, "drop")
    assert (spec.optim.lr_scheduler_type, spec.optim.warmup_ratio, spec.model.lora) == ("cosine", 0.03, None)
    spec, _ = converted(TRL)
    assert (spec.optim.learning_rate, spec.data.max_length, spec.train.precision) == (2e-5, 1024, "bf16")
    assert spec.data.train_on == "all"  # TRL trains on all turns; the comment says so
    spec, _ = converted({"model": "a/b", "dataset": ["x/y#500"], "tuner_type": "full"})
    assert (spec.optim.learning_rate, spec.optim.weight_decay, spec.optim.betas) == (1e-5, 0.1, (0.9, 0.95))
    assert (spec.train.global_batch_size, spec.train.micro_batch_size) == (16, 1)
    assert (spec.data.train[0].path, spec.data.train[0].max_rows) == ("x/y", 500)


def test_llamafactory_pairs_and_texts() -> None:
    pairs = {**SFT, "stage": "dpo", "dataset": "pairs", "pref_beta": 0.2, "pref_ftx": 0.5}
    spec, _ = converted({**pairs, "pref_loss": "sigmoid", "lora_dropout": 0.05})
    assert_has(spec.dpo, "beta: 0.2, sft_weight: 0.5, reference: adapter")
    assert_has(spec.model.lora, "dropout: 0")
    (source,) = spec.data.train
    assert_has(source, "format: preference, columns: {chosen: good, rejected: bad}")
    full = {"finetuning_type": "full"}
    spec, _ = converted({**pairs, **full, "pref_loss": "simpo", "simpo_gamma": 1.0, "pref_ftx": 0})
    assert_has(spec.dpo, "loss_type: simpo, simpo_gamma: 1.0")
    spec, _ = converted({**SFT, **full, "stage": "pt", "dataset": "wiki"})
    assert (spec.task, spec.data.packing, spec.data.train[0].columns) == ("pretrain", True, {})
    spec, _ = converted({**SFT, "dataset": "hub", "interleave_probs": "1.0"})
    assert (spec.data.train[0].path, spec.data.train[0].weight) == ("owner/name:en:train", 1.0)


AXOLOTL = {
    "base_model": "NousResearch/Llama-3.2-1B",
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "val_set_size": 0.1, "output_dir": "./outputs/lora-out", "adapter": "lora", "sequence_len": 2048,
    "sample_packing": True, "eval_sample_packing": True, "lora_r": 16, "lora_alpha": 32,
    "lora_dropout": 0.05, "lora_target_modules": ["gate_proj", "q_proj"], "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "num_epochs": 1, "optimizer": "adamw_8bit", "lr_scheduler": "cosine", "learning_rate": 0.0002,
    "bf16": "auto", "tf32": False, "gradient_checkpointing": True, "logging_steps": 1,
    "attn_implementation": "flash_attention_2", "warmup_ratio": 0.1, "evals_per_epoch": 4,
    "saves_per_epoch": 1, "weight_decay": 0.0, "wandb_project": None,
    "special_tokens": {"pad_token": "<|end_of_text|>"}, "loss_watchdog_threshold": 5.0,
}  # fmt: skip


def test_axolotl() -> None:
    spec, done = converted(AXOLOTL)
    assert (spec.name, spec.output_dir, spec.data.packing) == ("lora-out", "outputs", True)
    assert spec.data.train[0].path == "teknium/GPT4-LLM-Cleaned:train"
    assert (spec.train.micro_batch_size, spec.train.accumulation_steps) == (2, 2)
    assert (spec.optim.name, spec.optim.learning_rate, spec.optim.warmup_ratio) == ("adamw_8bit", 2e-4, 0.1)
    assert spec.model.lora is not None and spec.model.lora.target_modules == ("gate_proj", "q_proj")
    assert (spec.model.attention, spec.train.precision) == ("auto", "bf16")
    text = done.path.read_text()
    assert "multiply global_batch_size by the examples that fit into a row" in text
    for key, ours, times in (("evals", "train.eval_every", 4), ("saves", "checkpoint.every", 1)):
        assert f"divide them by {times} and write that to {ours}" in done.left[f"{key}_per_epoch"]
    assert "attn_implementation: flash_attention_2 there" in text
    assert "dsft has no key for it" in done.left["loss_watchdog_threshold"]
    assert "wandb_project" not in done.left


def test_axolotl_chats_and_pairs() -> None:
    chats = {
        "path": "json", "data_files": ["data/identity.json"], "type": "chat_template",
        "field_messages": "turns", "message_property_mappings": {"role": "from", "content": "value"},
    }  # fmt: skip
    spec, _ = converted({**AXOLOTL, "datasets": [chats], "chat_template": "chatml", "rl": None})
    (source,) = spec.data.train
    assert_has(source, "path: data/identity.json, format: sharegpt, columns: {conversations: turns}")
    assert spec.data.chat_template == "chatml"
    pairs = {"path": "x/y", "type": "chatml.intel"}
    ipo = {"rl": "ipo", "rl_beta": 0.3, "sample_packing": False}
    spec, _ = converted({**AXOLOTL, **ipo, "datasets": [pairs]})
    assert_has(spec.dpo, "loss_type: ipo, beta: 0.3")
    assert spec.data.train[0].columns == {"instruction": "question"}
    spec, _ = converted({**AXOLOTL, "datasets": [{"path": "x/y", "type": "completion", "field": "body"}]})
    assert (spec.task, spec.data.train[0].columns) == ("pretrain", {"text": "body"})


def test_trl_and_training_arguments() -> None:
    trl = {
        "model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "trl-lib/ultrafeedback_binarized",
        "learning_rate": 1e-6, "loss_type": ["ipo"], "beta": 0.05, "precompute_ref_log_probs": True,
        "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "max_steps": 50, "use_peft": True, "lora_r": 4,
        "lora_dropout": 0.0, "report_to": "wandb", "eval_strategy": "epoch", "load_best_model_at_end": False,
    }  # fmt: skip
    spec, done = converted(trl)
    assert_has(spec.dpo, "loss_type: ipo, beta: 0.05")
    assert (spec.train.max_steps, spec.optim.warmup_ratio, spec.wandb.mode) == (50, 0.1, "auto")
    assert_has(spec.model.lora, "rank: 4, alpha: 32")
    assert "steps of an epoch" in done.left["eval_strategy"]
    plain = {
        "per_device_train_batch_size": 4, "learning_rate": 3e-5, "lr_scheduler_type": "cosine_with_restarts",
        "adam_beta2": 0.95, "max_grad_norm": 0.5, "fp16": True, "logging_steps": 0.1, "seed": 7,
        "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5, "save_strategy": "no", "output_dir": "out",
        "fsdp": "full_shard", "optim": "adafactor", "hub_token": "hf_secret",
    }  # fmt: skip
    spec, done = converted(plain, model="a/b", data=["data/identity.json"])
    assert_has(spec.train, "micro_batch_size: 4, seed: 7, max_grad_norm: 0.5, label_smoothing: 0.1")
    assert_has(spec.train, "neftune_alpha: 5, precision: fp16")
    assert_has(spec.optim, "betas: [0.9, 0.95], lr_scheduler_type: cosine")
    assert (spec.checkpoint.every, spec.parallel.zero_stage) == (None, 3)
    assert "cosine_with_restarts" in done.left["lr_scheduler_type"] and "adafactor" in done.left["optim"]
    assert "hf_secret" not in done.path.read_text() + "\n".join(listed(done.left))
    with pytest.raises(SpecError, match="model.name_or_path; give it with --model"):
        converted(plain)


@pytest.mark.parametrize(("config", "dpo"), [
    ({**SWIFT, "rlhf_type": "cpo", "loss_type": "simpo"}, "simpo, simpo_gamma: 1.0, sft_weight: 1.0"),
    ({**SWIFT, "rlhf_type": "simpo"}, "simpo, beta: 2.0, simpo_gamma: 1.0, sft_weight: 1.0"),
    ({**SWIFT, "rlhf_type": "simpo", "cpo_alpha": 0}, "simpo, beta: 2.0, simpo_gamma: 1.0, sft_weight: 0.0"),
    ({**SWIFT, "rlhf_type": "orpo", "loss_type": "sigmoid", "rpo_alpha": 1.0}, "orpo, sft_weight: 0.0"),
    ({**TRL, "loss_type": "simpo"}, "simpo, beta: 0.1, simpo_gamma: 0.5, sft_weight: 1.0"),
    ({**TRL, "loss_type": "simpo", "cpo_alpha": 0.3}, "simpo, beta: 0.1, simpo_gamma: 0.5, sft_weight: 0.3"),
    ({**AXOLOTL, "rl": "simpo", "sample_packing": False}, "simpo, beta: 0.1, sft_weight: 1.0"),
    ({**AXOLOTL, "rl": "orpo", "orpo_alpha": 0.2, "dpo_loss_type": ["ipo"]}, "orpo, beta: 0.2"),
])  # fmt: skip
def test_methods_without_a_reference(config: dict[str, Any], dpo: str) -> None:
    spec, _ = converted(config)
    assert spec.task == "dpo" and spec.reference is None
    assert_has(spec.dpo, f"loss_type: {dpo}")


@pytest.mark.parametrize(
    ("config", "kto"),
    [
        ({**SFT, "stage": "kto", "dataset": "tagged", "pref_beta": 0.2, "kto_rejected_weight": 1.5,
          "lora_dropout": 0.05},
         "loss_type: kto, beta: 0.2, desirable_weight: 1.0, undesirable_weight: 1.5, reference: adapter"),
        ({**SFT, "stage": "kto", "dataset": "tagged", "finetuning_type": "full", "ref_model": "c/d"},
         "loss_type: kto, beta: 0.1, reference: precomputed, reference_model: c/d"),
        ({**TRL, "desirable_weight": 1.2, "undesirable_weight": 0.8, "loss_type": "apo_zero_unpaired"},
         "loss_type: apo_zero_unpaired, beta: 0.1, desirable_weight: 1.2, undesirable_weight: 0.8"),
        ({**TRL, "beta": 0.2, "loss_type": "kto"}, "loss_type: kto, beta: 0.2"),
        ({**SWIFT, "rlhf_type": "kto", "beta": 0.3, "desirable_weight": 2.0, "lora_rank": 4,
          "lora_alpha": 8},
         "loss_type: kto, beta: 0.3, desirable_weight: 2.0, reference: adapter"),
        ({**AXOLOTL, "rl": "kto", "rl_beta": 0.2, "kto_undesirable_weight": 0.5,
          "datasets": [{"path": "rows.json", "type": "llama3.argilla"}]},
         "loss_type: kto, beta: 0.2, undesirable_weight: 0.5, reference: adapter"),
        ({**AXOLOTL, "rl": "kto", "adapter": None, "datasets": [
             {"path": "rows.json", "type": {"field_prompt": "q", "field_label": "good"}}]},
         "loss_type: kto, beta: 0.1, reference: precomputed"),
    ],
    ids=["llamafactory", "llamafactory, full", "trl", "trl, loss alone", "swift", "axolotl", "axolotl, own"],
)  # fmt: skip
def test_kto(config: dict[str, Any], kto: str) -> None:
    spec, _ = converted(config)
    assert spec.task == "kto" and spec.dpo is None
    assert_has(spec.kto, kto)
    if spec.model.lora is not None:
        assert_has(spec.model.lora, "dropout: 0")
    if config.get("dataset") == "tagged":
        assert spec.data.train[0].format == "kto"
    if "rl" in config:
        kind, columns = config["datasets"][0]["type"], spec.data.train[0].columns
        asked = {"prompt": "instruction"} if isinstance(kind, str) else {"prompt": "q", "label": "good"}
        assert columns == asked
    with pytest.raises(SpecError, match="'bco' is not offered; task kto takes one of kto, apo_zero_unpaired"):
        converted({**TRL, "desirable_weight": 1.2, "loss_type": "bco"})


@pytest.mark.parametrize(("config", "found"), [
    ({**SFT, "stage": "rm", "dataset": "pairs"}, "center_rewards_coefficient: 0.0"),
    ({**TRL, "center_rewards_coefficient": 0.01}, "center_rewards_coefficient: 0.01"),
    ({**SWIFT, "rlhf_type": "rm", "task_type": "seq_cls", "num_labels": 1, "lora_rank": 4,
      "lora_alpha": 8, "center_rewards_coefficient": 0.02},
     "center_rewards_coefficient: 0.02"),
    ({"base_model": "a/b", "reward_model": True, "num_labels": 1, "sequence_len": 64,
      "model_type": "AutoModelForSequenceClassification", "center_rewards_coefficient": 0.03,
      "datasets": [{"path": "c/d", "type": "bradley_terry.chat_template"}], "learning_rate": 1e-5},
     "center_rewards_coefficient: 0.03"),
], ids=["llamafactory", "trl", "swift", "axolotl"])  # fmt: skip
def test_reward(config: dict[str, Any], found: str) -> None:
    spec, done = converted(config)
    assert spec.task == "reward" and spec.dpo is None
    assert_has(spec.reward or Reward(), found)
    assert "datasets.0.type" not in done.left
    if config.items() >= TRL.items():
        assert (spec.data.on_too_long, spec.optim.learning_rate) == ("drop", 1e-4)


def test_classifier() -> None:
    config = {**SWIFT, "task_type": "seq_cls", "num_labels": 3, "problem_type": "single_label_classification"}
    spec, _ = converted(config)
    assert (spec.task, spec.labels) == ("classify", ("LABEL_0", "LABEL_1", "LABEL_2"))
    for wrong in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        with pytest.raises(SpecError, match="needs rows with one of two or more labels"):
            converted({**config, **wrong})


@pytest.mark.parametrize(("config", "distill"), [
    ({**TRL, "teacher_model_name_or_path": "c/d", "beta": 0.3, "lmbda": 0.0, "temperature": 0.7},
     "reference_model: c/d, loss_type: jsd, beta: 0.3, temperature: 1.0, weight: 1.0, top_k: 64"),
    ({**TRL, "teacher_model_name_or_path": "c/d", "beta": 1.0}, "loss_type: reverse_kl"),
    ({**SWIFT, "rlhf_type": "gkd", "teacher_model": "c/d", "beta": 0, "temperature": 2.0,
      "sft_alpha": 0.25, "gkd_logits_topk": 32},
     "reference_model: c/d, loss_type: forward_kl, temperature: 2.0, weight: 0.8, top_k: 32"),
], ids=["trl", "trl, reverse", "swift"])  # fmt: skip
def test_distillation(config: dict[str, Any], distill: str) -> None:
    spec, done = converted(config)
    assert spec.task == "distill" and spec.reference is not None
    assert_has(spec.distill, distill)
    assert ("lmbda" in done.left) is (config.get("lmbda") != 0.0), "0.5 by default"


def test_swift() -> None:
    spec, _ = converted({
        "model": "Qwen/Qwen2.5-7B-Instruct", "rlhf_type": "dpo", "dataset": "data/pairs.json#10",
        "beta": 0.2, "torch_dtype": "bfloat16", "lora_rank": 4, "lora_alpha": 8, "max_length": 64,
        "target_modules": "all-linear", "lora_dropout": 0, "gradient_accumulation_steps": 2,
        "deepspeed": "zero3_offload", "system": "Be brief.",
    })  # fmt: skip
    assert_has(spec.dpo, "beta: 0.2, reference: adapter")
    assert_has(spec.data.train[0], "path: data/pairs.json, max_rows: 10")
    assert (spec.parallel.zero_stage, spec.parallel.offload_parameters.device) == (3, "cpu")
    assert (spec.optim.learning_rate, spec.data.on_too_long) == (1e-4, "drop")
    assert spec.train.accumulation_steps == 2


@pytest.mark.parametrize(("more", "thinking", "train_on"), [
    ({"enable_thinking": False}, "strip", "assistant"),
    ({"enable_thinking": True}, "keep", "assistant"),
    ({"enable_thinking": True, "loss_scale": "last_round+ignore_empty_think"}, "empty", "last"),
    ({"loss_scale": "ignore_empty_think"}, "keep", "assistant"),
    ({"preserve_thinking": False}, "empty", "assistant"),
    ({"add_non_thinking_prefix": False}, "as_in_template", "assistant"),
    ({"loss_scale": "all"}, "empty", "all"),
    ({}, "empty", "assistant"),
])  # fmt: skip
def test_thoughts_of_swift(more: dict[str, Any], thinking: str, train_on: str) -> None:
    spec, done = converted({**SWIFT, "tuner_type": "full", **more})
    assert (spec.data.thinking, spec.data.train_on) == (thinking, train_on)
    assert not more.keys() & done.left.keys()


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
OFF = "off, as here"
_SCALES = "the scales are quantized too here"


@pytest.mark.parametrize(("config", "form", "left"), [
    ({**AXOLOTL, "adapter": "qlora", "load_in_4bit": True, "load_in_8bit": False}, "nf4", {}),
    ({**AXOLOTL, "adapter": "qlora"}, "nf4", {}),
    ({
         **AXOLOTL, "load_in_4bit": True,
         "bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
     },
     "fp4", {}),
    ({**AXOLOTL, "load_in_8bit": True}, None, {"load_in_8bit": "set model.lora and model.quantize: nf4"}),
    ({**LLAMA_FACTORY, "quantization_bit": 4, "quantization_method": "bnb"}, "nf4", {}),
    ({**LLAMA_FACTORY, "quantization_bit": "4", "quantization_type": "fp4", "double_quantization": False},
     "fp4", {"double_quantization": _SCALES}),
    ({**LLAMA_FACTORY, "quantization_bit": 4, "quantization_method": "hqq"}, None,
     dict.fromkeys(("quantization_bit", "quantization_method"), "GPTQ, AWQ, HQQ or int8")),
    ({**LLAMA_FACTORY, "quantization_bit": 8}, None,
     {"quantization_bit": "set model.lora and model.quantize: nf4"}),
    ({**TRL, **_NF4, "use_peft": True, "use_bnb_nested_quant": True}, "nf4", {}),
    ({**TRL, **_NF4}, None, dict.fromkeys(_NF4, "set model.lora and model.quantize: nf4")),
    ({**SWIFT, "quant_method": "bnb", "quant_bits": 4, "bnb_4bit_compute_dtype": "bfloat16"}, "nf4", {}),
    (
        {
            **SWIFT, "tuner_type": "lora", "load_in_4bit": True, "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "float16", "bnb_4bit_quant_storage": "uint8",
        },
        "nf4",
        {
            "bnb_4bit_use_double_quant": _SCALES, "bnb_4bit_quant_storage": "it changes no result",
            "bnb_4bit_compute_dtype": "train.precision",
        },
    ),
])  # fmt: skip
def test_weights_in_4_bits(config: dict[str, Any], form: str | None, left: dict[str, str]) -> None:
    spec, done = converted({**config, "bf16": True, "deepspeed": None})
    asked = {key for key, reason in done.left.items() if re.search("bit|quant", key) and reason != OFF}
    assert (spec.model.quantize, asked) == (form, left.keys()) and "adapter" not in done.left
    for key, reason in left.items():
        assert reason in done.left[key]


@pytest.mark.parametrize(("given", "name", "note"), [
    ({"optim": "adamw_bnb_8bit"}, "adamw_8bit", "# optim\n"),
    ({"use_muon": True, "finetuning_type": "full"}, "muon", "use_muon; its steps are as long as AdamW's"),
    ({"optim": "paged_adamw_8bit"}, "adamw_8bit", "its moments are not paged here"),
    ({"optim": "paged_adamw_32bit"}, "adamw", "paged_adamw_32bit there, full-precision AdamW here"),
    ({"optim": "paged_adamw_8bit", "deepspeed": "ds_z3_offload_config.json"}, "adamw",
     "paged_adamw_8bit there, full-precision AdamW here"),
])  # fmt: skip
def test_moments_in_8_bits(given: dict[str, Any], name: str, note: str) -> None:
    spec, done = converted({**LLAMA_FACTORY, "deepspeed": None, **given})
    assert spec.optim.name == name and note in done.path.read_text()


def test_trl_quantizes_no_scales_unless_asked() -> None:
    _, done = converted({**TRL, **_NF4, "use_peft": True})
    assert f"default of use_bnb_nested_quant: false there; {_SCALES}" in done.path.read_text()


@pytest.mark.parametrize(("config", "batch"), [
    ({**AXOLOTL, "context_parallel_size": 4, "ring_attn_func": "batch_ring"}, (2, 2, None)),
    ({**AXOLOTL, "context_parallel_size": 4, "tiled_mlp": True, "tiled_mlp_num_shards": 2}, (2, 2, None)),
    ({**AXOLOTL, "sequence_parallel_degree": 4}, (2, 2, None)),
    ({**LLAMA_FACTORY, "hyper_parallel_cp_size": 4, "flash_attn": "fa2"}, (1, 8, None)),
    ({**SWIFT, "sequence_parallel_size": 4}, (1, None, 4)),
    ({**TRL, "parallelism_config": {"sp_size": 4, "cp_size": None, "tp_size": 2}}, (8, 1, None)),
    ({**LLAMA_FACTORY, "deepspeed": {"zero_optimization": {"stage": 3}, "sequence_parallel_size": 4}},
     (1, 8, None)),
])  # fmt: skip
def test_rows_that_are_split(config: dict[str, Any], batch: tuple[int | None, ...]) -> None:
    """All of them count micro-batches per group; ms-swift's 16 examples a step are 16 GPUs, that is 4
    groups."""
    spec, done = converted(config)
    train = spec.train
    assert (train.micro_batch_size, train.accumulation_steps, train.global_batch_size) == batch
    assert (spec.parallel.sequence_parallel, spec.model.attention) == (4, "auto")
    assert spec.model.mlp_chunks == config.get("tiled_mlp_num_shards")
    tensor_parallel = "tp_size of parallelism_config"
    assert (tensor_parallel in done.left) == ("parallelism_config" in config)


def test_chunks_of_mlps_need_checkpointed_layers() -> None:
    for more in ({"gradient_checkpointing": False}, {"tiled_mlp": False}):
        spec, done = converted({**AXOLOTL, "tiled_mlp": True, "tiled_mlp_num_shards": 2, **more})
        assert spec.model.mlp_chunks is None
        assert "model.gradient_checkpointing: true" in done.left["tiled_mlp_num_shards"]


def test_the_balance_loss_of_transformers_is_named() -> None:
    """TRL (1.7 and newer) adds it to every mixture of experts; the others where the config asks for it."""
    for config, name in (
        (TRL, "router_aux_loss_coef"),
        ({**TRL, "router_aux_loss_coef": 0.02}, "router_aux_loss_coef"),
        ({**LLAMA_FACTORY, "moe_aux_loss_coef": 1}, "moe_aux_loss_coef"),
        ({**SWIFT, "router_aux_loss_coef": 1e-3}, "router_aux_loss_coef"),
        ({**AXOLOTL, "model_config": {"output_router_logits": True}}, "model_config.output_router_logits"),
    ):
        spec, done = converted(config)
        assert "model.experts.balance: global_batch with balance_weight" in done.left[name]
        assert ("on by default in TRL" in done.left[name]) == (config is TRL)
        assert name in done.path.read_text() and spec.model.experts.balance == "none"
    Path("dense").mkdir()
    Path("dense/config.json").write_text('{"model_type": "llama"}')
    dense = {**TRL, "model_name_or_path": "dense"}
    for config in (LLAMA_FACTORY, SWIFT, AXOLOTL, {**TRL, "router_aux_loss_coef": 0.0}, dense):
        assert "balance" not in str(converted(config)[1].left)


def test_rows_that_are_not_split() -> None:
    spec, done = converted({**AXOLOTL, "context_parallel_size": 1, "sequence_parallel": True})
    assert spec.parallel.sequence_parallel == 1
    assert "tensor parallelism" in done.left["sequence_parallel"]
    spec, _ = converted({**LLAMA_FACTORY, "deepspeed": {"sequence_parallel_size": None}})
    assert spec.parallel.sequence_parallel == 1
    with pytest.raises(SpecError, match=r"context_parallel_size: 'two': a number is needed"):
        converted({**AXOLOTL, "context_parallel_size": "two"})


def test_evaluation_without_rows_is_left_out() -> None:
    """Rows of TrainingArguments come in by code; split_dataset_ratio 0 of ms-swift evaluates nothing."""
    config = {
        "per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 6, "save_steps": 6,
        "load_best_model_at_end": True, "logging_strategy": "steps",
    }  # fmt: skip
    spec, done = converted(config, model="a/b", data=["data/identity.json"])
    assert (spec.train.eval_every, spec.checkpoint.keep_best, spec.checkpoint.every) == (None, None, 6)
    assert "data.eval, data.eval_fraction or data.eval_count, and train.eval_every" in done.left["eval_steps"]
    assert "checkpoint.keep_best" in done.left["load_best_model_at_end"]
    swift = {**SWIFT, "split_dataset_ratio": 0.0, "eval_steps": 50}
    spec, done = converted(swift)
    assert spec.train.eval_every is None and "eval_steps" in done.left
    spec, done = converted({**swift, "split_dataset_ratio": 0.1, "model_name": "swift-bot"})
    assert spec.train.eval_every == 50 and "placeholders" in done.left["model_name"]


def test_deepspeed() -> None:
    file = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4,
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": False}, "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.9], "eps": "auto"}},
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "zero_hpz_partition_size": 8,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local", "pin_memory": True},
        },
    }  # fmt: skip
    spec, done = converted(file, task="pretrain", model="a/b", data=["data/wiki.txt"])
    assert (spec.parallel.zero_stage, spec.parallel.zero_hpz_partition_size) == (3, 8)
    file["zero_optimization"] |= {"zero_hpz_partition_size": 1, "offload_param": {"device": "cpu"}}  # type: ignore[operator]
    spec, done = converted(file, task="pretrain", model="a/b", data=["data/wiki.txt"])
    assert (spec.parallel.zero_hpz_partition_size, spec.parallel.offload_parameters.device) == (1, "cpu")
    assert_has(spec.parallel.offload_optimizer, "device: nvme, nvme_path: /local")
    assert_has(spec.train, "micro_batch_size: 8, accumulation_steps: 4, precision: bf16")
    assert_has(spec.optim, "learning_rate: 3.0e-5, betas: [0.8, 0.9]")
    assert "plan SPEC --explain" in done.left["zero_optimization.overlap_comm"]
    params = {"warmup_min_lr": 0, "warmup_num_steps": 20, "total_num_steps": 90}
    file["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    spec, done = converted(file, model="a/b", data=["data/wiki.txt"])
    assert (spec.optim.lr_scheduler_type, spec.optim.warmup_steps, spec.train.max_steps) == ("linear", 20, 90)
    assert "linearly here" in done.left["scheduler.params.warmup_type"]
    file["scheduler"] = {"type": "WarmupLR", "params": dict.fromkeys(params, "auto")}
    spec, _ = converted(file, model="a/b", data=["data/wiki.txt"])
    assert (spec.optim.lr_scheduler_type, spec.optim.warmup_steps) == ("constant_with_warmup", None)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    Path("z2.json").write_text(json.dumps({"zero_optimization": zero}))
    spec, _ = converted({**LLAMA_FACTORY, "deepspeed": "z2.json"})
    assert (spec.parallel.zero_stage, spec.parallel.offload_optimizer.device) == (2, "cpu")


@pytest.mark.parametrize(("config", "wanted"), [
    ({"stage": "ppo", "template": "x", "dataset": "identity"}, "stage: 'ppo': dsft does not offer"),
    ({"base_model": "a/b", "datasets": [], "process_reward_model": True}, "scores the steps of"),
    ({"kd_trainer": True, "base_model": "a/b", "datasets": []}, "kd_trainer: Axolotl reads a teacher's"),
    ({**SWIFT, "rlhf_type": "cpo", "cpo_alpha": 0.5}, "rlhf_type: 'cpo': CPO has no reference"),
    ({**SWIFT, "rlhf_type": "cpo", "loss_type": "sigmoid"}, "loss_type: 'sigmoid': CPO has no reference"),
    ({**SWIFT, "rlhf_type": "simpo", "loss_type": "hinge"}, "loss_type: 'hinge': CPO has no reference"),
    ({**TRL, "cpo_alpha": 0.5}, "loss_type: 'sigmoid': CPO has no reference"),
    ({"rlhf_type": "grpo", "model": "a/b", "tuner_type": "lora"}, "rlhf_type: 'grpo'"),
    ({"model": "a", "dataset": "b.json", "task_type": "seq_cls", "tuner_type": "lora"}, "num_labels"),
    ({"stage": "sft", "template": "x", "dataset": "nothing"}, "'nothing' is not in dataset_info"),
    ({"stage": "sft", "template": "x", "dataset": "elsewhere"}, "a hub that dsft does not read"),
    ({"stage": "sft", "template": "x", "dataset": "a", "dataset_dir": "no"}, "it with --dataset-info"),
    ({"stage": "sft", "cutoff_len": 9, "model_name_or_path": "a"}, "data.train; give it with --data"),
    ({"hello": 1}, "name the tool with --from"),
    ({"peft_config": {"name": "lora"}, "model": "a"}, "version 1 .USE_V1. is not converted"),
    ({"stage": "sft", "dataset": "identity", "num_train_epochs": "many", "val_size": "x"}, "val_size"),
])  # fmt: skip
def test_a_config_that_cannot_be_converted_is_refused(config: dict[str, Any], wanted: str) -> None:
    with pytest.raises(SpecError, match=wanted):
        converted(config)
    assert not Path("spec.yaml").exists()


@pytest.mark.parametrize(("given", "ours"), [
    ({"flash_attention": True}, "auto"),
    ({"attn_implementation": "flash_attention_3"}, "auto"),
    ({"sdp_attention": True}, "sdpa"),
    ({"eager_attention": True}, "eager"),
])  # fmt: skip
def test_attention_needs_no_further_package(given: dict[str, Any], ours: str) -> None:
    """flash-attn, which FlashAttention of transformers needs, is not installed with dsft."""
    spec, done = converted({**AXOLOTL, "attn_implementation": None, **given})
    assert spec.model.attention == ours
    assert re.search(rf"attention: {ours}  # {next(iter(given))}", done.path.read_text())


def test_dataset_info_beside_the_config() -> None:
    Path("conv").mkdir()
    Path("data/dataset_info.json").rename("conv/dataset_info.json")
    Path("conv/lf.yaml").write_text(yaml.safe_dump({**LLAMA_FACTORY, "dataset": "identity"}))
    done = convert_file(Path("conv/lf.yaml"), out=Path("spec.yaml"))
    assert load_spec(done.path, check_files=False).data.train[0].path == "conv/identity.json"
    Path("conv/dataset_info.json").unlink()
    missing = "no data/dataset_info.json here, beside the config or above it, and no conv/dataset_info.json"
    with pytest.raises(SpecError, match=missing):
        convert_file(Path("conv/lf.yaml"), out=Path("other.yaml"))


@pytest.mark.parametrize(("more", "evaluated", "every"), [
    ({"eval_strategy": "steps", "eval_steps": 50}, "x/y:test", 50),
    ({"eval_strategy": "steps"}, "x/y:test", 25),  # eval_steps is logging_steps by default
    ({"eval_strategy": "epoch", "dataset_config": "en"}, "x/y:en:test", None),
    ({"eval_strategy": "steps", "dataset_test_split": "dev", "eval_steps": 9}, "x/y:dev", 9),
    ({"eval_strategy": False, "dataset_test_split": "dev"}, None, None),  # `no` in YAML
    ({"dataset_test_split": "dev", "eval_steps": 9}, None, None),
])  # fmt: skip
def test_trl_evaluates_the_test_split(more: dict[str, Any], evaluated: str | None, every: int | None) -> None:
    """TRL's scripts evaluate dataset[dataset_test_split], by default `test`, unless eval_strategy is `no`."""
    spec, done = converted({**TRL, "logging_steps": 25, **more})
    assert [source.path for source in spec.data.eval] == ([evaluated] if evaluated else [])
    assert spec.train.eval_every == every
    assert ("dataset_test_split" in done.left) == (evaluated is None)


SWIFT_SCRIPT = """#!/bin/bash
# 24GB
NPROC_PER_NODE=2 \\
swift sft \\
    --model Qwen/Qwen3-4B --tuner_type lora \\
    --dataset 'x/y#500' \\
              'data/identity.json' \\
    --learning_rate 1e-4 --gradient_checkpointing True \\
    --output_dir=out/swift 2>&1 | tee log
"""


def test_options_of_a_shell_script() -> None:
    def of(text: str, **options: Any) -> tuple[Spec, Converted]:
        Path("run.sh").write_text(text)
        Path("spec.yaml").unlink(missing_ok=True)
        done = convert_file(Path("run.sh"), out=Path("spec.yaml"), **options)
        assert done.mistakes is None
        return load_spec(done.path, check_files=False), done

    spec, done = of(SWIFT_SCRIPT)
    assert (done.title, spec.name, spec.output_dir, spec.task) == ("ms-swift", "swift", "out", "sft")
    assert [(source.path, source.max_rows) for source in spec.data.train] == [
        ("x/y", 500), ("data/identity.json", None),
    ]  # fmt: skip
    assert (spec.optim.learning_rate, spec.model.gradient_checkpointing) == (1e-4, True)
    options = "--model_name_or_path a/b --dataset_name x/y --use_peft --no_gradient_checkpointing"
    for command in ("trl dpo", "accelerate launch --num_processes 2 --config_file z.yaml trl/scripts/dpo.py"):
        spec, done = of(f"set -e\n{command} {options}\n")
        assert (done.title, spec.task) == ("TRL or transformers", "dpo")
        assert spec.model.lora is not None and not spec.model.gradient_checkpointing
    for command, loss in (("orpo.py", "orpo"), ("cpo.py --loss_type simpo", "simpo"), ("dpo.py", "sigmoid")):
        spec, done = of(f"python {command} {options}\n")
        assert_has(spec.dpo, f"loss_type: {loss}")
        assert f"  loss_type: {loss}  # " in done.path.read_text()
    spec, _ = of("swift rlhf --model a/b --dataset x/y\n")
    assert_has(spec.dpo, "loss_type: sigmoid")
    for text, reason in {
        "python cpo.py --model_name_or_path a/b --dataset_name x/y\n": "CPO has no reference",
        "python bco.py --model_name_or_path a/b --dataset_name x/y\n": "'bco': dsft does not offer",
        "llamafactory-cli version\n": "needs one training command with options, and has 0; or put",
        "trl sft --a b\ntrl dpo --a b\n": "and has 2",
        "trl sft --model_name_or_path $MODEL\n": r"\$MODEL is filled in by the shell; write its value",
        "trl grpo --model_name_or_path a/b\n": "'grpo': dsft does not offer",
        "trl sft --dataset_name 'x\n": r"cannot be read \(No closing quotation\)",
    }.items():
        with pytest.raises(SpecError, match=reason):
            of(text)


@pytest.mark.parametrize("command", [
    "llamafactory-cli train lf.yaml learning_rate=2.0e-05 'output_dir=out/mine'",
    "FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml --learning_rate 2e-5 --output-dir out/mine",
    "deepspeed --num_gpus 2 src/train.py --config lf.yaml --learning_rate=2e-5 --output_dir=out/mine",
])  # fmt: skip
def test_options_of_a_command_replace_those_of_its_config(command: str) -> None:
    Path("lf.yaml").write_text(yaml.safe_dump({**LLAMA_FACTORY, "dataset": "identity"}))
    done = convert_file(command, out=Path("spec.yaml"))
    spec = load_spec(done.path, check_files=False)
    assert (done.title, spec.name, spec.optim.learning_rate) == ("LLaMA-Factory", "mine", 2e-5)
    assert spec.model.name_or_path == LLAMA_FACTORY["model_name_or_path"]
    assert "Converted from the command of LLaMA-Factory" in done.path.read_text()
    with pytest.raises(MissingInputError, match=r"'other\.yaml' cannot be read"):
        convert_file(command.replace("lf.yaml", "other.yaml"), out=Path("other.yaml"))


def test_one_word_with_blanks_is_a_command() -> None:
    Path("lf.yaml").write_text(yaml.safe_dump({**LLAMA_FACTORY, "dataset": "identity"}))
    done = CliRunner().invoke(app, ["convert", "--out", "spec.yaml", "--", "llamafactory-cli train lf.yaml"])
    assert done.exit_code == 0 and "from a config of LLaMA-Factory" in done.output


def test_files_that_are_no_config() -> None:
    with pytest.raises(MissingInputError, match="cannot be read"):
        convert_file(Path("nothing.yaml"))
    for text in ("[1, 2]", "a: [", "1: 2", "\x00", "&a [*a]", "a: 2026-13-01"):
        Path("bad.yaml").write_text(text)
        with pytest.raises(SpecError, match=r"bad\.yaml"):
            convert_file(Path("bad.yaml"))
    with pytest.raises(SpecError, match="--from: 'tool' is not known"):
        converted(LLAMA_FACTORY, "tool")
    with pytest.raises(SpecError, match="--task: 'rl' is not offered"):
        converted(LLAMA_FACTORY, task="rl")


BOMB = "".join(f"x{i}: &x{i} [{'x, x' if i == 0 else f'*x{i - 1}, *x{i - 1}'}]\n" for i in range(40))


@pytest.mark.parametrize(("text", "reason"), [
    *(
        (f"{BOMB}{key}: *x39\n", "more than 20000 values")
        for key in ("dataset", "output_dir", "learning_rate")
    ),
    ('{"a": &a {b: *a}}', "nested more than 40 levels deep"),
    ("x" * 1_000_001, "it is larger than 1,000,000 bytes"),
    ("stage: !!python/object:os.system x", "is not allowed"),
])  # fmt: skip
def test_a_config_has_limits(text: str, reason: str) -> None:
    Path("config.yaml").write_text(text)
    with pytest.raises(SpecError, match=reason):
        convert_file(Path("config.yaml"))


def test_a_config_is_a_regular_file() -> None:
    Path("zero.yaml").symlink_to("/dev/zero")
    with pytest.raises(MissingInputError, match="it is a device, not a file"):
        convert_file(Path("zero.yaml"))
    os.mkfifo("dataset_info.json")
    with pytest.raises(SpecError, match="it is a named pipe, not a file"):
        converted({"stage": "sft", "dataset": "x"}, dataset_info=Path("dataset_info.json"))


def test_a_file_that_is_not_here_is_no_hub_id() -> None:
    for config in (
        {**AXOLOTL, "datasets": [{"path": "mine/rows.jsonl", "type": "alpaca"}]},
        {"model_name_or_path": "a/b", "dataset_name": "mine/rows.jsonl", "max_length": 100},
    ):
        spec, _ = converted(config)
        assert spec.data.train[0].path == "mine/rows.jsonl"


def test_a_beta_of_zero_and_defaults_under_the_tools_own_names() -> None:
    spec, _ = converted({**LLAMA_FACTORY, "adam_beta1": 0, "lr_scheduler_type": None})
    assert spec.optim.betas == (0.0, 0.999)
    text = Path("spec.yaml").read_text()
    assert "default of optim\n" in text and "default of lr_scheduler_type" in text


def test_keys_have_the_order_of_the_schema_and_what_is_left_that_of_the_config() -> None:
    config = {**AXOLOTL, "context_parallel_size": 2, "rl": "dpo", "sample_packing": False, "eval_steps": 9}
    for order in (config, dict(reversed(config.items()))):
        _, done = converted(order, tool="axolotl")
        written = yaml.safe_load(done.path.read_text())
        for section in ("model", "data", "dpo", "train", "optim"):
            ours = [key.rpartition(".")[2] for key in keys() if key.rpartition(".")[0] == section]
            assert list(written[section]) == [key for key in ours if key in written[section]]
        names = list(yaml.safe_load(Path("config.yaml").read_text()))
        assert list(done.left) == sorted(done.left, key=names.index) and len(done.left) > 3


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_tables_of_a_tool_name_keys_of_the_spec_and_no_key_twice(tool: Tool) -> None:
    assert tool.keys.keys() <= set(keys()) and tool.defaults
    names = " ".join((*LEFT_OUT.values(), *tool.reasons.values())).split()
    assert sorted(names) == sorted(set(names))


def test_other_names_of_keys_and_values() -> None:
    """A script's own names for its arguments are those of which dsft validate knows the meaning too."""
    config = {
        "model_name_or_path": "a/b", "per_device_train_batch_size": 2, "lr": 1e-3, "epochs": 2,
        "block_size": 512, "optimizer": "lion", "attn_implementation": "flex_attention",
        "greater_is_better": True, "early_stopping_patience": 3,
    }  # fmt: skip
    spec, done = converted(config, data=["data/wiki.txt"])
    assert (spec.optim.learning_rate, spec.train.num_train_epochs, spec.data.max_length) == (1e-3, 2, 512)
    assert spec.model.attention == "auto" and "'lion'" in done.left["optimizer"]
    assert "from other keys" in done.left["greater_is_better"]
    assert "checkpoint.keep_best" in done.left["early_stopping_patience"]


def test_no_loss_and_no_file_of_several_is_dropped_silently() -> None:
    pairs = {**AXOLOTL, "rl": "dpo", "sample_packing": False}
    spec, _ = converted({**pairs, "dpo_loss_type": ["ipo"]})
    assert_has(spec.dpo, "loss_type: ipo")
    with pytest.raises(SpecError, match="dpo_loss_type: 'sigmoid, sft'"):
        converted({**pairs, "dpo_loss_type": ["sigmoid", "sft"]})
    files = {"train": ["data/identity.json", "more.json"]}
    trl = {"model_name_or_path": "a/b", "max_length": 9, "datasets": [{"path": "json", "data_files": files}]}
    spec, done = converted(trl)
    assert spec.data.train[0].path == "data/identity.json"
    assert "sources of their own: more.json" in done.left["datasets.0.data_files"]


@pytest.mark.parametrize("config", [
    {**SFT, "dataset": "hub,openai", "interleave_probs": "0.3,0.7"},
    {"model": "a/b", "dataset": ["x/y", "u/v"], "interleave_prob": [0.3, 0.7], "columns": {"a": "b"}},
])  # fmt: skip
def test_weights_of_sources(config: dict[str, Any]) -> None:
    spec, done = converted(config)
    assert [source.weight for source in spec.data.train] == [0.3, 0.7]
    assert "the other way round" in done.left.get("columns", "the other way round")
    assert " as weights" in done.path.read_text()


@pytest.mark.parametrize("indent", [None, "\t"])
def test_the_json_of_deepspeed_splits_rows(indent: str | None) -> None:
    config = {"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}
    Path("ds.json").write_text(json.dumps(config, indent=indent))
    done = convert_file(Path("ds.json"), model="a/b", data=["data/identity.json"])
    assert_has(load_spec(done.path, check_files=False).parallel, "zero_stage: 2, sequence_parallel: 2")
    assert (done.left, done.mistakes) == ({}, None)


@pytest.mark.parametrize("key", ["optim", "lr_scheduler_type", "deepspeed", "template", "a\nseed: 1"])
def test_no_value_of_the_config_ends_a_comment(key: str) -> None:
    config = {**LLAMA_FACTORY, key: "zero3\nname: other\x85\ud800"}
    Path("config.json").write_text(json.dumps(config))
    assert convert_file(Path("config.json"), out=Path("spec.yaml")).mistakes is None
    assert not [line for line in Path("spec.yaml").read_text().split("\n") if line.startswith("name: other")]


def test_a_file_is_never_overwritten() -> None:
    Path("config.yaml").write_text(yaml.safe_dump(AXOLOTL))
    Path("specs").mkdir()
    assert convert_file(Path("config.yaml")).path == Path("specs/lora-out.yaml")
    with pytest.raises(SpecError, match="--out: 'specs/lora-out.yaml' is there already"):
        convert_file(Path("config.yaml"))


@pytest.mark.parametrize(
    "value", ["x", [1], {"a": 1}, -1, float("nan"), True, "1e400", "", 10**400, "x" * 300]
)
def test_a_value_of_another_type_gives_no_traceback(value: Any) -> None:
    """Each key of a config in turn has a value that it cannot have."""
    deepspeed = {"zero_optimization": {"stage": 2}, "optimizer": {}, "bf16": {}, "fp16": {}}
    for config in (LLAMA_FACTORY, AXOLOTL, deepspeed, TRL):
        for name in config:
            Path("config.yaml").write_text(yaml.safe_dump({**config, name: value}))
            Path("spec.yaml").unlink(missing_ok=True)
            try:
                convert_file(Path("config.yaml"), out=Path("spec.yaml"))
            except SpecError as error:
                assert str(error)
