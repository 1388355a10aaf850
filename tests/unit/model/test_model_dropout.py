"""A model without dropout is the same in training as in evaluation, and gives what it gave before."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from dsft.model.build import switch_off_dropout

SMALL = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
CONFIGS: dict[str, Any] = {
    "modules": GPT2Config(
        vocab_size=64, n_layer=2, n_head=2, n_embd=16, n_positions=32, bos_token_id=0, eos_token_id=0
    ),
    "numbers": LlamaConfig(**SMALL, intermediate_size=32, attention_dropout=0.5),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_without_dropout_equals_evaluation(kind: str) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind])
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = model.eval()(ids, use_cache=False).logits
        assert not torch.allclose(model.train()(ids, use_cache=False).logits, expected)
        on = switch_off_dropout(model)
        assert torch.equal(model.train()(ids, use_cache=False).logits, expected)
    assert {"modules": "attn_pdrop 0.1", "numbers": "attention_dropout 0.5"}[kind] in on
    assert switch_off_dropout(model) == ()
