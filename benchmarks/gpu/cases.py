"""What `scripts/gpu` runs: one table. A case is a function of benchmarks/gpu/bodies.py with its settings, the
seconds that it may take, and what its figures must reach.

A case is a process of its own; one that fails takes no other with it. `--rehearse` gives every case a model
of 100 thousand parameters and rows of a few hundred tokens; its goals on speed and memory then do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

STAGES = {
    "setup": "versions, what the machine has, and its ceilings",
    "kernels": "milliseconds of the kernels that decide the speed, and one step summed by kind of kernel",
    "correct": "the same numbers as a plain loop, as the CPU, as padded rows",
    "speed": "1.3 billion parameters, 4,096 tokens, all weights trained",
    "large": "8 billion parameters: LoRA, and all weights",
    "memory": "a run to its end beside its plan, and what does not fit",
    "more": "more of `correct`: other ZeRO stages, mixtures, offload, references",
    "offload": "3 billion parameters with the optimizer on the host",
    "preferences": "DPO, 1.3 billion parameters",
    "several": "two and more GPUs: ZeRO 1 to 3, a pipeline, a rank that dies",
}
"""In the order in which they matter. Each is to fit into ten minutes, its installation included; within one
the cases that matter most come first."""
STAGE_SECONDS = 570
"""No case of a stage starts or continues so many seconds after its command was typed: machines may be lent
for ten minutes. What was left out is named at the end."""

Goal = tuple[str, Literal[">=", "<="], float]  # a figure of the result, its bound

LLAMA = {"model_type": "llama", "max_position_embeddings": 8192, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "small": LLAMA | {
        "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "100m": LLAMA | {
        "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
        "num_key_value_heads": 4, "vocab_size": 32000,
    },
    "moe": {
        "model_type": "qwen3_moe", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16,
        "num_experts_per_tok": 4, "moe_intermediate_size": 256, "vocab_size": 4096,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "1b": LLAMA | {
        "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 32000,
    },
    "3b": LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`seconds`: the limit of its process group; `key`: of the spec, and `needs`: a module, without which the
    case is not run; `gib`: memory of a GPU that must be free; `gpus`: how many there must be; `beside`: cases
    of the same work, whose losses it must have and over which its speed is; `mode`: of the stand-in GPU,
    for a rehearsal."""

    name: str
    stage: str
    body: str
    seconds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    beside: tuple[str, ...] = ()
    key: str | None = None
    needs: str | None = None
    gib: float = 4
    gpus: int = 1
    mode: Literal["numbers", "fast"] = "numbers"


def speed(  # noqa: PLR0913  a row of the table
    name: str,
    stage: str,
    model: str,
    rows: str,
    way: str,
    *goals: Goal,
    seconds: int = 90,
    beside: tuple[str, ...] = (),
    key: str | None = None,
    gib: float = 60,
    **settings: Any,
) -> Case:
    """`rows`: documents (of 4,096 tokens each), short (about 205 tokens) or pairs; `way`: dsft, plain, …;
    settings: `spec`, keys of the spec, `micro`, `max_length`, `lora`, `quantize`, `checkpointing`, and
    `timed`: how many steps count, in three parts whose spread is reported."""
    arguments = {"model": model, "rows": rows, "way": way, **settings}
    needs = "bitsandbytes" if "quantize" in settings else "trl" if "trl" in way else None
    return Case(name, stage, "speed", seconds, arguments, goals, beside, key, needs, gib)


FP32, BF16 = {"train.precision": "fp32"}, {"train.precision": "bf16"}
PLAN: Goal = ("plan_error", "<=", 0.03)
LORA = {"model.lora": {"rank": 16, "alpha": 32.0}}
FULL_3B = {"parallel.zero_stage": 2, "model.gradient_checkpointing": True}
TORCH, LIGER = {"model.kernels": "torch"}, {"model.kernels": "liger"}


def parity(stage: str, zero: int, precision: str, rows: str, seconds: int = 120) -> Case:
    settings = {
        "packing": rows == "packed",
        "spec": {"train.precision": precision, "parallel.zero_stage": zero}
        | (TORCH if precision == "fp32" else {}),
    }
    bound = 2e-6 if precision == "fp32" else 2e-3
    name = f"parity-{precision}-zero{zero}-{rows}"
    return Case(name, stage, "parity", seconds, settings, (("difference", "<=", bound),))


def same(  # noqa: PLR0913  a row of the table
    name: str, stage: str, bound: float, spec: Mapping[str, Any], other: Mapping[str, Any], seconds: int = 90,
    **settings: Any,
) -> Case:  # fmt: skip
    """Two runs that differ in the keys `other` alone, or in where they run (`other_on`)."""
    key, needs = settings.pop("key", None), settings.pop("needs", None)
    arguments = {"spec": dict(spec), "other": dict(other), **settings}
    goals: tuple[Goal, ...] = (("difference", "<=", bound),)
    return Case(name, stage, "same_losses", seconds, arguments, goals, key=key, needs=needs)


CASES: tuple[Case, ...] = (
    Case("environment", "setup", "environment", 60, mode="fast"),
    Case("ceilings", "setup", "ceilings", 60, goals=(("matmul_tflops", ">=", 700), ("copy_tb_s", ">=", 4.0)),
         gib=8, mode="fast"),
    Case("doctor", "setup", "doctor", 120, mode="fast"),
    # --- kernels ------------------------------------------------------------------------------------------
    Case("kernels", "kernels", "kernels", 240, gib=30),
    Case("profile", "kernels", "profile", 150, {"model": "1b", "batch": 4}, gib=90),
    Case("profile-lora", "kernels", "profile", 150, {"model": "8b", "batch": 2, "spec": LORA}, gib=90),
    Case("profile-qlora", "kernels", "profile", 150,
         {"model": "8b", "batch": 2, "spec": {**LORA, "model.quantize": "nf4"}}, gib=90,
         needs="bitsandbytes"),
    # --- the same numbers ---------------------------------------------------------------------------------
    Case("attention-bf16", "correct", "attention", 60, {"dtype": "bfloat16"},
         (("gradient_error", "<=", 1.5e-2), ("other_segment_bits", "<=", 0))),
    parity("correct", 2, "bf16", "packed"),
    # a hundred steps of AdamW: what a short run of SGD does not show
    Case("adamw-100", "correct", "parity", 120, {
        "packing": True, "steps": 100,
        "spec": {**BF16, "parallel.zero_stage": 2, "optim.name": "adamw", "optim.learning_rate": 3e-4},
    }, (("difference", "<=", 5e-3),)),
    parity("correct", 2, "fp32", "packed"),
    Case("quickstart", "correct", "quickstart", 150,
         goals=(("first_difference", "<=", 1e-5), ("difference", "<=", 1e-3))),
    same("quantize", "correct", 1e-3, {**FP32, "model.lora": {"rank": 8}, "model.quantize": "nf4"}, {},
         other_on="cpu", needs="bitsandbytes"),
    same("liger", "correct", 2e-3, {**BF16, **TORCH}, LIGER, key="model.kernels", needs="liger_kernel"),
    parity("correct", 3, "bf16", "packed"),
    Case("resume-after-kill", "correct", "resume", 120, {"spec": FP32}, (("difference", "<=", 1e-3),)),
    # --- 1.3 billion parameters ---------------------------------------------------------------------------
    speed("documents-dsft", "speed", "1b", "documents", "dsft", ("mfu", ">=", 0.50), PLAN,
          ("ratio documents-plain", ">=", 1.0), beside=("documents-plain", "documents-trl"), gib=90,
          seconds=150),
    speed("documents-plain", "speed", "1b", "documents", "plain", gib=110),
    speed("short-dsft", "speed", "1b", "short", "dsft", ("mfu", ">=", 0.42),
          beside=("short-plain", "short-trl"), gib=90),
    speed("short-plain", "speed", "1b", "short", "plain-packed", gib=110),
    speed("documents-torch", "speed", "1b", "documents", "dsft", beside=("documents-dsft",), gib=90,
          spec=TORCH),
    speed("documents-compiled", "speed", "1b", "documents", "dsft", beside=("documents-dsft",), gib=90,
          seconds=150, spec={"model.compile": True, **TORCH}),
    speed("documents-trl", "speed", "1b", "documents", "trl", gib=110),
    speed("short-trl", "speed", "1b", "short", "trl-packed", gib=110),
    speed("documents-zero1", "speed", "1b", "documents", "dsft", beside=("documents-dsft",), gib=90,
          spec={"parallel.zero_stage": 1}),
    speed("short-torch", "speed", "1b", "short", "dsft", beside=("short-dsft",), gib=90, spec=TORCH),
    # --- 8 billion ----------------------------------------------------------------------------------------
    speed("lora-dsft", "large", "8b", "documents", "dsft", ("tokens_per_s", ">=", 14_000), PLAN,
          beside=("lora-plain", "lora-trl"), gib=75, seconds=200, timed=9, micro=2, lora=16),
    speed("full-dsft", "large", "8b", "documents", "dsft", ("mfu", ">=", 0.40), PLAN,
          beside=("full-plain",), gib=135, seconds=240, timed=9, micro=2, checkpointing=True,
          spec={"parallel.zero_stage": 3}),
    speed("lora-plain", "large", "8b", "documents", "plain", gib=75, seconds=120, timed=9,
          micro=2, lora=16),
    speed("qlora-dsft", "large", "8b", "documents", "dsft", PLAN, beside=("qlora-plain", "qlora-trl"),
          gib=75, seconds=200, timed=9, micro=2, lora=16, quantize="nf4"),
    speed("qlora-plain", "large", "8b", "documents", "plain", gib=75, seconds=120, timed=9,
          micro=2, lora=16, quantize="nf4"),
    speed("lora-torch", "large", "8b", "documents", "dsft", beside=("lora-dsft",), gib=75, seconds=150,
          timed=9, micro=2, lora=16, spec=TORCH),
    speed("full-plain", "large", "8b", "documents", "plain", gib=135, seconds=150, timed=9, micro=2,
          checkpointing=True),
    speed("full-torch", "large", "8b", "documents", "dsft", beside=("full-dsft",), gib=135, seconds=200,
          timed=9, micro=2, checkpointing=True, spec={"parallel.zero_stage": 3, **TORCH}),
    speed("lora-trl", "large", "8b", "documents", "trl", gib=75, seconds=120, timed=9,
          micro=2, lora=16),
    speed("qlora-trl", "large", "8b", "documents", "trl", gib=75, seconds=120, timed=9,
          micro=2, lora=16, quantize="nf4"),
    # --- memory -------------------------------------------------------------------------------------------
    Case("whole-run", "memory", "whole_run", 280, {"model": "1b", "batch": 4},
         (("phase_error", "<=", 0.03), ("device_error", "<=", 0.03)), gib=75),
    Case("out-of-memory", "memory", "out_of_memory", 200, gib=75),
    # --- more of the same numbers -------------------------------------------------------------------------
    same("mlp-chunks", "more", 2e-3, {**BF16, "model.gradient_checkpointing": True}, {"model.mlp_chunks": 4}),
    same("activation-offload", "more", 1e-4, {**FP32, "model.gradient_checkpointing": True},
         {"model.activation_offload": True}),
    same("checkpointing", "more", 1e-4, FP32, {"model.gradient_checkpointing": 0.5}),
    same("mixture", "more", 1e-3, {**FP32, "model.experts": {"implementation": "eager"}},
         {"model.experts": {"implementation": "grouped_mm"}}, model="moe"),
    same("mixture-bf16", "more", 2e-2, {**BF16, "model.experts": {"implementation": "eager"}},
         {"model.experts": {"implementation": "grouped_mm"}}, model="moe"),
    same("lora", "more", 1e-3, {**FP32, "model.lora": {"rank": 8}}, {}, other_on="cpu"),
    Case("dpo-references", "more", "references", 150, {"spec": {**FP32, "model.lora": {"rank": 8}}},
         (("difference", "<=", 1e-4), ("first_margin", "<=", 1e-5))),
    same("offload-cpu", "more", 1e-4, {**FP32, "parallel.zero_stage": 2},
         {"parallel.offload_optimizer": {"device": "cpu"}}, seconds=150),
    Case("attention-fp32", "more", "attention", 60, {"dtype": "float32"},
         (("gradient_error", "<=", 1e-5), ("other_segment_bits", "<=", 0))),
    *(
        parity("more", zero, precision, rows)
        for zero, precision, rows in (
            (1, "bf16", "packed"), (1, "bf16", "padded"), (0, "fp32", "packed"), (1, "fp32", "packed"),
            (3, "fp32", "packed"), (1, "fp32", "padded"),
        )
    ),
    # last: it needs libaio, and its compiler a minute
    same("offload-nvme", "more", 1e-4, {**FP32, "parallel.zero_stage": 3},
         {"parallel.offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}}, seconds=150),
    # --- the optimizer on the host ------------------------------------------------------------------------
    speed("offload-none", "offload", "3b", "documents", "dsft", gib=75, seconds=150, timed=9, micro=4,
          spec=FULL_3B),
    speed("offload-host", "offload", "3b", "documents", "dsft", ("ratio offload-none", ">=", 0.60),
          beside=("offload-none",), gib=60, seconds=280, timed=9, micro=4,
          spec={**FULL_3B, "parallel.offload_optimizer": {"device": "cpu"}}),
    # --- preferences --------------------------------------------------------------------------------------
    speed("dpo-precomputed", "preferences", "1b", "pairs", "dsft", ("ratio dpo-live", ">=", 1.25),
          beside=("dpo-live", "dpo-plain", "dpo-trl"), seconds=150, max_length=1024,
          spec={"dpo": {"share_prompts": False}}),
    speed("dpo-live", "preferences", "1b", "pairs", "dsft", PLAN, max_length=1024,
          spec={"dpo": {"reference": "live", "share_prompts": False}}),
    speed("dpo-shared", "preferences", "1b", "pairs", "dsft", ("ratio dpo-precomputed", ">=", 1.0),
          beside=("dpo-precomputed",), seconds=120, max_length=1024, spec={"dpo": {"share_prompts": True}}),
    speed("dpo-plain", "preferences", "1b", "pairs", "plain", seconds=120, max_length=1024),
    speed("dpo-trl", "preferences", "1b", "pairs", "trl-precomputed", seconds=120, max_length=1024),
    speed("dpo-trl-live", "preferences", "1b", "pairs", "trl-live", seconds=120, max_length=1024),
    # --- several GPUs -------------------------------------------------------------------------------------
    *(
        Case(f"ranks-zero{stage}", "several", "ranks", 120,
             {"spec": {**FP32, "parallel.zero_stage": stage}}, (("difference", "<=", 1e-4),), gpus=2)
        for stage in (1, 2, 3)
    ),
    Case("ranks-pipeline", "several", "ranks", 120,
         {"spec": {**FP32, "parallel.pipeline_stages": 2}}, (("difference", "<=", 1e-4),), gpus=2),
    Case("ranks-killed", "several", "killed_rank", 180, {"spec": FP32}, (("seconds_to_end", "<=", 60),),
         gpus=2),
)  # fmt: skip


def cases_of(stage: str, only: tuple[str, ...] = ()) -> list[Case]:
    return [case for case in CASES if case.stage == stage and (not only or case.name in only)]
