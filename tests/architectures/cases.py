"""The architectures that are shown to work, and a small model of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dsft.model.config import UNTESTED
from dsft.model.conversion import persistent_buffers
from tests.specs import dims

VOCABULARY = 128
SMALL = dims(16, 32, 2, 2, 1, head_dim=8, max_position_embeddings=64, sliding_window=4)
"""For every architecture that has a key of that name."""

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {  # attention through low-rank projections
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,  # some layers are dense
    "num_dense_layers": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
"""For every mixture that has a key of that name."""

MIXTURES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria_text": {},
    "axk1": LATENT,
    "bailing_hybrid": LATENT,
    "beam": LATENT | {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4_moe_lite": LATENT,
    "gpt_oss": ALTERNATING,
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "kolibri1": {},
    "laguna": {},
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax_m2": {},
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe_text": RECURRENT,
    "qwen3_moe": {},
    "qwen3_next": RECURRENT,
    "solar_open": {},
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": ALTERNATING | {"logit_scale": 0.25},
    "cohere_compass_text": ALTERNATING
    | {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
            for kind in ALTERNATING["layer_types"]
        }
    },
    "cwm": ALTERNATING,
    "doge": {},
    "ernie4_5": {},
    "exaone4": ALTERNATING,
    "falcon": {"new_decoder_architecture": False, "alibi": False},
    "gemma": {},
    "gemma2": ALTERNATING | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0},
    "gemma3_text": ALTERNATING,
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ALTERNATING["layer_types"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [32] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ALTERNATING["layer_types"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_unified_text": ALTERNATING,
    "glm": {},
    "glm4": {},
    "gpt2": NO_DROPOUT,
    "gpt_bigcode": NO_DROPOUT,
    "gpt_neox": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "granite_swa": ALTERNATING | {"logits_scaling": 4.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "minicpm3": LATENT,
    "ministral": ALTERNATING,
    "ministral3": {},
    "mistral": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": ALTERNATING,
    "opt": {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {"use_sliding_window": True} | ALTERNATING,
    "qwen3": {},
    "qwen3_5_text": RECURRENT,
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "vaultgemma": ALTERNATING,
    "youtu": LATENT,
} | MIXTURES

USUAL = (
    "apertus",  # its activation has parameters; norms of queries and keys
    "cohere2",  # LayerNorm without bias, attention beside the MLP, scaled logits, layers without positions
    "falcon",  # keys and values of one head in one matrix with the queries; packed rows are refused
    "gemma3n_text",  # embeddings of each layer, layers that share keys and values; cannot be cut
    "gpt2",  # learned positions, biases, weights the other way round, tied embedding
    "granite_swa",  # multipliers, a window in every other layer; packed rows by its own attention
    "phi",  # an output layer with a bias
    "phi3",  # queries, keys and values, and gate and up, in one matrix each; a window
    "qwen3_5_text",  # a convolution and a gated delta rule in place of attention
    "qwen3_moe",  # a mixture of experts, whose weights are joined on reading
)
"""What differs most from each other and from the models of tests/parity (Llama, Qwen 2 and 3, Gemma 2 and 3,
DeepSeek-V3, mixtures); the others are tried with -m long."""

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(UNTESTED, ({}, "is not tested")),
    "phi4_multimodal": ({}, "more than a text model"),
}
"""The others that `base_model_pp_plan` describes: a small config, and why they are refused."""

PACKED = {
    "doge": "eager", "falcon": "refused", "gpt_oss": "refused", "granite_swa": "eager",
    "granitemoe_swa": "eager", "mimo_v2_flash": "eager", "nemotron": "eager", "stablelm": "eager",
}  # fmt: skip
"""Where packed rows are not attended per segment: by the model's own attention, or not at all."""

MIXES = "mix tokens outside of the attention"
SPLIT = {
    "bailing_hybrid": MIXES, "doge": "passes its own mask", "falcon": "computes its attention itself",
    "gpt_oss": "passes s_aux", "granite_swa": "passes s_aux", "granitemoe_swa": "passes s_aux",
    "lfm2": MIXES, "lfm3": MIXES, "mimo_v2_flash": "passes s_aux", "nemotron": "does not pass the segments",
    "qwen3_5_moe_text": MIXES, "qwen3_5_text": MIXES, "qwen3_next": MIXES,
    "stablelm": "does not pass the segments",
}  # fmt: skip
"""Where rows cannot be split over ranks, and why."""

BOUND = 1e-6


def keys_of(kind: str) -> dict[str, Any]:
    """`model.from_config`, without its model_type, of the small model."""
    config_class = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    small = SMALL | (EXPERTS if kind in MIXTURES else {})
    return {name: value for name, value in small.items() if name in known} | ARCHITECTURES[kind]


def deeper(kind: str) -> dict[str, Any]:
    """Return what makes the small model one of four layers, which can be cut in unequal parts."""
    keys = keys_of(kind)
    times = 4 // keys["num_hidden_layers"]
    lists = {name: value * times for name, value in keys.items() if name.endswith("layer_types")}
    return {"num_hidden_layers": 4} | lists


def small_config(kind: str, **more: Any) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[kind](
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        use_cache=False,
        **keys_of(kind) | more,
    )
    return config


def small_model(kind: str, seed: int = 11, **more: Any) -> PreTrainedModel:
    """Made by transformers alone. All parameters are moved from their first values, so that a bias of 0 or a
    norm of 1 is not lost unseen."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small_config(kind, **more)).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *persistent_buffers(model).values()):
            tensor.add_(0.02 * torch.randn_like(tensor))
    return model
