"""Check a spec against the model's config.json: quantized weights, too few positions, layers that cannot be
cut into pipeline stages, attention heads that ranks cannot share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard, get_args

from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding, value_finding
from dsft.spec.schema import Parallel, QuantizedForm, Spec

MODEL = ("model.name_or_path", "model.from_config")

PIPELINE_MODEL_TYPES = frozenset(
    """
    afmoe apertus arcee aria_text axk1 bailing_hybrid beam cohere cohere2 cohere_compass_text cwm
    deepseek_v2 deepseek_v3 doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo gemma
    gemma2 gemma3_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lfm2 lfm3 llama mellum mimo_v2_flash
    minicpm3 minimax_m2 ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt persimmon
    phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma youtu
    """.split()
)
"""Model types that can be cut into pipeline stages; tests/architectures/test_stages.py compares two and three
stages of each with the whole model."""

PIPELINE_PARTS = frozenset({"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"})
"""Text models of multimodal ones that can be cut; tests/architectures/test_wholes.py finds where."""

MIXTURES = frozenset(
    """
    afmoe aria_text axk1 bailing_hybrid beam deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo
    glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 kolibri1
    laguna mellum mimo_v2_flash minimax_m2 mixtral olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
    solar_open
    """.split()
)
"""Those of PIPELINE_MODEL_TYPES that are mixtures of experts, whatever their config says."""

MOST_MODULES = 20_000
"""Limit of layers and of experts; Doge has 16,384 experts by default."""

_COUNTS = ("layer", "layers", "expert", "experts")
"""Ends of keys that count modules, unlike shared_expert_intermediate_size and vocab_size_per_layer_input."""

PER_LAYER_INPUTS = ("gemma3n_text", "gemma4_text")


def pipeline_obstacle(config: Mapping[str, Any]) -> str | None:
    """Return why a model with this config cannot be cut into pipeline stages; None if nothing in the config
    prevents it."""
    kind = config.get("model_type")
    if kind in PER_LAYER_INPUTS:
        return f"a {kind} model cannot be cut into stages, since each of its layers looks up tokens again"
    if isinstance(kind, str) and kind not in PIPELINE_MODEL_TYPES | PIPELINE_PARTS:
        return f"cutting a {kind} model into stages has not been tested (docs/models.md lists tested models)"
    if config.get("num_kv_shared_layers"):
        return f"a {kind} model whose layers share keys and values cannot be cut into stages"
    if config.get("layerdrop"):
        return f"a {kind} model that skips layers at random (layerdrop) cannot be cut into stages"
    return None


def quantization(config: Mapping[str, Any], form: str | None) -> str | None:
    """Return the message about a model whose weights are quantized; None if they are not, or are as
    model.quantize, `form`, says."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            if (own := _in_4_bits(config[key])) is not None:
                ways = (
                    f"set model.quantize: {own}, with model.lora (for a reference_model, set its section's "
                )
                ways += f"reference_quantize: {own}), or use the model that was quantized"
                return None if form == own else f"the model's weights are in 4 bits ({own}); {ways}"
            method = config[key].get("quant_method") if isinstance(config[key], Mapping) else None
            named = f"{key} ({quote(method)})" if method else key
            message = f"the model's config has {named}, so its weights are quantized and cannot be trained; "
            return f"{message}use the model from which it was quantized"
    return None


def _in_4_bits(config: Any) -> str | None:
    """Return the form of the weights that bitsandbytes has quantized, with scales that are quantized too."""
    match config:
        case {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_quant_type": form,
        } if form in get_args(QuantizedForm):
            return str(form)
    return None


def too_many(config: object) -> str | None:
    """Return a clause about a number of layers or experts, also in a part of a config, that no model has: to
    build so many would take hours. None if there is none."""
    if not isinstance(config, Mapping):
        return None
    for key, value in config.items():
        if _is_count(value) and value > MOST_MODULES and str(key).endswith(_COUNTS):
            return f"{key} is {quote(value)}, and no model has more than {MOST_MODULES:,}"
    return next(filter(None, map(too_many, config.values())), None)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of the text model in the config.json of a multimodal model; other configs as they are.
    Older ones of Qwen-VL have these keys at the top, beside vision_config."""
    text, kind = config.get("text_config"), config.get("model_type")
    if isinstance(text, Mapping):
        return {**config, "model_type": None, **text}
    return {**config, "model_type": f"{kind}_text"} if "vision_config" in config else config


def model_findings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings that follow from the model's config: quantized weights, too few positions, a pipeline
    that is impossible."""
    if clause := too_many(config):
        yield Finding(("model",), f"{clause}; correct the config", MODEL)
    config = text_part(config)
    quantized = quantization(config, spec.model.quantize)
    if quantized is not None:
        yield Finding(("model",), quantized, MODEL)
    positions = config.get("max_position_embeddings")
    if _is_count(positions) and spec.data.max_length > positions:
        message = f"tokens are more than the model's {positions} positions; set it to {positions} or less"
        yield value_finding(spec, "data.max_length", message, *MODEL)
    if spec.parallel.pipeline_stages > 1:
        yield from _pipeline_findings(spec, config)
    yield from _head_findings(spec, config)
    yield from _expert_findings(spec, config)


def _head_findings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the ranks of a group that splits rows can share the attention heads of the queries."""
    size, key = spec.parallel.sequence_parallel, "parallel.sequence_parallel"
    heads = config.get("num_attention_heads", config.get("n_head"))
    if _is_count(heads) and heads % size:
        yield value_finding(spec, key, heads_not_divided(heads, size), *MODEL)


def heads_not_divided(heads: int, size: int) -> str:
    """Return the rest of a message on a group of `size` ranks whose number does not divide the heads."""
    divisors = [number for number in range(1, min(heads, 10_000) + 1) if heads % number == 0]
    nearest = [*[n for n in divisors if n < size][-1:], *[n for n in divisors if n > size][:1]]
    reason = f"does not divide the model's {heads} attention heads, which the ranks of a group share"
    return f"{reason}; set {' or '.join(map(str, nearest))}"


def _expert_findings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Check that the model has the experts that the spec means, as far as its config shows it."""
    kind, experts = str(config.get("model_type")), spec.model.experts
    if (spec.model.from_config or {}).get("output_router_logits"):
        message = "output_router_logits asks for transformers' balance loss, which depends on how a step is "
        message += "divided; leave it out, and set model.experts.balance"
        yield finding("model.from_config", message)
    if kind not in PIPELINE_MODEL_TYPES - MIXTURES or any("expert" in key for key in config):
        return
    for key, is_set in (("balance", experts.balance != "none"), ("freeze_router", experts.freeze_router)):
        if is_set:
            message = f"has no effect, since a {kind} model has no experts; leave it out"
            yield value_finding(spec, f"model.experts.{key}", message, *MODEL)


def unused_loss(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if a model's config asks for transformers' loss that balances experts."""
    if config.get("output_router_logits"):
        yield (
            "the model's config.json has output_router_logits, with which transformers trains a loss that "
            "balances experts; dsft does not train it, but that of model.experts.balance (docs/experts.md)"
        )


def _pipeline_findings(spec: Spec, config: Mapping[str, Any]) -> Iterator[Finding]:
    key, stages, counts = (
        "parallel.pipeline_stages",
        spec.parallel.pipeline_stages,
        _layers_per_stage(spec.parallel),
    )
    reason = pipeline_obstacle(config)
    if reason is not None:
        yield value_finding(spec, key, f"stages are not possible: {reason}; set it to 1", *MODEL)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    if counts and _is_count(layers) and sum(counts) != layers:
        message = f"{quote(list(counts))} adds up to {sum(counts)} layers, but the model has {layers}; "
        message += f"write numbers that add up to {layers}, or parameters"
        yield finding("parallel.pipeline_cut", message, *MODEL)
    if _is_count(layers) and stages > layers:
        message = f"stages are more than the model's {layers} layers; set it to {layers} or less"
        yield value_finding(spec, key, message, *MODEL)


def _layers_per_stage(parallel: Parallel) -> tuple[int, ...] | None:
    """Return the number of layers of each stage if the spec lists them."""
    return None if isinstance(parallel.pipeline_cut, str) else parallel.pipeline_cut


def cut_findings(spec: Spec) -> Iterator[Finding]:
    """Check that a list in parallel.pipeline_cut has an entry for each stage."""
    counts, stages = _layers_per_stage(spec.parallel), spec.parallel.pipeline_stages
    if counts is not None and len(counts) != stages:
        other = f", or set parallel.pipeline_stages to {len(counts)}" if counts else ""
        message = f"{quote(list(counts))} is for {len(counts)} stages, but pipeline_stages is {stages}; "
        message += f"write a number of layers for each stage, or parameters{other}"
        yield finding("parallel.pipeline_cut", message, "parallel.pipeline_stages")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
