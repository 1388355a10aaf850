"""Finding a model's mixtures of experts."""

from __future__ import annotations

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.model.experts import ExpertLayer, expert_layers


def on_meta(kind: str, **keys: object) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**keys))
    return model


def test_layers_are_found_by_their_modules() -> None:
    model = on_meta("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], num_experts=8)
    assert expert_layers(model) == [
        ExpertLayer(block, f"{block}.gate", f"{block}.experts", 8, 8)
        for block in ("model.layers.0.mlp", "model.layers.2.mlp")
    ]
    (layer,) = expert_layers(on_meta("gpt_oss", num_hidden_layers=1, layer_types=["full_attention"]))
    assert (layer.router, layer.num_experts, layer.top_k) == ("model.layers.0.mlp.router", 128, 4)
    shared = expert_layers(on_meta("deepseek_v3", num_hidden_layers=2, first_k_dense_replace=1))
    assert [layer.block for layer in shared] == ["model.layers.1.mlp"]
    assert expert_layers(on_meta("llama", num_hidden_layers=1)) == []
