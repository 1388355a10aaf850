"""Make a spec small: the same model class with few, narrow layers and random weights, a few of its rows, and
three steps, in the same mode of training."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from dsft.errors import Problem, SpecError, brief
from dsft.model.config import from_config, resolve_config, token_facts
from dsft.model.lora import own_names
from dsft.model.lora_targets import adapted_modules, saved_modules
from dsft.model.quantize import load_bitsandbytes
from dsft.model.weights import DTYPES
from dsft.plan.reference import other_model, reference_model
from dsft.spec.layout import Layout
from dsft.spec.schema import Lora, Model, Parallel, Reference, Spec

STEPS, SAVED = 3, 2
"""Steps of the run, and the step after which it saves a checkpoint to resume from."""
ROWS, HELD_OUT, LENGTH, EPS = 64, 8, 256, 1e-4
"""Most rows of a source, of held-out ones, and tokens of a row that is trained on; least `eps` of AdamW, so
that it does not amplify the rounding of gradients near 0."""
PERSIST_BELOW = 200
"""ZeRO 3 keeps parameters of at most 200 elements whole on each rank: the norms, as in the real size."""
NOISE = 0.05
"""Standard deviation of what is added to every weight, so that no bias is 0 and no norm 1."""

_KEPT = {
    "data": {"train", "eval", "packing", "train_on", "thinking", "on_bad_row", "chat_template"},
    "train": {"precision", "tf32", "reduce_dtype", "max_grad_norm", "seed", "label_smoothing"},
    "optim": {"name", "weight_decay", "betas", "momentum", "muon_momentum", "groups"},
}
"""Keys that the small run has from the spec; those that are not here have their defaults."""
_WIDTH, _WIDEST = 64, 256
_LARGEST = {
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 160),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "sliding_window"), 32),
    "word_embed_proj_dim": _WIDTH, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "linear_num_key_heads": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1,
}  # fmt: skip
"""Key of a config -> the largest value in the small one."""
_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
_LISTED = ("full_attn_idxs", "mlp_only_layers")
"""Keys that list layers by their numbers."""
_DROPOUT, _NOISE = ("dropout", "pdrop"), ("jitter_noise",)


MODEL, ADAPTER, REFERENCE = "model", "adapter", "reference"
"""Folders of `build`."""


def small_spec(spec: Spec, folder: Path, ranks: int) -> dict[str, Any]:
    """Return the values of the small run's spec. folder: of `build`, and for the runs; ranks: data-parallel
    ones, or groups that split rows."""
    micro = 2 if spec.data.packing else min(spec.train.micro_batch_size or 1, 2)
    lora, own = spec.model.lora, spec.of_task
    values = spec.model_dump(mode="json", include={"task": True, "model": True, "parallel": True, **_KEPT})
    values |= {"name": "run", "output_dir": str(folder), "wandb": {"mode": "disabled"}}
    values["checkpoint"] = {"every": SAVED, "keep_last": None, "resume": "never"}
    values["parallel"] |= {"pipeline_cut": "parameters"}
    values["model"] |= {"from_config": None, "tokenizer": None, "add_tokens": []}
    values["model"]["name_or_path"] = str(folder / MODEL)
    if lora is not None:
        values["model"]["lora"] |= {"path": str(folder / ADAPTER), "dropout": 0.0}
    values["data"] |= {
        "max_length": spec.data.max_length, "num_workers": 0, "cache_dir": str(folder / "data"),
        "on_too_long": "split" if spec.data.on_too_long == "split" else "truncate",
    }  # fmt: skip
    if spec.task == "kto":
        del values["data"]["eval"][1:]  # each set has an estimate of its own
    for name, most in (("train", ROWS), ("eval", HELD_OUT)):
        for source in values["data"][name]:
            source["max_rows"] = min(source["max_rows"] or most, most)
    several = 3 if spec.data.packing and spec.task_kind.rows == 1 else 2  # micro-batches, also packed
    size = several * ranks * micro
    values["train"] |= {"global_batch_size": size, "micro_batch_size": micro, "max_steps": STEPS}
    rate = values["optim"]["learning_rate"] = spec.optim.facts.trial_rate
    if "eps" in spec.optim.facts.keys:
        values["optim"]["eps"] = max(spec.optim.eps, EPS)
    for group in values["optim"]["groups"]:
        if group["learning_rate"]:
            group["learning_rate"] *= rate / spec.optim.learning_rate
    if own is not None:
        keys = values[str(spec.task_kind.section)] = own.model_dump(mode="json")
        if isinstance(own, Reference):
            other = spec.reference and own.reference_model and str(folder / REFERENCE)
            keys |= {"reference_model": other, "reference_store": None}
    return values


def zero3(parallel: Parallel) -> dict[str, Any]:
    """Return DeepSpeed's keys by which ZeRO 3 shards the small layers too, and the spec's offload, which
    would be off without its keys."""
    keys: dict[str, Any] = {"stage3_param_persistence_threshold": PERSIST_BELOW}
    for key, one in (("optimizer", parallel.offload_optimizer), ("param", parallel.offload_parameters)):
        keys[f"offload_{key}"] = {"device": one.device, "nvme_path": one.nvme_path}
    return keys


def mode(spec: Spec, layout: Layout) -> str:
    """Return what is trained how, in words."""
    parallel, is_copied = spec.parallel, spec.parallel.zero_hpz_partition_size > 1
    form = reference_model(spec).quantize if spec.reference else None
    words = {
        f"{spec.task}, {spec.train.precision}, ZeRO {parallel.zero_stage}": True,
        f"parameters of more than {PERSIST_BELOW} elements sharded": parallel.zero_stage == 3,
        f"a pipeline of {layout.pipeline_stages}": layout.pipeline_stages > 1,
        f"rows split over {layout.sequence_parallel}": layout.sequence_parallel > 1,
        f"optimizer on {parallel.offload_optimizer.device}": parallel.offload_optimizer.device != "none",
        f"parameters on {parallel.offload_parameters.device}": parallel.offload_parameters.device != "none",
        f"a copy of the parameters on each {parallel.zero_hpz_partition_size} processes": is_copied,
        "packed": spec.data.packing,
        "LoRA": spec.model.lora is not None,
        f"base in {spec.model.quantize}": spec.model.quantize is not None,
        f"reference in {form}": form is not None,
        f"balance {spec.model.experts.balance}": spec.model.experts.balance != "none",
        spec.optim.name: spec.optim.name != "adamw",
        f"{layout.world_size} process{'es' * (layout.world_size > 1)}": True,
    }
    return ", ".join(word for word, is_so in words.items() if is_so)


def build(spec: Spec, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the small model, with its tokenizer, and an adapter and a reference where the spec has such, into
    folders of `folder`. Raises SpecError where a model's class refuses the small config."""
    model = spec.model.model_copy(update={"attention": "auto"})
    model._head, model._labels = spec.model.head, spec.model.labels
    models = {MODEL: model}
    if spec.reference is not None and other_model(spec) is not None:
        models[REFERENCE] = reference_model(spec)
    if spec.model.lora is not None or spec.optim.facts.in_8_bits:
        load_bitsandbytes()
    torch.manual_seed(spec.train.seed)
    for name, one in models.items():
        # dsft switches dropout off where the policy starts as its reference, and in every reference
        drops = name == REFERENCE or (isinstance(spec.of_task, Reference) and spec.of_task.is_initial_policy)
        config = resolve_config(one, token_facts(tokenizer))
        made = small_model(config, spec.parallel.pipeline_stages, drops=drops)
        saved = made.to(dtype=DTYPES[spec.train.precision])
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        if name == MODEL and spec.model.lora is not None:
            _write_adapter(spec.model, spec.model.lora, made, folder / ADAPTER)


def _write_adapter(model: Model, lora: Lora, causal_lm: PreTrainedModel, folder: Path) -> None:
    """Write an adapter with the spec's settings and random values, as peft makes it."""
    from peft import LoraConfig, get_peft_model

    saved, problems = saved_modules(causal_lm, lora, str)
    linears, experts, more = adapted_modules(causal_lm, lora, [one for _, one in saved], str)
    if problems or more:
        raise SpecError("This spec cannot be proved.", [*problems, *more])
    targets: Any = lora.target_modules
    if not isinstance(targets, str):
        targets = [one for one in targets if any(f".{name}".endswith(f".{one}") for name in linears)]
    config = LoraConfig(
        task_type="SEQ_CLS" if model.head == "score" else "CAUSAL_LM", r=lora.rank,
        lora_alpha=lora.alpha, use_rslora=lora.use_rslora, use_dora=lora.use_dora,  # type: ignore[arg-type]
        target_modules=targets,
        target_parameters=[f"{name}.{one}" for name, own in experts.items() for one in own] or None,
        modules_to_save=list(lora.modules_to_save) or None,
    )  # fmt: skip
    with own_names():
        adapted: Any = get_peft_model(copy.deepcopy(causal_lm), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.add_(NOISE * torch.randn_like(parameter))
    adapted.save_pretrained(folder)


def small_model(config: PreTrainedConfig, stages: int, *, drops: bool = False) -> PreTrainedModel:
    """Return a model of the same class with random weights and narrow layers: two for each of `stages` and
    one of each kind. The heads that share keys stay, and where the hidden size need not follow from it the
    size of a head. drops: its dropout stays too. Raises SpecError where the class refuses it."""
    kind, reason = config.model_type, ""
    if kind not in CAUSAL:
        reason = "transformers has this text model only inside a multimodal one"
    for is_free in () if reason else (True, False):
        try:
            causal_lm = from_config(
                type(config).from_dict(_narrow(config, stages, is_free, drops)), dtype=torch.float32
            )
            with torch.no_grad():
                causal_lm(input_ids=torch.zeros(1, 8, dtype=torch.long))
                for parameter in causal_lm.parameters():
                    parameter.add_(NOISE * torch.randn_like(parameter))
        except Exception as error:  # whatever a class does with odd values
            reason = brief(error)
        else:
            return causal_lm
    message = f"a small {kind} model cannot be made ({reason}); use dsft prove with another model"
    raise refused("model", message)


def _narrow(config: PreTrainedConfig, stages: int, is_free: bool, drops: bool) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()

    def name(key: str) -> str:
        return str(config.attribute_map.get(key, key))

    heads, width = values[name("num_attention_heads")], values[name("hidden_size")]
    keys = [key for key in ("num_key_value_heads", "num_kv_heads") if values.get(key)]
    shared = heads // values[keys[0]] if keys else 1
    few = min(heads // shared, 2)
    size = values.get("head_dim") or width // heads
    is_free = is_free and "head_dim" in values
    if not is_free:
        size = max(16, min(size, _WIDEST // (few * shared)) // 8 * 8)
    step = math.lcm(few * shared, 8)
    values |= {name("num_attention_heads"): few * shared, **dict.fromkeys(keys, few)}
    values[name("hidden_size")] = -(-_WIDTH // step) * step if is_free else few * shared * size
    values |= {"head_dim": size} if "head_dim" in values else {}
    if values.get("linear_num_key_heads"):
        times = values["linear_num_value_heads"] // values["linear_num_key_heads"]
        values["linear_num_value_heads"] = 2 * times
    top_k = max([values[key] for key in _TOP_K if isinstance(values.get(key), int)], default=1)
    for key, limit in (_LARGEST | dict.fromkeys(_EXPERTS, max(4, 2 * top_k))).items():
        value = values.get(name(key))
        if isinstance(value, int) and not isinstance(value, bool):
            values[name(key)] = min(value, limit)
        elif isinstance(value, list) and all(isinstance(one, int) for one in value):
            values[name(key)] = [min(one, limit) for one in value]
    _keep_layers(values, name("num_hidden_layers"), stages)
    off = _NOISE if drops else (*_DROPOUT, *_NOISE)
    rates = [key for key, one in values.items() if isinstance(one, float) and key.endswith(off)]
    return values | dict.fromkeys(rates, 0.0)


def _keep_layers(values: dict[str, Any], key: str, stages: int) -> None:
    """Keep the first layer of each kind and as many more as are needed, in `values` of a config."""
    count, sharing = values[key], values.get("num_kv_shared_layers") or 0
    lists = {
        name: one
        for name, one in values.items()
        if isinstance(one, list) and len(one) == count > 1 and name not in _LISTED
    }
    dense = values.get("first_k_dense_replace") or values.get("num_dense_layers") or 0
    listed = [values.get(name) or () for name in _LISTED]
    kinds = [
        repr([layer < dense, layer < count - sharing, [layer in one for one in listed]])
        + repr([one[layer] for one in lists.values()])
        for layer in range(count)
    ]
    chosen = {kinds.index(kind) for kind in kinds}
    for layer in range(count):
        if len(chosen) < 2 * stages:
            chosen.add(layer)
    kept = sorted(chosen)
    values[key] = len(kept)
    values |= {name: [one[layer] for layer in kept] for name, one in lists.items()}
    for name in _LISTED:
        if values.get(name) is not None:
            values[name] = [kept.index(layer) for layer in values[name] if layer in kept]
    if values.get("per_layer_config"):
        own = {int(layer): one for layer, one in values["per_layer_config"].items()}
        values["per_layer_config"] = {kept.index(layer): one for layer, one in own.items() if layer in kept}
    if sharing:
        values["num_kv_shared_layers"] = sum(layer >= count - sharing for layer in kept)


def refused(where: str, message: str) -> SpecError:
    return SpecError("This spec cannot be proved.", [Problem(where, message)])
