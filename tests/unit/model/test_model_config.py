"""Configs: the tokenizer's facts go in, what a class does not know is refused by name."""

import json
from pathlib import Path

import pytest
import torch

from dsft.errors import MissingInputError, SpecError
from dsft.model.build import Part, build_model
from dsft.model.census import take_census
from dsft.model.config import TokenFacts, resolve_config
from dsft.plan.cut import Cut, balanced
from dsft.spec.schema import Model
from tests.unit.model.test_model_init import FACTS, LLAMA

GEMMA2 = {"model_type": "gemma2", "hidden_size": 32, "num_attention_heads": 2}


def refused(keys: dict[str, object]) -> str:
    with pytest.raises(SpecError) as error:
        resolve_config(Model(from_config=keys), FACTS)
    return str(error.value)


def test_token_ids_come_from_the_tokenizer_unless_given() -> None:
    config = resolve_config(Model(from_config=LLAMA), FACTS)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (
        96, 1, 2, None,
    )  # fmt: skip
    config = resolve_config(Model(from_config=LLAMA | {"vocab_size": 128, "eos_token_id": 7}), FACTS)
    assert (config.vocab_size, config.eos_token_id) == (128, 7)


def test_attention_follows_the_architecture() -> None:
    assert resolve_config(Model(from_config=LLAMA), FACTS)._attn_implementation == "sdpa"
    assert resolve_config(Model(from_config=LLAMA, attention="eager"), FACTS)._attn_implementation == "eager"
    assert resolve_config(Model(from_config=GEMMA2), FACTS)._attn_implementation == "eager"
    with pytest.raises(SpecError, match="model.attention"):
        resolve_config(Model(from_config=GEMMA2, attention="sdpa"), FACTS)


def test_unknown_config_keys_are_named_with_suggestions() -> None:
    message = refused(LLAMA | {"hiden_size": 3, "num_layer": 2})
    assert "model.from_config.hiden_size" in message
    assert "did you mean hidden_size?" in message
    assert "model.from_config.num_layer" in message


def test_keys_that_the_class_renames_are_known() -> None:
    keys = {"model_type": "gpt2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    assert resolve_config(Model(from_config=keys), FACTS).n_embd == 32
    assert (
        resolve_config(Model(from_config=LLAMA | {"rope_theta": 5e5}), FACTS).rope_parameters["rope_theta"]
        == 5e5
    )


@pytest.mark.parametrize(("keys", "words"), [
    ({"model_type": "lama"}, "did you mean llama?"),
    ({"hidden_size": 64}, "model.from_config.model_type"),
    (LLAMA | {"hidden_size": "wide"}, "expected int"),
    (LLAMA | {"num_attention_heads": 7}, "not a multiple"),
    (LLAMA | {"vocab_size": 50}, "the tokenizer has 96 tokens"),
    ({"model_type": "vit"}, "is not a causal language model"),
    ({"model_type": "bert"}, "training a bert model is not tested"),
    ({"model_type": "gemma3"}, "more than a text model (its config has text_config, vision_config)"),
    ({"model_type": "phi4_multimodal"}, "more than a text model"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attends to later tokens"),
])  # fmt: skip
def test_invalid_config_is_refused_in_one_sentence(keys: dict[str, object], words: str) -> None:
    message = refused(keys)
    assert words in message
    assert "Traceback" not in message


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match=r"has quantization_config \('gptq'\), so its weights are quantized"):
        resolve_config(Model(name_or_path=str(tmp_path)), FACTS)


def test_a_vocabulary_smaller_than_a_pretrained_models_is_fine() -> None:
    assert resolve_config(Model(from_config=LLAMA | {"vocab_size": 128}), FACTS).vocab_size == 128


@pytest.mark.parametrize(("keys", "stages", "words"), [
    (LLAMA | {"num_hidden_layers": 4}, 2, "a cut of 5 layers is not one of 4"),
    ({"model_type": "gemma4_text", "num_hidden_layers": 5}, 2, "looks up tokens again"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(keys: dict[str, object], stages: int, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build_model(Model(from_config=keys), FACTS, 0, torch.float32, Part(0, balanced([1] * 5, stages)))


def test_a_pretrained_model_is_read_and_cut(tmp_path: Path) -> None:
    fresh = build_model(Model(from_config=LLAMA), FACTS, 3, torch.float32)
    fresh.causal_lm.save_pretrained(tmp_path)
    read = Model(name_or_path=str(tmp_path))
    parts = [
        build_model(read, FACTS, 99, torch.float32, Part(stage, Cut((2, 3)))).named_trained()
        for stage in (0, 1)
    ]
    for name, p in fresh.named_trained().items():
        assert sum(torch.equal(part[name], p) for part in parts if name in part) == 1, name


def test_missing_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="config.json"):
        build_model(Model(name_or_path=str(tmp_path / "absent")), FACTS, 0, torch.float32)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(MissingInputError, match="weights"):
        build_model(Model(name_or_path=str(tmp_path)), TokenFacts(9, 1, 2, None), 0, torch.float32)


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "llama", "hidden_size": "a"}, "cannot be read: Field 'hidden_size' expected int"),
    ({"model_type": "gemma3", "text_config": 5}, "cannot be read: Field 'text_config' with value 5"),
    ({"model_type": "qwen3_moe", "decoder_sparse_step": 0},
     "transformers cannot build a qwen3_moe model of this config: integer modulo by zero"),
    ({"model_type": "qwen3_moe", "num_experts_per_tok": 0}, "a token cannot go to 0 of 128 experts"),
])  # fmt: skip
def test_invalid_config_values_give_no_traceback(
    config: dict[str, object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((MissingInputError, SpecError), match=words):
        take_census(Model(name_or_path=str(tmp_path)), FACTS, cuts=False)


def test_hub_kernel_named_by_a_config_is_refused(tmp_path: Path) -> None:
    """transformers would download and import its code where the package kernels is installed."""
    config = build_model(Model(from_config=LLAMA), FACTS, 3, torch.float32).causal_lm.config
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_attn_implementation": "org/kernel"}))
    with pytest.raises(MissingInputError, match="_attn_implementation .* names the kernel 'org/kernel'"):
        resolve_config(Model(name_or_path=str(tmp_path)), FACTS)
