"""List the features that dsft does not offer, by the keys and values with which people ask for them.

Each has a clause that says what to do instead. docs/limits.md has the list. Keys that DeepSpeed has removed
from its JSON are in dsft/plan/ds_keys.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsft.spec.task import task_names

METHODS = ("adapter", "finetuning_type", "peft_type", "peft_method", "train_type", "tuner_type")
OPTIMIZERS = ("optim.name", "optimizer", "optim.type")
PRECISIONS = ("train.precision", "mixed_precision", "dtype", "torch_dtype", "precision")
SHORT = 2  # letters of a name that other words may contain
TASKS = ("task", "stage", "rl", "training_type", "rlhf_type")


@dataclass(frozen=True)
class NotOffered:
    """A feature that is not offered, and the names that ask for it: separated by spaces, lower case, `_` for
    `-`.

    A name fits a key where it is one or several of its words: `fsdp` fits `fsdp_config`. One of a letter or
    two (`sp`) fits alone, as `use_sp`, `sp_size` and `sp_degree`.
    keys     names in a key that a spec does not have
    values   names in the value of one of the keys `of`, which mean something else with other values
    in_json  dotted keys of a DeepSpeed JSON
    """

    title: str
    way_out: str
    keys: str
    of: tuple[str, ...] = ()
    values: str = ""
    in_json: str = ""

    def clause(self) -> str:
        return f"dsft does not offer {self.title}; {self.way_out}"


NOT_OFFERED: tuple[NotOffered, ...] = (
    NotOffered(
        "QLoRA by other keys than model.quantize, or weights in GPTQ, AWQ, HQQ or int8",
        "set model.lora and model.quantize: nf4, which quantizes an unquantized model as it is read",
        "4bit 8bit bnb quantization quant qlora gptq awq hqq",
        METHODS,
        "qlora",
        "weight_quantization",
    ),
    NotOffered(
        "expert parallelism",
        "use parallel.zero_stage: 3, which shards the experts too, or parallel.pipeline_stages",
        "expert_parallel expert_model_parallel ep",
        in_json="expert_parallel",
    ),
    NotOffered(
        "tensor parallelism",
        "use parallel.zero_stage: 3 to shard every weight, or parallel.pipeline_stages to divide the layers",
        "tensor_parallel tensor_model_parallel model_parallel tp autotp",
        in_json="tensor_parallel",
    ),
    NotOffered(
        "context parallelism by ring attention",
        "use parallel.sequence_parallel, which splits rows by all-to-alls over attention heads",
        "fpdt context_parallel cp ring_attn ring_attention parallelism_config",
    ),
    NotOffered(
        "sequence parallelism by DeepSpeed's own keys",
        "set parallel.sequence_parallel in the spec, which needs no key of DeepSpeed",
        "",
        in_json="sequence_parallel_size data_parallel_size",
    ),
    NotOffered(
        "parallel engines other than DeepSpeed (FSDP, DDP, Megatron)",
        "use parallel.zero_stage: 3, which shards as FSDP does, or 0, which is plain data parallelism",
        "fsdp fsdp2 ddp megatron distributed_type",
    ),
    NotOffered(
        "arithmetic in fewer than 16 bits (fp8, int8), or 16-bit master weights and optimizer states",
        "use train.precision: bf16, which keeps both in fp32, and shard them (parallel.zero_stage) or "
        "offload them (parallel.offload_optimizer)",
        "fp8 int8 mxfp8 nvfp4 transformer_engine optimizer_states master_weights optimizer_dtype",
        PRECISIONS,
        "fp8 float8 int8 int4 mxfp8 nvfp4 8 4",
        "bf16.bf16_optimizer_states bf16.bf16_master_weights_and_grads fp16.fp16_master_weights_and_grads",
    ),
    NotOffered(
        "optimizers other than AdamW, Muon and SGD (LAMB, Lion, Adafactor, paged, GaLore, …)",
        "set optim.name: adamw; if its states take too much memory, set adamw_8bit, shard them "
        "(parallel.zero_stage) or offload them (parallel.offload_optimizer)",
        "galore badam apollo lomo loraplus onebit_adam schedule_free sophia optim_args optim_target_modules",
        OPTIMIZERS,
        "lion lamb adafactor 8bit 4bit 32bit paged galore apollo lomo adalomo sophia schedule_free "
        "onebitadam onebitlamb adagrad rmsprop ademamix",
    ),
    NotOffered(
        "training with generated answers or their rewards (PPO, GRPO, on-policy distillation)",
        f"the tasks are {task_names()}",
        "reward_model reward_funcs grpo ppo num_generations vllm hybrid_engine",
        TASKS,
        "ppo grpo gspo dapo rloo reinforce online_dpo nash_md xpo",
        "hybrid_engine",
    ),
    NotOffered("BCO", "use task: kto, which trains on the same rows", "", TASKS, "bco"),
    NotOffered(
        "adapters other than LoRA and DoRA (prompt and prefix tuning, IA³, OFT, PiSSA, …)",
        "use model.lora, or model.trainable for a part of the model's own weights",
        "loftq pissa llama_pro virtual_tokens prompt_tuning prefix_tuning p_tuning ia3 adalora oft boft vera "
        "lisa init_lora_weights",
        METHODS,
        "oft boft ia3 adalora vera prefix_tuning prompt_tuning p_tuning loha lokr longlora llama_adapter",
    ),
    NotOffered(
        "training on images, video or sound",
        "train a text model on text",
        "image video audio media vision vit mm_proj multimodal processor_type",
    ),
    NotOffered(
        "other ways to shard or offload (ZeRO++, MiCS, ZenFlow, SuperOffload, Twin-Flow, GPUDirect storage)",
        "use parallel.zero_stage, parallel.offload_optimizer: {device: cpu or nvme} or "
        "train.reduce_dtype: bf16",
        "zero++ zeropp zero_quantized_weights zero_quantized_gradients mics zenflow super_offload "
        "superoffload twin_flow offload_ratio use_gds",
        in_json="zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients "
        "zero_optimization.zero_quantized_nontrainable_weights zero_optimization.zenflow "
        "zero_optimization.offload_optimizer.super_offload zero_optimization.offload_optimizer.ratio "
        "aio.use_gds",
    ),
    NotOffered(
        "DeepSpeed's autotuning, elasticity, DeepCompile, data efficiency or own checkpoint engine",
        "leave it out: dsft plan SPEC --compare ranks layouts, cluster.min_hosts lets a run continue on "
        "fewer hosts, model.compile compiles the layers, and any number of ranks can read a checkpoint",
        "autotuning autotune auto_find_batch_size elastic elasticity deepcompile data_efficiency curriculum "
        "curriculum_learning random_ltd universal_checkpoint load_universal",
        in_json="autotuning compile data_efficiency datastates_ckpt",
    ),
)


KEYS_IN_JSON = {key: one for one in NOT_OFFERED for key in one.in_json.split()}
"""Dotted key that a DeepSpeed JSON may only switch off -> feature."""


def feature_of_key(name: str) -> NotOffered | None:
    """Return the feature that an unknown key of a spec asks for, in any section; None if it is none."""
    # without the prefix, since Megatron's pipeline_model_parallel_size is offered
    name = _normalized(name).removeprefix("pipeline_model_")
    return next((one for one in NOT_OFFERED if _fits(one.keys, name)), None)


def feature_of_value(name: str, value: object) -> NotOffered | None:
    """Return the feature that a value asks for; None if it is none. name: the key as written, or the spec's
    dotted key."""
    features = (one for one in NOT_OFFERED if _normalized(name) in one.of)
    return next((one for one in features if _fits(one.values, str(value))), None)


def _fits(names: str, text: str) -> bool:
    text = _normalized(text)
    return any(
        f"_{name}_" in f"_{text}_"
        if len(name) > SHORT
        else text in (name, f"use_{name}", f"{name}_size", f"{name}_degree")
        for name in names.split()
    )


def in_json(file: Mapping[str, Any]) -> Iterator[tuple[str, NotOffered]]:
    """Yield (key, feature) for each one that a DeepSpeed JSON switches on."""
    return ((key, one) for key, one in KEYS_IN_JSON.items() if not is_off(lookup(file, key)))


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted key; None if it or a section above it is absent or null."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def is_off(value: object) -> bool:
    """Return whether a value switches a feature off. A size or share of 1 does, and so does a section in
    which nothing is on."""
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(is_off(below) for below in value.values())
    return value is not True and value in (None, False, 0, 1, "auto", "none", "")


def _normalized(name: str) -> str:
    return name.strip().lower().replace("-", "_")
