"""Small multimodal models with random weights, made by transformers alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedModel

from tests.architectures.cases import LATENT

VOCABULARY = 128
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip
QWEN_VIT = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 8,
}

WHOLES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": TEXT | WINDOWS, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
    "gemma4": {
        "text_config": TEXT
        | WINDOWS
        | {
            "num_hidden_layers": 4,
            "layer_types": WINDOWS["layer_types"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        "vision_config": SIGLIP | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "gemma4 with experts": {
        "text_config": TEXT
        | WINDOWS
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
        | {"hidden_size_per_layer_input": 0},
        "vision_config": SIGLIP | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3"} | TEXT,
        "vision_config": SIGLIP | {"head_dim": 8, "model_type": "pixtral"},
    },
    "qwen2_5_vl": {"text_config": TEXT | ROPE, "vision_config": QWEN_VIT},
    "qwen3_vl": {
        "text_config": TEXT | ROPE,
        "vision_config": QWEN_VIT | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_5": {
        "text_config": TEXT | ROPE | DELTA,
        "vision_config": QWEN_VIT | {"deepstack_visual_indexes": [], "num_position_embeddings": 16},
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | ROPE | EXPERTS,
        "vision_config": QWEN_VIT | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
    "qwen3_5_moe": {
        "text_config": TEXT | ROPE | DELTA | EXPERTS,
        "vision_config": QWEN_VIT | {"deepstack_visual_indexes": [], "num_position_embeddings": 16},
    },
    "llava": {"text_config": {"model_type": "llama"} | TEXT, "vision_config": SIGLIP},
    "llava with experts": {
        "text_config": {"model_type": "qwen3_moe"} | TEXT | EXPERTS,
        "vision_config": SIGLIP,
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3"}
        | TEXT
        | LATENT
        | {"head_dim": 4, "first_k_dense_replace": 1}
        | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "vision_config": {key: value for key, value in SIGLIP.items() if key != "image_size"},
    },
    "aria": {
        "text_config": TEXT | {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 24},
        "vision_config": SIGLIP | {"model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {4: 2},
    },
}
"""By model type, and what is added where there are several of one type."""


def small_whole(kind: str, seed: int = 11, *, tied: bool = True, **more: Any) -> PreTrainedModel:
    """Return a model in float32, with every parameter moved from its first value."""
    torch.manual_seed(seed)
    keys: dict[str, Any] = {"tie_word_embeddings": tied} | WHOLES[kind] | more
    keys["text_config"] = keys["text_config"] | {"tie_word_embeddings": tied}
    config = CONFIG_MAPPING[kind.split()[0]](**keys)
    whole_class: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    model: PreTrainedModel = whole_class._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model
