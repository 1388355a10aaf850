"""Which rows cannot be split over ranks, by the model's config; by its layers in test_census_version.py."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from dsft.errors import SpecError
from dsft.model.split_check import check_can_split
from tests.architectures.cases import small_config
from tests.unit.model.test_model_attention import LONGROPE

TITLE = "parallel.sequence_parallel: "


@pytest.mark.parametrize(("kind", "keys", "size", "message"), [
    ("llama", {"num_attention_heads": 6, "hidden_size": 48}, 4,
     "4 does not divide the model's 6 attention heads.*; set 3"),
    ("laguna", {"num_attention_heads_per_layer": [4, 6]}, 4,
     "4 does not divide the model's 6 attention heads.*; set 3"),
    ("phi3", LONGROPE, 2, "rows of a phi3 model cannot be split: .*rotate all packed rows"),
])  # fmt: skip
def test_heads_and_rope(kind: str, keys: dict[str, Any], size: int, message: str) -> None:
    config = small_config(kind, **keys)
    with pytest.raises(SpecError, match=TITLE + message):
        check_can_split(config, size, max_length=64)
    check_can_split(config, 2, max_length=16)


@pytest.mark.parametrize(("kind", "message"), [
    ("mamba", "recurrent layers"),
    ("llama4_text", "layers of type chunked_attention"),
    ("bloom", "takes no"),
])  # fmt: skip
def test_unpackable_models_are_refused_for_sequence_parallel(kind: str, message: str) -> None:
    config = CONFIG_MAPPING[kind](num_hidden_layers=1, hidden_size=16, vocab_size=32)
    with pytest.raises(
        SpecError, match=f"{TITLE}rows of a {kind} model cannot be split: .*{message}.*; set it to 1"
    ):
        check_can_split(config, 2, max_length=16)
