"""Check a spec against the model's config.json: quantized weights, too few positions, layers that cannot be
cut into pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from dsft.spec.document import Finding, quote
from dsft.spec.schema import Parallel, Spec

MODEL = ("model.name_or_path", "model.from_config")

CUTTABLE = frozenset(
    """
    apertus arcee cohere cohere2 cohere_compass_text cwm doge ernie4_5 exaone4 falcon gemma gemma2 gemma3_text
    gemma4_unified_text glm glm4 gpt2 gpt_bigcode gpt_neox granite granite_swa helium hunyuan_v1_dense
    hyperclovax internlm3 iquestcoder jais2 llama minicpm3 ministral ministral3 mistral nemotron olmo olmo2
    olmo3 opt persimmon phi phi3 qwen2 qwen3 qwen3_5_text seed_oss smollm3 stablelm starcoder2 vaultgemma
    youtu
    """.split()
)
"""Model types that can be cut into pipeline stages; tests/architectures/test_stages.py compares two and three
stages of each with the whole model."""

PER_LAYER_INPUTS = ("gemma3n_text", "gemma4_text")


def uncuttable(config: Mapping[str, Any]) -> str | None:
    """Return why a model with this config cannot be cut into pipeline stages; None if nothing in the config
    prevents it."""
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


def model_findings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings that follow from the model's config: quantized weights, too few positions, a pipeline
    that is impossible."""
    yield from _quantized_findings(config)
    positions = config.get("max_position_embeddings")
    if _is_count(positions) and spec.data.max_length > positions:
        message = f"{spec.data.max_length} tokens are more than the model's {positions} positions"
        reads = ("data.max_length", *MODEL)
        yield Finding(("data", "max_length"), f"{message}; set it to {positions} or less", reads)
    if spec.parallel.pipeline_stages > 1:
        yield from _pipeline_findings(spec.parallel, config)


def _pipeline_findings(parallel: Parallel, config: Mapping[str, Any]) -> Iterator[Finding]:
    stages, counts = parallel.pipeline_stages, _listed(parallel)
    path, reads = ("parallel", "pipeline_stages"), ("parallel.pipeline_stages", *MODEL)
    reason = uncuttable(config)
    if reason is not None:
        yield Finding(path, f"{stages} stages, but {reason}; set it to 1", reads)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if counts and _is_count(layers) and sum(counts) != layers:
        message = (
            f"{quote(list(counts))} are {sum(counts)} layers, the model has {layers}; write numbers that add "
            "up to that, or parameters"
        )
        yield Finding(("parallel", "pipeline_cut"), message, ("parallel.pipeline_cut", *MODEL))
    if _is_count(layers) and stages > layers:
        message = f"{stages} stages are more than the model's {layers} layers; set it to {layers} or less"
        yield Finding(path, message, reads)


def _listed(parallel: Parallel) -> tuple[int, ...]:
    """Return the number of layers of each stage if the spec lists them, else ()."""
    return () if isinstance(parallel.pipeline_cut, str) else parallel.pipeline_cut


def cut_findings(spec: Spec) -> Iterator[Finding]:
    counts, stages = _listed(spec.parallel), spec.parallel.pipeline_stages
    if not isinstance(spec.parallel.pipeline_cut, str) and len(counts) != stages:
        message = (
            f"{quote(list(counts))} has {len(counts)} stages, parallel.pipeline_stages is {stages}; write a "
            f"number of layers for each stage, or parameters{_as_many(len(counts))}"
        )
        reads = ("parallel.pipeline_cut", "parallel.pipeline_stages")
        yield Finding(("parallel", "pipeline_cut"), message, reads)


def _as_many(stages: int) -> str:
    return f", or set parallel.pipeline_stages to {stages}" if stages else ""


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _quantized_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the weights are not quantized, by config.json or from_config."""
    for key in ("quantization_config", "compression_config"):
        value = config.get(key)
        if value:
            method = value.get("quant_method") if isinstance(value, Mapping) else None
            named = f" ({quote(method)})" if method else ""
            message = (
                f"its config's {key}{named} says that its weights are quantized, which cannot be trained"
            )
            yield Finding(("model",), f"{message}; name the model that it was made from", MODEL)
