"""Finding a model's mixtures of experts."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.errors import SpecError
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.experts import ExpertLayer, choose_experts, described, expert_layers
from dsft.spec.schema import Model
from tests.architectures.cases import VOCABULARY, keys_of


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


MIXTRAL = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
SMALL = {
    "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "moe_intermediate_size": 8,
    "num_experts": 4,
}  # fmt: skip


def chosen(choice: str, kind: str = "qwen3_moe", **keys: object) -> str:
    model = on_meta(kind, **(SMALL | {"num_experts_per_tok": 2} | keys if kind == "qwen3_moe" else keys))
    choose_experts(model, choice)
    (line,) = described(model)
    return line


def test_configured_router_loss_is_reported() -> None:
    assert len(list(described(on_meta("mixtral", **MIXTRAL)))) == 1
    line = list(described(on_meta("mixtral", **MIXTRAL, output_router_logits=True)))[1]
    assert line.startswith("the model's config.json has output_router_logits") and "does not train it" in line


def test_expert_widths_decide_the_kernel() -> None:
    assert chosen("auto") == "experts: 2 of 4 for each token, computed by grouped_mm"
    assert chosen("auto", moe_intermediate_size=12).endswith("by eager")
    assert chosen("batched_mm").endswith("by batched_mm") and chosen("eager").endswith("by eager")
    assert chosen("auto", num_experts_per_tok=1).startswith("experts: 1 of 4")


@pytest.mark.parametrize(("choice", "kind", "keys", "message"), [
    ("grouped_mm", "qwen3_moe", {"moe_intermediate_size": 12}, "width 12, .* a multiple of 8; set auto"),
    ("eager", "llama", {"num_hidden_layers": 1}, "llama model has no experts; leave it out"),
    ("auto", "qwen3_moe", {"num_experts_per_tok": 5}, "5 of 4 experts; .* from 1 to 4"),
    ("auto", "qwen3_moe", {"num_experts_per_tok": 0}, "0 of 4 experts"),
])  # fmt: skip
def test_invalid_balance_is_refused(choice: str, kind: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chosen(choice, kind, **keys)


@pytest.mark.parametrize(
    ("trained", "needs"), [("*.mlp.experts.*", True), ("*.mlp.gate.*", True), ("*norm*", False)]
)
def test_the_input_of_a_mixture_of_which_a_part_is_trained_needs_a_gradient(
    trained: str, needs: bool
) -> None:
    """Else DeepSpeed reduces the gradients of the mixture before they are there (ZeRO 3 on two ranks)."""
    config = {"model_type": "qwen3_moe"} | keys_of("qwen3_moe")
    model = Model(from_config=config, trainable=(trained,))
    causal_lm = build_model(model, TokenFacts(VOCABULARY, None, None, None), 0, torch.float32).causal_lm
    assert causal_lm.get_input_embeddings()(torch.arange(4)[None]).requires_grad == needs
