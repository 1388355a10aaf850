"""What a Hugging Face folder holds beside the weights: takes a config and a tokenizer, writes config.json, the
tokenizer with its chat template, and generation_config.json."""

from __future__ import annotations

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase


def write_model_folder(
    path: Path, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str | None
) -> None:
    """`source`: name or path of the pretrained model whose generation settings are kept, None for a fresh one.

    A model that was taught to end its turns with the tokenizer's end token is told so for generation.
    """
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    generation_config(config, tokenizer, source).save_pretrained(path)


def generation_config(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, source: str | None
) -> GenerationConfig:
    if source is not None:
        try:
            return GenerationConfig.from_pretrained(source)
        except OSError:  # the model has none: transformers derives it from the config, as below
            pass
    settings = GenerationConfig.from_model_config(config)
    settings.eos_token_id = tokenizer.eos_token_id
    settings.pad_token_id = tokenizer.pad_token_id
    settings.use_cache = True  # the config's is off for training
    return settings
