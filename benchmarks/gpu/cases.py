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
    "setup": "versions, what the machine has, and the two ceilings: a matrix product and a copy",
    "correct": "the same numbers as a plain loop, as the CPU, as padded rows, as without a fault",
    "speed": "1.3 billion parameters, 4,096 tokens, all weights trained",
    "large": "8 billion parameters: LoRA, and all weights; 3 billion with the optimizer on the host",
    "preferences": "DPO, 1.3 billion parameters",
    "several": "two and more GPUs: ZeRO 1 to 3, a pipeline, a rank that dies",
}
STAGE_SECONDS = 570
"""No case of a stage starts or continues after this many seconds: machines may be lent for ten minutes."""

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
    of the same work, whose losses it must have and over which its speed is told; `mode`: of the stand-in GPU,
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
    settings: `spec`, keys of the spec, `micro`, `max_length`, `lora`, `checkpointing` and `timed`, the number
    of steps that count."""
    told = {"model": model, "rows": rows, "way": way, **settings}
    needs = "trl" if "trl" in way else "liger_kernel" if "liger" in name else None
    return Case(name, stage, "speed", seconds, told, goals, beside, key, needs, gib)


FP32 = {"train.precision": "fp32"}
PLAN: Goal = ("plan_error", "<=", 0.05)
FULL_3B = {"parallel.zero_stage": 2, "model.gradient_checkpointing": True}

CASES: tuple[Case, ...] = (
    Case("environment", "setup", "environment", 60, mode="fast"),
    Case("ceilings", "setup", "ceilings", 60, goals=(("matmul_tflops", ">=", 700), ("copy_tb_s", ">=", 4.0)),
         gib=8, mode="fast"),
    Case("doctor", "setup", "doctor", 120, mode="fast"),
    # --- the same numbers ---------------------------------------------------------------------------------
    Case("attention-fp32", "correct", "attention", 60, {"dtype": "float32"},
         (("gradient_error", "<=", 1e-5), ("other_segment_bits", "<=", 0))),
    Case("attention-bf16", "correct", "attention", 60, {"dtype": "bfloat16"},
         (("gradient_error", "<=", 1.5e-2), ("other_segment_bits", "<=", 0))),
    Case("quickstart", "correct", "quickstart", 150,
         goals=(("first_difference", "<=", 1e-5), ("difference", "<=", 1e-3))),
    *(
        Case(f"parity-fp32-zero{stage}-{rows}", "correct", "parity", 60, {
            "packing": rows == "packed", "spec": {**FP32, "parallel.zero_stage": stage},
        }, (("difference", "<=", 2e-6),))
        for stage, rows in ((0, "packed"), (1, "packed"), (1, "padded"), (2, "packed"), (3, "packed"))
    ),
    *(
        Case(f"parity-bf16-zero{stage}-{rows}", "correct", "parity", 60, {
            "packing": rows == "packed",
            "spec": {"train.precision": "bf16", "parallel.zero_stage": stage},
        }, (("difference", "<=", 2e-3),))
        for stage, rows in ((1, "packed"), (1, "padded"), (2, "packed"), (3, "packed"))
    ),
    Case("resume-after-kill", "correct", "resume", 120, {"spec": FP32}, (("difference", "<=", 1e-3),)),
    Case("offload-cpu", "correct", "same_losses", 150, {
        "spec": {**FP32, "parallel.zero_stage": 2},
        "other": {"parallel.offload_optimizer": {"device": "cpu"}},
    }, (("difference", "<=", 1e-4),)),
    Case("lora", "correct", "same_losses", 90, {
        "spec": {**FP32, "model.lora": {"rank": 8}}, "other": {}, "other_on": "cpu",
    }, (("difference", "<=", 1e-3),)),
    Case("dpo-references", "correct", "references", 150, {"spec": {**FP32, "model.lora": {"rank": 8}}},
         (("difference", "<=", 1e-4), ("first_margin", "<=", 1e-5))),
    Case("out-of-memory", "correct", "out_of_memory", 200, gib=100),
    # last: it needs libaio, and its compiler a minute
    Case("offload-nvme", "correct", "same_losses", 150, {
        "spec": {**FP32, "parallel.zero_stage": 3},
        "other": {"parallel.offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}},
    }, (("difference", "<=", 1e-4),)),
    # --- 1.3 billion parameters ---------------------------------------------------------------------------
    speed("documents-dsft", "speed", "1b", "documents", "dsft", ("mfu", ">=", 0.45), PLAN,
          beside=("documents-plain", "documents-trl"), gib=90, seconds=150),
    speed("documents-plain", "speed", "1b", "documents", "plain", gib=110),
    speed("documents-trl", "speed", "1b", "documents", "trl", gib=110),
    speed("documents-liger", "speed", "1b", "documents", "dsft", beside=("documents-dsft",), gib=90,
          key="model.kernels", spec={"model.kernels": "liger"}),
    speed("short-dsft", "speed", "1b", "short", "dsft", ("mfu", ">=", 0.40), PLAN,
          beside=("short-plain", "short-trl"), gib=90),
    speed("short-plain", "speed", "1b", "short", "plain-packed", gib=110),
    speed("short-trl", "speed", "1b", "short", "trl-packed", gib=110),
    speed("short-liger", "speed", "1b", "short", "dsft", beside=("short-dsft",), gib=90,
          key="model.kernels", spec={"model.kernels": "liger"}),
    speed("documents-zero1", "speed", "1b", "documents", "dsft", beside=("documents-dsft",), gib=90,
          spec={"parallel.zero_stage": 1}),
    speed("documents-compiled", "speed", "1b", "documents", "dsft", beside=("documents-dsft",), gib=90,
          seconds=150, spec={"model.compile": True, "data.packing": False}),
    # --- 8 and 3 billion ----------------------------------------------------------------------------------
    speed("lora-dsft", "large", "8b", "documents", "dsft", ("tokens_per_s", ">=", 13500), PLAN,
          beside=("lora-plain", "lora-trl"), gib=120, seconds=200, timed=10, micro=2, lora=16),
    speed("full-dsft", "large", "8b", "documents", "dsft", ("mfu", ">=", 0.40), PLAN,
          beside=("full-plain",), gib=135, seconds=240, timed=10, micro=2, checkpointing=True,
          spec={"parallel.zero_stage": 3}),
    speed("lora-plain", "large", "8b", "documents", "plain", gib=120, seconds=120, timed=10,
          micro=2, lora=16),
    speed("lora-trl", "large", "8b", "documents", "trl", gib=120, seconds=120, timed=10,
          micro=2, lora=16),
    speed("full-plain", "large", "8b", "documents", "plain", gib=135, seconds=150, timed=10, micro=2,
          checkpointing=True),
    speed("offload-none", "large", "3b", "documents", "dsft", gib=100, seconds=150, timed=10, micro=8,
          spec=FULL_3B),
    speed("offload-host", "large", "3b", "documents", "dsft", ("ratio offload-none", ">=", 0.70),
          beside=("offload-none",), gib=60, seconds=240, timed=10, micro=8,
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
