"""Architectures that a pipeline can be made of. Pure.

Takes a model's config.json as a mapping; says why it cannot be cut into stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CUTTABLE = frozenset(
    """
    apertus arcee cohere cohere2 cohere_compass_text cwm doge ernie4_5 exaone4 falcon gemma gemma2 gemma3_text
    gemma4_unified_text glm glm4 gpt2 gpt_bigcode gpt_neox granite granite_swa helium hunyuan_v1_dense
    hyperclovax internlm3 iquestcoder jais2 llama minicpm3 ministral ministral3 mistral nemotron olmo olmo2
    olmo3 opt persimmon phi phi3 qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm starcoder2 vaultgemma
    youtu
    """.split()
)
"""Two and three stages of each are the whole model: tests/architectures/test_stages.py."""

PER_LAYER_INPUTS = ("gemma3n_text", "gemma4_text")


def uncuttable(config: Mapping[str, Any]) -> str | None:
    """Why a model of this config cannot be cut into pipeline stages; None where nothing in it says so."""
    kind = config.get("model_type")
    if kind in PER_LAYER_INPUTS:
        return f"a {kind} model cannot be cut into stages, since each of its layers looks tokens up again"
    if isinstance(kind, str) and kind not in CUTTABLE:
        return (
            f"a {kind} model has not been shown to come apart into stages (docs/models.md has those that do)"
        )
    if config.get("num_kv_shared_layers"):
        return f"a {kind} model whose layers share keys and values cannot be cut into stages"
    if config.get("layerdrop"):
        return f"a {kind} model that leaves layers out at random (layerdrop) cannot be cut into stages"
    return None
