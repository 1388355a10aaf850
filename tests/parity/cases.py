"""What is compared with the plain loop: cases by number of ranks, and how near each must come."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any, Literal

from dsft.plan.cut import Cut, balanced
from tests.specs import llama

ACCUMULATION = {"varying": (3, 1, 2), "one": (1, 1, 1), "four": (4, 4, 4)}
FAULTY_STEP = 1
CHUNK_ROWS = 3
LLAMA = llama(16, 48, 4, 2, 1, max_position_embeddings=64, initializer_range=0.02)
SMALL_HEADS = {"num_hidden_layers": 5, "head_dim": 8}
WINDOWS = {**SMALL_HEADS, "sliding_window": 6}  # shorter than most rows
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**LLAMA, "model_type": "mixtral", "intermediate_size": 8, "num_local_experts": 4},
    "olmoe": {**LLAMA, **EXPERTS, "model_type": "olmoe", "intermediate_size": 8},
    "qwen2_moe": {**LLAMA, **EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 8},
    # So many experts that in most steps some get no token on any rank, and one layer that is dense.
    "qwen3_moe_idle": {**LLAMA, **EXPERTS, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 64}
    | {"mlp_only_layers": [1]},
    "deepseek_v3_groups": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
del MIXTURES["olmoe"]["moe_intermediate_size"]
SHAPES: dict[str, dict[str, Any]] = {
    **MIXTURES,
    "llama": LLAMA,
    "llama_wide": {**LLAMA, "intermediate_size": 1400},  # moments of 4,096 elements and more have 8 bits
    "llama_tied": {**LLAMA, "tie_word_embeddings": True},
    "llama_4heads": {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama_4heads_tied": {**LLAMA, "num_attention_heads": 4, "tie_word_embeddings": True},
    "llama_6heads": {**LLAMA, "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
    "qwen2_tied": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**LLAMA, **SMALL_HEADS, "model_type": "qwen3", "tie_word_embeddings": False},
    "gemma2_tied": {**LLAMA, **WINDOWS, "model_type": "gemma2", "query_pre_attn_scalar": 8},
    "gemma2_4heads_tied": {**LLAMA, **WINDOWS, "model_type": "gemma2", "query_pre_attn_scalar": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "glm4_moe": {
        **LLAMA,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3_tied": {
        **LLAMA,
        **WINDOWS,
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
    "qwen3_5": {
        **LLAMA,
        "model_type": "qwen3_5_text",
        "head_dim": 8,
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "qwen3_moe": {
        **LLAMA,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "initializer_range": 0.1,
    },
    "deepseek_v3": {
        **LLAMA,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "initializer_range": 0.1,
    },
}
BALANCE_WEIGHT = 0.1


@dataclass(frozen=True)
class Case:
    """`micro_batches` names the numbers of micro-batches per step; `fault`: the gradient of FAULTY_STEP is
    not finite on one rank, in the first layer only, so that a pipeline's later stages see nothing of it;
    `packed`: a micro-batch is one row without padding, where the plain loop takes its rows one by one;
    `chunked`: the head never makes the logits of more than CHUNK_ROWS targets at once; `reference`: of
    preference pairs, where its log-probabilities come from (given: of another model than the start, as from a
    store); `teacher`: of distillation, likewise; `reward`: a reward model of preference pairs; `labels`:
    rows with labels, of classifiers or of KTO; `shared`:
    packed pairs whose prompt occurs once; `twice`: one layer's MLP is used twice in each forward;
    `unplanned`: DeepSpeed's JSON says one micro-batch per step; `sequence_parallel`: the ranks that split
    each row's tokens; `short`: one or two rows of 1 to 5
    tokens per micro-batch; `mlp_chunks`: chunks of tokens in which MLPs are computed."""

    mode: str  # of MODES, OFFLOADS and PIPELINES
    ranks: int
    optimizer: Literal["sgd", "adamw", "adamw_default_eps", "adamw_8bit", "muon"]
    micro_batches: Literal["varying", "one", "four"]
    max_norm: float = 0.0
    checkpointing: bool | int | float = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    fault: bool = False
    stages: int = 1
    packed: bool = False
    trains: Literal["all", "lora", "lora_fresh", "lora_tied", "dora", "trainable", "groups"] = "all"
    chunked: bool = False
    label_smoothing: float = 0.0
    reference: Literal["none", "given", "live", "adapter"] = "none"
    loss_type: Literal["sigmoid", "ipo", "orpo"] = "sigmoid"
    sft_weight: float = 0.0
    teacher: Literal["none", "given", "live"] = "none"
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    shared: bool = False
    torch_adam: bool = False  # offloaded, where DeepSpeed's CPU Adam cannot be compiled
    shape: str = "llama"  # of SHAPES
    twice: bool = False
    unplanned: bool = False
    balance: Literal["none", "sequence", "global_batch"] = "none"
    sequence_parallel: int = 1
    short: bool = False
    mlp_chunks: int = 1
    reward: bool = False
    labels: Literal["none", "classify", "kto"] = "none"

    @property
    def name(self) -> str:
        flags = [
            f"{self.stages}stages" * (self.stages > 2),
            f"split{self.sequence_parallel}" * (self.sequence_parallel > 1),
            "short" * self.short,
            "packed" * self.packed,
            "clipped" * (self.max_norm > 0),
            f"checkpointing{'' if self.checkpointing is True else self.checkpointing}"
            * bool(self.checkpointing),
            f"mlp{self.mlp_chunks}" * (self.mlp_chunks > 1),
            self.precision * (self.precision != "fp32"),
            "fault" * self.fault,
            self.trains * (self.trains != "all"),
            "chunked" * self.chunked,
            "smoothed" * (self.label_smoothing > 0),
            self.labels * (self.labels != "none"),
            f"{'ref' if self.labels == 'kto' else 'dpo'}_{self.reference}" * (self.reference != "none"),
            "reward" * self.reward,
            f"distill_{self.teacher}" * (self.teacher != "none"),
            self.divergence * (self.divergence != "forward_kl"),
            "shared" * self.shared,
            self.loss_type * (self.loss_type != "sigmoid"),
            "sft" * (self.sft_weight > 0),
            "torch_adam" * self.torch_adam,
            self.shape * (self.shape != "llama"),
            "twice" * self.twice,
            "unplanned" * self.unplanned,
            self.balance * (self.balance != "none"),
        ]
        return "-".join(
            filter(None, [self.mode, f"{self.ranks}ranks", self.optimizer, self.micro_batches, *flags])
        )

    @property
    def groups(self) -> int:
        """Into which a step's rows are divided."""
        return self.ranks // self.stages // self.sequence_parallel

    @property
    def of_answers(self) -> bool:
        return self.reference != "none" or self.has_scores

    @property
    def has_scores(self) -> bool:
        """Return whether the last layer gives scores."""
        return self.reward or self.labels == "classify"

    @property
    def form(self) -> Literal["padded", "packed", "shared"]:
        return "shared" if self.shared else "packed" if self.packed else "padded"

    @property
    def cut(self) -> Cut:
        """Of Llama's four layers as even as it goes; of others the last stage has fewer."""
        layers = SHAPES[self.shape]["num_hidden_layers"]
        return balanced([1.0] * layers, self.stages, after=0.0 if self.shape == "llama" else 2.0)

    @property
    def trained(self) -> Literal["all", "part", "adapter"]:
        if self.trains in ("all", "trainable", "groups"):
            return "all" if self.trains == "all" else "part"
        return "adapter"

    @property
    def is_pipeline(self) -> bool:
        return self.stages > 1

    @property
    def zero_stage(self) -> int:
        return int(self.mode.partition("zero")[2][0])

    @property
    def offloads(self) -> tuple[str, ...]:
        """Sections of `parallel`, by the mode's last word."""
        optimizer, parameters = "offload_optimizer", "offload_parameters"
        both = (optimizer, parameters)
        kept = {"offload": (optimizer,), "nvme": (optimizer,), "parameters": (parameters,), "both": both}
        return kept.get(self.mode.rpartition("_")[2], ())

    @property
    def on_disk(self) -> bool:
        """Return whether `offloads` are in files on a disk, not in host memory."""
        return "nvme" in self.mode

    @property
    def gathers_head(self) -> bool:
        return self.chunked and self.zero_stage == 3

    def bounds(self) -> dict[str, float]:
        """Return the largest differences allowed; worker.py defines each figure."""
        if self.precision != "fp32":
            own = MUON_BF16_BOUNDS if self.optimizer == "muon" else SCORE_BOUNDS if self.has_scores else {}
            return BF16_BOUNDS | own
        if self.optimizer == "adamw_default_eps":
            return DEFAULT_EPS_BOUNDS
        if self.optimizer == "adamw_8bit":
            return BOUNDS_8_BITS | ({"gradient": 2e-6} if self.trained == "adapter" else {})
        bounds = FP32_BOUNDS | (ADAPTER_BOUNDS if self.trained == "adapter" else {})
        bounds |= FRESH_BOUNDS if self.trains == "lora_fresh" else {}
        bounds |= SHAPE_BOUNDS if not self.shape.startswith("llama") else {}
        bounds |= IDLE_BOUNDS if self.shape == "qwen3_moe_idle" and self.offloads else {}
        apart = self.chunked and (self.stages > 1 or self.of_answers)
        return bounds | (CHUNKED_BOUNDS if apart else {})


FP32_BOUNDS = {
    "fresh": 0.0, "loss": 1e-6, "gradient": 1e-6, "norm": 1e-6, "weights": 1e-6, "change": 1e-5,
    "evaluation": 1e-6, "metrics": 1e-6, "frozen": 0.0, "copies": 0.0, "gathers": 0.0, "busy": 0.0,
}  # fmt: skip
# Under so small an eps an element whose gradient is near 0 moves by rounding noise.
DEFAULT_EPS_BOUNDS = {name: bound for name, bound in FP32_BOUNDS.items() if name != "weights"}
# Where a moment lies between two codes, a rounding error decides; two ranks quantize a shared block apart.
BOUNDS_8_BITS = FP32_BOUNDS | {"weights": 2e-4, "change": 2e-3}
# Against the plain loop in fp32: what bf16 costs, with fp32 master weights.
BF16_BOUNDS = {
    "fresh": 0.0, "loss": 1e-3, "gradient": 5e-2, "norm": 5e-3, "change": 3e-2, "evaluation": 1e-3,
    "metrics": 1e-3, "frozen": 0.0, "copies": 0.0,
}  # fmt: skip

# A score is one product of hidden states in bf16, where the log-probability of an answer is a sum.
SCORE_BOUNDS = {"metrics": 2e-3}

# Adapters begin at values of 0.1 to 1 and change by 1e-3, of which the last bit of a value is 3e-5;
# DeepSpeed's CPU Adam rounds once more. The terms of peft's DoRA cancel, which costs a bit of the gradient.
ADAPTER_BOUNDS = {"change": 5e-5, "gradient": 2e-6}

# A new adapter's B begins at 0, so that its weights are their change and have the relative error of that: in
# these cases the plain loop is off from itself in float64 by up to 2.5e-6, the engine by up to 3.7e-6.
FRESH_BOUNDS = {"weights": 5e-6}

# The head's gradients are added up and then multiplied by the loss's scale, the plain loop's the other way
# round, so their roundings are independent. In these cases the pipeline is off from the plain loop in float64
# by up to 0.9e-6, the plain loop itself by up to 1.0e-6, and each by 0.7e-7 in the root mean square. So it is
# with pairs: the engine is off by up to 0.8e-6, the plain loop by 0.7e-6.
CHUNKED_BOUNDS = {"gradient": 2e-6}

# Biases of Qwen's keys and Gemma's norms begin at 0 too, and their gradients' terms cancel. With everything
# in float64, norms and softmax too, at the engine's weights of each step, the plain loop is off by up to
# 4.7e-6 of a gradient's largest element and the engine by up to 5.0e-6 (both Gemma 3; Qwen 2: 1.9e-6 and
# 3.3e-6), from each other by up to 1.7e-6.
SHAPE_BOUNDS = {"gradient": 3e-6, "weights": 5e-6}

# Some gradients' smallest singular values are 3e-5 of the largest one, below their rounding in bf16, and Muon
# brings all of them near 1.
MUON_BF16_BOUNDS = {"change": 6e-2}

# Experts without a token change by weight decay alone, 3e-5 of a weight a step, which DeepSpeed's CPU Adam
# rounds once more.
IDLE_BOUNDS = {"change": 5e-5}

MODES = ("zero0", "zero1", "zero2", "zero3", "zero3_offload")
OFFLOADS = ("zero1_offload", "zero2_offload")  # on two ranks only, where the pipeline is tried with it too
PIPELINES = ("pipeline_zero0", "pipeline_zero1")


PAIRED = (
    *itertools.product(
        ("zero_stage", "offloads", "is_pipeline"), ("precision", "packed", "trained", "reward")
    ),
    *itertools.product(("ranks",), ("zero_stage", "is_pipeline")),
    ("precision", "packed"), ("precision", "trained"), ("packed", "trained"),
    ("packed", "reward"), ("trained", "reward"), ("shared", "reward"),
    ("is_pipeline", "labels"), ("packed", "labels"), ("trained", "labels"),
    ("optimizer", "trained"),
)  # fmt: skip
"""Pairs of fields and properties of a case of which the core tries every pair of values. A mode is its ZeRO
stage, offload and pipeline here, each paired by itself: combinations of the three with others are `long`, and
so are those of a disk, of second copies and of three and four ranks. test_kto.py and test_classify.py of
tests/integration have rows with labels at each ZeRO stage."""
SPLIT = (
    "zero0-2ranks-sgd-varying-split2-clipped",
    "zero2-2ranks-adamw-varying-split2-clipped-lora",
    "zero3-2ranks-adamw-four-split2-clipped-bf16-fault",
    "zero3-2ranks-adamw-varying-split2-packed-clipped-llama_6heads",
    "zero3-2ranks-adamw-varying-split2-short-clipped-checkpointing-gemma2_tied",
    "zero2-2ranks-adamw-four-split2-clipped-dpo_live",
    "zero2-2ranks-adamw-varying-split2-packed-dpo_given-shared-qwen3_moe-global_batch",
    "zero3-2ranks-adamw-varying-split2-packed-checkpointing-deepseek_v3-sequence",
    "zero1-4ranks-adamw-four-split2-packed-clipped-checkpointing",
    "zero2-4ranks-adamw-varying-split4-short-packed-clipped-llama_4heads",
    "pipeline_zero1-4ranks-adamw-varying-split2-packed-clipped-lora-dpo_adapter",
)
"""Of the cases whose rows are split, those that run always."""


def all_cases() -> list[Case]:
    return [case for ranks in (1, 2, 3, 4) for case in cases(ranks)]


def covered(case: Case, paired: Sequence[tuple[str, str]] = PAIRED) -> set[object]:
    """Return what a case tries: each pair of values of the fields `paired`, and the value of every field."""
    pairs = {((one, getattr(case, one)), (other, getattr(case, other))) for one, other in paired}
    return pairs | set(dataclasses.asdict(case).items())


def core(of: Sequence[Case], paired: Sequence[tuple[str, str]] = PAIRED) -> list[Case]:
    """Return few cases that together try all that `of` do, by greedy choice: next is one that adds most for
    its cost. What few cases try counts most."""
    tried = {case: covered(case, paired) for case in of}
    cost = {case: cost_of(case) for case in of}
    times = Counter(value for values in tried.values() for value in values)
    left, chosen = set(times), list[Case]()
    while left:
        chosen.append(max(of, key=lambda case: fsum(1 / times[v] for v in tried[case] & left) / cost[case]))
        left -= tried[chosen[-1]]
    for case in sorted(chosen, key=cost.__getitem__, reverse=True):  # what those after it try too
        if tried[case] <= set().union(*(tried[other] for other in chosen if other != case)):
            chosen.remove(case)
    return chosen


def cost_of(case: Case) -> float:
    """Return what a case takes beside others, as measured: each rank's engine and micro-batches. ZeRO 3
    gathers and releases each module's parameters; a stage of a pipeline has a part of the layers; answers are
    longer rows."""
    own = 6 + sum(ACCUMULATION[case.micro_batches])
    own *= 2.0 if case.zero_stage == 3 else 0.75 if case.is_pipeline else 1.0
    return case.ranks * own * (1.3 if case.checkpointing else 1.0) * (1.2 if case.of_answers else 1.0)


def cases(ranks: int) -> list[Case]:
    return list(_cases(ranks))


def _cases(ranks: int) -> Iterator[Case]:
    modes = [(mode, 1) for mode in MODES]
    if ranks == 2:
        modes += [(mode, 1) for mode in OFFLOADS] + [("pipeline_zero1_offload", 2)]
    if ranks % 2 == 0:
        modes += [(mode, 2) for mode in PIPELINES]
    for mode, stages in modes:
        yield Case(mode, ranks, "sgd", "varying", max_norm=0.1, stages=stages)
        yield Case(mode, ranks, "adamw", "one", checkpointing=True, stages=stages)
        if ranks == 2 or mode in ("zero2", "zero3", "pipeline_zero1"):
            yield Case(mode, ranks, "adamw", "varying", 0.1, checkpointing=True, stages=stages, packed=True)
        if ranks <= 2:
            yield Case(mode, ranks, "adamw", "four", max_norm=0.1, stages=stages)
            yield Case(mode, ranks, "adamw_default_eps", "varying", stages=stages)
            yield Case(mode, ranks, "adamw", "varying", max_norm=0.1, fault=True, stages=stages)
            yield Case(mode, ranks, "adamw", "four", 0.1, precision="bf16", fault=True, stages=stages)
    yield from _of_few_ranks(ranks)
    if ranks > 2:
        yield Case("pipeline_zero1", ranks, "adamw", "varying", 0.1, checkpointing=True, stages=ranks)
    if ranks == 2:
        yield from _with_torch_adam(ranks)
        yield from _released_faults(ranks)
        yield from _in_8_bits(ranks)
        yield from _muon(ranks)
    yield from _partly_trained(ranks)
    yield from _of_pairs(ranks)
    yield from _rewards(ranks)
    yield from _distilled(ranks)
    if ranks == 2:
        yield from _labeled()
        yield from _chunked(ranks)
        yield from _mlp_chunks(ranks)
        yield from _offloaded(ranks)
        yield from _recurrent(ranks)
        yield from _partly_recomputed(ranks)
    yield from _pipelines(ranks)
    yield from _mixtures(ranks)
    yield from _balanced(ranks)
    if ranks < 4:
        yield from _on_disk(ranks)
    if ranks == 4:
        yield from _copied(ranks)
    yield from _split(ranks)
    yield from _split_pairs(ranks)
    yield from _split_mixtures(ranks)


def _of_few_ranks(ranks: int) -> Iterator[Case]:
    if ranks == 2:
        yield Case("zero2", ranks, "adamw", "four", 0.1, precision="bf16", packed=True)
        yield Case("zero1", ranks, "sgd", "varying", 0.1, packed=True)
    if ranks <= 2:
        for mode in ("zero1", "zero2", "zero3"):
            yield Case(mode, ranks, "adamw", "four", 0.1, precision="fp16", fault=True)


def _split(ranks: int) -> Iterator[Case]:
    """Rows whose tokens are split: on two ranks over both, on three over all with heads that are shared
    evenly, on four in two groups of two, over all four, and in a pipeline of two stages."""
    case = functools.partial(Case, ranks=ranks, max_norm=0.1, sequence_parallel=ranks)
    adamw = functools.partial(case, optimizer="adamw", micro_batches="varying")
    if ranks == 2:
        yield from _split_in_two(case)
    if ranks == 3:
        for mode, packed in itertools.product(("zero1", "zero3"), (False, True)):
            yield adamw(mode, shape="llama_6heads", packed=packed, short=packed)
    if ranks == 4:
        for parts, shape in ((2, "llama"), (4, "llama_4heads")):
            yield from _split_by_mode(functools.partial(case, sequence_parallel=parts, shape=shape))
            for tied in ("llama_4heads_tied", "gemma2_4heads_tied"):
                yield adamw("zero2", shape=tied, sequence_parallel=parts)
                yield adamw("zero3", shape=tied, sequence_parallel=parts, packed=True, checkpointing=True)
        yield adamw("zero3", trains="lora", shape="llama_4heads", packed=True)
        yield adamw("zero3", trains="lora", sequence_parallel=2)
        yield from _split_in_pipelines(functools.partial(case, stages=2, sequence_parallel=2))


def _split_by_mode(case: functools.partial[Case]) -> Iterator[Case]:
    """Every mode padded and packed, and micro-batches of fewer tokens than parts."""
    for mode in MODES:
        yield case(mode, optimizer="sgd", micro_batches="varying")
        yield case(mode, optimizer="adamw", micro_batches="four", packed=True, checkpointing=True)
        yield case(mode, optimizer="adamw", micro_batches="varying", short=True, packed=mode > "zero1")


def _split_in_two(case: functools.partial[Case]) -> Iterator[Case]:
    """On two ranks."""
    yield from _split_by_mode(case)
    varying = functools.partial(case, optimizer="adamw", micro_batches="varying")
    for mode in (*OFFLOADS, "zero3_parameters", "zero3_both"):
        yield varying(mode, packed=mode in ("zero2_offload", "zero3_parameters"))
    for mode in MODES:
        yield varying(mode, fault=True, packed=mode in ("zero1", "zero3"))
        yield case(mode, optimizer="adamw", micro_batches="four", precision="bf16", fault=True)
        yield varying(mode, trains="lora", packed=mode in ("zero0", "zero3"), checkpointing=mode == "zero3")
    shapes = ("llama_tied", "llama_6heads", "qwen2_tied", "qwen3", "gemma2_tied", "gemma3_tied")
    for shape, packed in itertools.product(shapes, (False, True)):
        yield varying("zero3" if packed else "zero2", shape=shape, packed=packed)
    yield varying("zero3", shape="gemma2_tied", checkpointing=True, short=True)
    yield varying("zero2", trains="dora", packed=True)
    yield varying("zero3", trains="trainable")
    yield varying("zero1", trains="groups", packed=True)
    for mode in ("zero2", "zero3"):
        yield case(mode, optimizer="sgd", micro_batches="varying", chunked=True, packed=mode == "zero2")
    yield case("zero2", optimizer="sgd", micro_batches="varying", label_smoothing=0.1)
    yield case("zero2", optimizer="adamw_default_eps", micro_batches="varying", max_norm=0.0)
    yield case("zero2", optimizer="adamw", micro_batches="four", precision="fp16", fault=True)


def _split_in_pipelines(case: functools.partial[Case]) -> Iterator[Case]:
    """On four ranks, two stages of one group."""
    for mode in PIPELINES:
        yield case(mode, optimizer="sgd", micro_batches="varying")
        yield case(mode, optimizer="adamw", micro_batches="four", packed=True, checkpointing=True)
        yield case(mode, optimizer="adamw", micro_batches="varying", short=True, packed=mode == "zero1")
        yield case(mode, optimizer="adamw", micro_batches="varying", shape="llama_tied", packed=True)
        yield case(mode, optimizer="adamw", micro_batches="varying", trains="lora")
        yield case(mode, optimizer="adamw", micro_batches="varying", fault=True)
    yield case("pipeline_zero1", optimizer="adamw", micro_batches="varying", shape="gemma2_tied", packed=True)
    yield case("pipeline_zero0", optimizer="sgd", micro_batches="varying", shape="gemma3_tied")
    yield case("pipeline_zero1", optimizer="sgd", micro_batches="varying", chunked=True)
    yield case("pipeline_zero1", optimizer="adamw", micro_batches="four", precision="bf16", fault=True)


def _split_pairs(ranks: int) -> Iterator[Case]:
    """Preference pairs whose rows are split: in every mode padded, with shared prompts and with each
    reference."""
    case = functools.partial(Case, ranks=ranks, max_norm=0.1, sequence_parallel=2)
    if ranks == 2:
        yield from _split_references(case)
        pair = functools.partial(case, "zero2", optimizer="adamw", micro_batches="varying", reference="given")
        yield pair(packed=True, loss_type="ipo")
        yield pair(packed=True, chunked=True, sft_weight=0.5)
        yield pair(loss_type="orpo", checkpointing=True)
        yield pair(packed=True, shared=True, precision="bf16")
    if ranks == 4:
        yield from _split_references(case)
        yield from _split_references(functools.partial(case, sequence_parallel=4, shape="llama_4heads"))
        for mode in PIPELINES:
            pair = functools.partial(case, mode, stages=2, micro_batches="varying")
            yield pair(optimizer="sgd", reference="given")
            yield pair(optimizer="adamw", reference="given", packed=True, shared=True)
            yield pair(optimizer="adamw", reference="adapter", trains="lora", packed=True)


def _split_references(case: functools.partial[Case]) -> Iterator[Case]:
    for mode in ("zero0", "zero1", "zero2", "zero3", "zero3_both"):
        pair = functools.partial(case, mode, micro_batches="four")
        yield pair(optimizer="sgd", reference="given")
        yield pair(optimizer="adamw", reference="given", packed=True, shared=True)
        yield pair(optimizer="adamw", reference="live", packed=mode != "zero2")
        yield pair(optimizer="adamw", reference="adapter", trains="lora", packed=True, shared=True)
        if mode in ("zero2", "zero3"):
            yield pair(optimizer="adamw", reference="adapter", trains="lora_fresh")


def _split_mixtures(ranks: int) -> Iterator[Case]:
    """Mixtures of experts and their balance losses over rows that are split."""
    case = functools.partial(
        Case, ranks=ranks, optimizer="adamw", micro_batches="varying", sequence_parallel=2
    )
    softmax, sigmoid = (functools.partial(case, shape=shape) for shape in ("qwen3_moe", "deepseek_v3"))
    if ranks == 2:
        for mode, shape in itertools.product(("zero2", "zero3"), MIXTURES):
            yield case(mode, shape=shape, max_norm=0.1, packed=mode == "zero2")
        for one, balance in itertools.product((softmax, sigmoid), ("sequence", "global_batch")):
            yield one("zero0", balance=balance, short=True)
            yield one("zero1", balance=balance, packed=True)
            yield one("zero3", balance=balance, packed=True, checkpointing=True)
            yield one("zero2", balance=balance, packed=True, shared=True, reference="given")
    if ranks == 4:
        for one, balance in itertools.product((softmax, sigmoid), ("sequence", "global_batch")):
            yield one("zero2", balance=balance)
            yield one("pipeline_zero1", balance=balance, stages=2, packed=True, checkpointing=True)


def _balanced(ranks: int) -> Iterator[Case]:
    """Balance losses of mixtures of experts: the same rows on one, two and three ranks and in stages."""
    softmax = functools.partial(Case, ranks=ranks, shape="qwen3_moe")
    sigmoid = functools.partial(Case, ranks=ranks, shape="deepseek_v3")
    if ranks == 4:
        yield sigmoid(
            "pipeline_zero1", optimizer="adamw", micro_batches="varying", stages=2, packed=True,
            checkpointing=True, balance="sequence",
        )  # fmt: skip
        return
    yield softmax("zero2", optimizer="sgd", micro_batches="varying", balance="global_batch")
    if ranks == 3:
        pipe = functools.partial(sigmoid, "pipeline_zero1", stages=3, packed=True)
        yield pipe(optimizer="adamw", micro_batches="varying", balance="sequence")
    if ranks != 2:
        return
    yield sigmoid("zero3", optimizer="adamw", micro_batches="varying", balance="sequence")
    yield softmax("zero0", optimizer="adamw", micro_batches="four", balance="sequence")
    yield softmax("zero1", optimizer="sgd", micro_batches="one", balance="global_batch", checkpointing=True)
    yield sigmoid("zero3", optimizer="sgd", micro_batches="four", balance="global_batch", packed=True)
    for case in (softmax, sigmoid):
        pipe = functools.partial(case, "pipeline_zero1", micro_batches="varying", stages=2)
        yield pipe(optimizer="adamw", balance="global_batch", packed=True)
        yield pipe(optimizer="sgd", balance="sequence", checkpointing=True)
    pairs = functools.partial(softmax, optimizer="adamw", micro_batches="four", reference="given")
    yield pairs("zero2", balance="global_batch", packed=True, shared=True)
    yield pairs("pipeline_zero1", balance="sequence", stages=2)


def _copied(ranks: int) -> Iterator[Case]:
    """Second copies of the parameters (hpZ) in two groups of two ranks."""
    case = functools.partial(Case, mode="zero3_hpz", ranks=ranks, optimizer="adamw", max_norm=0.1)
    yield case(micro_batches="varying", reference="live", packed=True)
    yield case(micro_batches="four", trains="trainable", precision="bf16", checkpointing=True)
    yield case(micro_batches="varying", trains="lora", reference="adapter")
    yield case(micro_batches="four", precision="fp16", fault=True)
    yield case(micro_batches="varying", fault=True, packed=True, sequence_parallel=2)
    yield case(micro_batches="varying", shape="qwen3_moe", balance="global_batch")
    yield case(micro_batches="varying", mode="zero3_hpz_offload")


def _in_8_bits(ranks: int) -> Iterator[Case]:
    """AdamW's moments in 8 bits, against bitsandbytes' own optimizer."""
    case = functools.partial(
        Case, ranks=ranks, optimizer="adamw_8bit", micro_batches="varying", shape="llama_wide"
    )
    for mode in ("zero0", "zero1", "zero2", "zero3"):
        yield case(mode, max_norm=0.1, packed=mode > "zero1")
        yield case(mode, trains="lora")
    yield case("zero1", precision="bf16")
    yield case("pipeline_zero1", stages=2, max_norm=0.1)


def _muon(ranks: int) -> Iterator[Case]:
    """Muon, whose matrices lie on one rank or on several, against one of three lines."""
    case = functools.partial(Case, ranks=ranks, optimizer="muon", micro_batches="varying", max_norm=0.1)
    for mode in ("zero0", "zero1", "zero2", "zero3"):
        yield case(mode, packed=mode > "zero1")
    yield case("zero2", shape="qwen3_moe")
    yield case("zero3", shape="qwen3_moe")
    yield case("zero2", precision="bf16")
    yield case("pipeline_zero1", stages=2)


def _released_faults(ranks: int) -> Iterator[Case]:
    """What releases of DeepSpeed got wrong without an error: the gradient of a module used twice (ZeRO
    2 in bf16, issue 8224), and of all micro-batches but the last where the JSON says that there is one, with
    CPU offload (ZeRO 1 and 2, pull request 7981)."""
    for mode in ("zero1", "zero2", "zero3"):
        yield Case(mode, ranks, "adamw", "four", 0.1, precision="bf16", twice=True)
    yield Case("zero2", ranks, "adamw", "four", 0.1, checkpointing=True, precision="bf16", twice=True)
    for mode in OFFLOADS:
        yield Case(mode, ranks, "adamw", "varying", 0.1, unplanned=True)
        yield Case(mode, ranks, "adamw", "four", 0.1, precision="bf16", unplanned=True)


def _offloaded(ranks: int) -> Iterator[Case]:
    """Parameters in host memory, alone and with the optimizer; fp16 with each kind of offload."""
    yield Case("zero3_parameters", ranks, "adamw", "four", 0.1, precision="bf16", fault=True)
    yield Case("zero3_parameters", ranks, "adamw", "varying", 0.1, packed=True, trains="lora")
    yield Case("zero3_both", ranks, "sgd", "varying", 0.1, chunked=True, packed=True)
    yield Case("zero3_both", ranks, "adamw_default_eps", "varying", checkpointing=True)
    yield Case("zero3_both", ranks, "adamw", "four", 0.1, precision="bf16", fault=True)
    yield Case("zero3_both", ranks, "adamw", "one", 0.1, precision="bf16", trains="lora")
    for mode in (*OFFLOADS, "zero3_both"):
        yield Case(mode, ranks, "adamw", "four", 0.1, precision="fp16", fault=True)
    pipe = functools.partial(
        Case, optimizer="adamw", micro_batches="four", max_norm=0.1, stages=2, fault=True
    )
    yield pipe("pipeline_zero1", ranks, precision="fp16", shape="llama_tied")
    yield pipe("pipeline_zero1_offload", ranks, precision="fp16")


def _on_disk(ranks: int) -> Iterator[Case]:
    """Optimizer states and parameters on NVMe, through DeepSpeed's own library."""
    adamw = functools.partial(Case, ranks=ranks, optimizer="adamw", max_norm=0.1)
    yield adamw("zero3_nvme", micro_batches="varying", packed=True)
    yield adamw("zero3_nvme_both", micro_batches="one", precision="bf16")
    if ranks == 1:
        return
    yield Case("zero3_nvme", ranks, "sgd", "four", 0.1)
    yield adamw("zero3_nvme", micro_batches="four", fault=True)
    yield adamw("zero3_nvme_both", micro_batches="varying", checkpointing=True)
    yield adamw("zero3_nvme_parameters", micro_batches="varying", packed=True)
    yield adamw("zero3_nvme_both", micro_batches="one", trains="lora")
    yield adamw("zero3_nvme_both", micro_batches="varying", packed=True, shape="deepseek_v3_groups")
    yield adamw("zero3_nvme", micro_batches="varying", packed=True, shared=True, reference="live")
    if ranks == 2:
        yield adamw("zero3_nvme_both", micro_batches="varying", packed=True, sequence_parallel=2)


def _chunked(ranks: int) -> Iterator[Case]:
    """The head's logits in chunks, which models as small as these do not need."""
    for mode, stages in (("zero0", 1), ("zero2", 1), ("zero3", 1), ("pipeline_zero1", 2)):
        yield Case(mode, ranks, "sgd", "varying", 0.1, stages=stages, chunked=True)
        yield Case(mode, ranks, "sgd", "varying", 0.1, stages=stages, chunked=True, packed=True)
    yield Case("zero3", ranks, "adamw", "varying", 0.1, trains="dora", chunked=True)  # its head is frozen
    yield Case("zero2", ranks, "adamw", "four", 0.1, precision="bf16", chunked=True)
    yield Case("zero2", ranks, "adamw", "four", 0.1, precision="fp16", chunked=True)
    yield Case("zero2", ranks, "sgd", "varying", 0.1, label_smoothing=0.1)
    yield Case("zero3", ranks, "sgd", "varying", 0.1, chunked=True, label_smoothing=0.1)
    yield Case("pipeline_zero1", ranks, "sgd", "varying", 0.1, stages=2, chunked=True, label_smoothing=0.1)


def _mlp_chunks(ranks: int) -> Iterator[Case]:
    """MLPs in chunks of tokens: on their own, with adapters in them, with frozen layers before them, with
    norms after them (Gemma 2), beside experts, of split rows."""
    case = functools.partial(
        Case, ranks=ranks, max_norm=0.1, checkpointing=True, micro_batches="varying", mlp_chunks=3
    )
    for mode in ("zero0", "zero1", "zero2_offload", "zero3"):
        yield case(mode, optimizer="sgd")
    yield case("zero2", optimizer="adamw", precision="bf16", packed=True)
    yield case("zero3_both", optimizer="adamw", trains="lora")
    yield case("zero3", optimizer="adamw", trains="trainable")
    yield case("zero3", optimizer="adamw", packed=True, shape="gemma2_tied", reference="live")
    yield case("zero3", optimizer="adamw", shape="glm4_moe", trains="lora", reference="adapter")
    yield case("zero3", optimizer="adamw", trains="dora", packed=True, sequence_parallel=2)
    yield case("pipeline_zero1", optimizer="adamw", stages=2, packed=True)
    yield case("pipeline_zero0", optimizer="sgd", stages=2, shape="deepseek_v3_groups")


def _mixtures(ranks: int) -> Iterator[Case]:
    """Mixtures of experts; in fp32, where rounding decides for no other expert than the plain loop's. On two
    ranks every mode, on others some."""
    adamw = functools.partial(Case, ranks=ranks, optimizer="adamw", micro_batches="varying", max_norm=0.1)
    modes = {1: ("zero1", "zero3"), 2: ("zero0", "zero1", "zero2", "zero3"), 3: ("zero3",)}.get(ranks, ())
    for mode, shape in itertools.product(modes, MIXTURES):
        yield adamw(mode, shape=shape, packed=True)
        if ranks < 3:
            yield adamw(mode, shape=shape, checkpointing=mode == "zero3")
        if ranks == 2 and mode in ("zero2", "zero3"):
            yield adamw(mode, shape=shape, reference="given", packed=mode == "zero3", shared=mode == "zero3")
    if ranks == 3:
        yield adamw("pipeline_zero1", stages=3, packed=True, shape="qwen3_moe_idle")
    if ranks != 2:
        return
    for shape in MIXTURES:
        yield adamw("pipeline_zero0", stages=2, shape=shape)
        yield adamw("pipeline_zero1", stages=2, shape=shape, packed=True)
    for shape in ("qwen3_moe_idle", "deepseek_v3_groups"):
        yield adamw("pipeline_zero1", stages=2, shape=shape, reference="given")
        for mode in (*OFFLOADS, "zero3_offload", "zero3_both"):
            yield adamw(mode, shape=shape, packed=True)
    yield Case("zero3", ranks, "adamw", "one", 0.1, shape="deepseek_v3_groups", reference="live")


def _with_torch_adam(ranks: int) -> Iterator[Case]:
    """Offloaded, stepped as where DeepSpeed's CPU Adam cannot be compiled."""
    for mode, stages in (
        *((mode, 1) for mode in (*OFFLOADS, "zero3_offload")),
        ("pipeline_zero1_offload", 2),
    ):
        case = functools.partial(Case, mode, ranks, max_norm=0.1, stages=stages, torch_adam=True)
        yield case("adamw", "varying", fault=True)
        if stages == 1:
            yield case("adamw", "four", precision="bf16")


def _pipelines(ranks: int) -> Iterator[Case]:
    """Of other shapes, and with an embedding that the first stage and the last one share."""
    if ranks == 1:
        return
    zero0 = functools.partial(Case, "pipeline_zero0", ranks, max_norm=0.1, stages=2)
    zero1 = functools.partial(Case, "pipeline_zero1", ranks, max_norm=0.1, stages=2)
    offload = functools.partial(Case, "pipeline_zero1_offload", ranks, max_norm=0.1, stages=2)
    if ranks == 3:
        yield zero0("adamw", "varying", stages=3, packed=True, shape="gemma3_tied")
        yield zero1("adamw", "four", stages=3, checkpointing=True, shape="llama_tied")
        yield zero1("sgd", "varying", stages=3, reference="given", packed=True, shape="qwen2_tied")
        return
    yield zero0("sgd", "varying", shape="llama_tied")
    yield zero1("adamw", "varying", shape="llama_tied", checkpointing=True, packed=True)
    if ranks == 4:
        yield zero1("adamw", "four", shape="llama_tied", precision="bf16", fault=True)
        return
    yield zero0("adamw", "four", shape="llama_tied", precision="bf16", fault=True)
    yield zero1("adamw", "four", shape="llama_tied", precision="bf16", fault=True)
    yield zero1("adamw", "varying", shape="llama_tied", fault=True)
    yield offload("adamw", "varying", shape="llama_tied")
    yield offload("adamw", "four", shape="llama_tied", precision="bf16", fault=True)
    yield zero1("sgd", "varying", shape="llama_tied", chunked=True)
    yield zero1("adamw", "varying", shape="llama_tied", trains="lora_tied")
    yield zero1("adamw", "one", shape="llama_tied", trains="dora")
    yield zero1("adamw", "varying", shape="llama_tied", packed=True, reference="live")
    yield zero1("adamw", "four", shape="llama_tied", reference="given", packed=True, shared=True)
    yield zero0("adamw", "varying", shape="qwen3", packed=True)
    yield zero1("sgd", "varying", shape="qwen2_tied")
    yield zero1("adamw", "varying", shape="gemma2_tied", packed=True)
    yield zero0("sgd", "varying", shape="gemma3_tied", packed=True, checkpointing=True)


def _partly_recomputed(ranks: int) -> Iterator[Case]:
    """Some layers checkpointed: the first, the third and the fourth; every other one, with MLPs in chunks."""
    yield Case("zero3", ranks, "adamw", "varying", 0.1, checkpointing=0.75, packed=True)
    yield Case("pipeline_zero1", ranks, "adamw", "varying", 0.1, checkpointing=2, stages=2, mlp_chunks=3)


def _recurrent(ranks: int) -> Iterator[Case]:
    """Layers with a convolution and a recurrence, packed per segment."""
    case = functools.partial(Case, ranks=ranks, micro_batches="varying", max_norm=0.1, shape="qwen3_5")
    yield case("zero2", optimizer="adamw", packed=True, shared=True, reference="given")
    yield case("zero3", optimizer="adamw", packed=True, checkpointing=True)
    yield case("zero3_both", optimizer="adamw", packed=True, trains="lora")
    yield case("pipeline_zero1", optimizer="adamw", packed=True, checkpointing=True, stages=2)


def _partly_trained(ranks: int) -> Iterator[Case]:
    """Adapters, frozen parameters, and groups with settings of their own."""
    if ranks != 2:
        for mode in ("zero2", "zero3") if ranks < 4 else ():
            yield Case(mode, ranks, "adamw", "varying", 0.1, trains="lora")
        return
    modes = [(mode, 1) for mode in (*MODES, *OFFLOADS)] + [(mode, 2) for mode in PIPELINES]
    for mode, stages in modes:
        yield Case(mode, ranks, "adamw", "varying", 0.1, checkpointing=True, stages=stages, trains="lora")
        if mode != "pipeline_zero1":  # which refuses stages with other numbers of groups
            yield Case(mode, ranks, "adamw", "varying", stages=stages, trains="groups")
        yield Case(mode, ranks, "adamw", "one", 0.1, precision="bf16", stages=stages, trains="lora")
        if not mode.endswith("offload"):
            yield Case(mode, ranks, "adamw", "one", checkpointing=stages > 1, stages=stages, trains="dora")
            yield Case(mode, ranks, "sgd", "varying", 0.1, stages=stages, trains="trainable")
    for mode in ("zero2", "zero3"):
        yield Case(mode, ranks, "adamw", "varying", 0.1, mode == "zero3", packed=True, trains="lora")
    yield from _adapted_mixtures(ranks)


def _adapted_mixtures(ranks: int) -> Iterator[Case]:
    """Adapters on attention, a dense layer and shared experts of a mixture, whose routed experts and routers
    are frozen."""
    lora = functools.partial(
        Case, ranks=ranks, optimizer="adamw", max_norm=0.1, trains="lora", shape="glm4_moe"
    )
    for mode in ("zero0", "zero1", "zero2", "zero3", "zero3_offload"):
        yield lora(mode, micro_batches="varying", packed=mode in ("zero2", "zero3"))
    for mode in PIPELINES:
        yield lora(mode, micro_batches="varying", stages=2)
    yield lora("zero3", micro_batches="one", checkpointing=True, trains="dora")
    for mode in ("zero2", "zero3"):
        yield lora(mode, micro_batches="one", reference="adapter", packed=True, shared=True)


def _of_pairs(ranks: int) -> Iterator[Case]:
    """Preference pairs. On two ranks every mode padded and with shared prompts, on other numbers of ranks one
    mode so and the next so."""
    modes = [(mode, 1) for mode in ("zero0", "zero1", "zero2", "zero3")]
    modes += [(mode, 2) for mode in PIPELINES if ranks % 2 == 0]
    for number, (mode, stages) in enumerate(modes):
        pair = functools.partial(Case, mode, ranks, max_norm=0.1, stages=stages, reference="given")
        if ranks == 2 or (number + ranks) % 2:
            yield pair("sgd", "varying")
        if ranks == 2 or (number + ranks) % 2 == 0:
            yield pair("adamw", "four", packed=True, shared=True)
    if ranks == 2:
        yield from _references([*modes, ("zero3_offload", 1), ("zero3_both", 1)])
        pair = functools.partial(Case, "zero2", ranks, "adamw", "varying", 0.1, reference="given")
        yield pair(packed=True, loss_type="ipo")
        yield pair(packed=True, chunked=True, sft_weight=0.5)
        yield pair(loss_type="orpo", checkpointing=True)
        yield pair(packed=True, shared=True, precision="bf16")


def _rewards(ranks: int) -> Iterator[Case]:
    """Reward models, whose last layer is one score. On two ranks every mode, padded, with shared prompts and
    with adapters; a pipeline of a model whose embedding would be tied to a head over the vocabulary."""
    reward = functools.partial(Case, ranks=ranks, max_norm=0.1, reward=True)
    if ranks != 2:
        yield reward("zero3", optimizer="adamw", micro_batches="varying", packed=True, shared=ranks == 3)
        if ranks == 4:
            pipe = functools.partial(reward, "pipeline_zero1", optimizer="sgd", stages=2)
            yield pipe(micro_batches="four", checkpointing=True)
            yield pipe(micro_batches="varying", packed=True, sequence_parallel=2)
        return
    modes = [(mode, 1) for mode in (*MODES, "zero3_both")] + [(mode, 2) for mode in PIPELINES]
    for mode, stages in modes:
        yield reward(mode, optimizer="sgd", micro_batches="varying", stages=stages)
        yield reward(mode, optimizer="adamw", micro_batches="four", stages=stages, packed=True, shared=True)
        lora = functools.partial(reward, mode, optimizer="adamw", stages=stages, trains="lora")
        yield lora(micro_batches="varying", packed=mode in ("zero0", "zero3"), checkpointing=mode == "zero2")
    yield reward("zero2", optimizer="adamw", micro_batches="varying", trains="lora_fresh")
    yield reward("zero2", optimizer="adamw", micro_batches="four", precision="bf16", fault=True, packed=True)
    yield reward("zero3", optimizer="adamw", micro_batches="one", precision="bf16", trains="lora")
    yield reward("zero3", optimizer="adamw", micro_batches="varying", trains="dora", checkpointing=True)
    for trains in ("all", "lora"):
        split = functools.partial(reward, "zero3", optimizer="adamw", sequence_parallel=2, trains=trains)
        yield split(micro_batches="varying", packed=True)
    yield reward("zero2", optimizer="adamw", micro_batches="varying", packed=True, shape="qwen3_moe")
    yield reward("pipeline_zero1", optimizer="adamw", micro_batches="one", stages=2, shape="llama_tied")


def _labeled() -> Iterator[Case]:
    """On two ranks: classifiers and KTO in every mode, padded, packed, with adapters, in bf16 and split."""
    modes = [*((mode, 1) for mode in (*MODES, "zero3_both")), *((mode, 2) for mode in PIPELINES)]
    of = functools.partial(Case, ranks=2, optimizer="adamw", micro_batches="varying", max_norm=0.1)
    for case in (
        functools.partial(of, labels="classify"),
        functools.partial(of, labels="kto", reference="given"),
    ):
        for mode, stages in modes:
            yield case(mode, stages=stages)
            yield case(mode, stages=stages, packed=True, checkpointing=mode == "zero2")
            yield case(mode, stages=stages, trains="lora", packed=mode in ("zero0", "zero3"))
        yield case("zero2", precision="bf16", packed=True)
        yield case("zero2", shape="qwen3_moe", packed=True)
        yield case("zero3", packed=True, sequence_parallel=2)
    for mode, stages in (("zero2", 1), ("zero3", 1), ("pipeline_zero1", 2)):
        own = functools.partial(Case, mode, 2, "adamw", "varying", 0.1, stages=stages, labels="kto")
        yield own(reference="adapter", trains="lora", packed=True)
        yield own(reference="live")


def _distilled(ranks: int) -> Iterator[Case]:
    """With a teacher whose k most probable tokens are the whole vocabulary: on two ranks every mode."""
    case = functools.partial(Case, ranks=ranks, optimizer="sgd", micro_batches="varying", max_norm=0.1)
    if ranks != 2:
        yield case("zero3", teacher="given", packed=ranks == 3)
        return
    for mode, stages in [*((mode, 1) for mode in MODES), *((mode, 2) for mode in PIPELINES)]:
        yield case(mode, stages=stages, teacher="given", packed=mode in ("zero1", "zero3"))
        yield case(mode, stages=stages, teacher="live", packed=mode not in ("zero1", "zero3"))
    adamw = functools.partial(Case, ranks=ranks, optimizer="adamw", micro_batches="varying", max_norm=0.1)
    for mode, stages in (("zero2", 1), ("zero3", 1), ("pipeline_zero1", 2)):
        yield adamw(mode, stages=stages, teacher="given", trains="lora", checkpointing=True)
        yield adamw(mode, stages=stages, teacher="given", divergence="reverse_kl", packed=True)
        yield adamw(mode, stages=stages, teacher="live", divergence="jsd", chunked=True)
    yield adamw("zero2", teacher="given", precision="bf16", packed=True)
    yield adamw("zero2", teacher="given", precision="fp16", chunked=True)
    yield adamw("zero3", teacher="given", label_smoothing=0.1, packed=True)
    yield adamw("pipeline_zero1", teacher="given", shape="llama_tied", stages=2)
    yield adamw("zero3", teacher="live", packed=True, sequence_parallel=2)
    yield adamw("zero2", teacher="given", sequence_parallel=2)


def _references(modes: list[tuple[str, int]]) -> Iterator[Case]:
    """On two ranks: from a second engine, and from the policy's own with its adapter off or as it was."""
    for mode, stages in modes:
        lora = functools.partial(Case, mode, 2, "adamw", "one", 0.1, stages=stages, reference="adapter")
        yield lora(trains="lora", packed=True, shared=True)  # continues an adapter
        if mode in ("zero2", "zero3", "pipeline_zero1"):
            yield lora(trains="lora_fresh")
        if stages == 1 and mode != "zero1":
            yield Case(mode, 2, "adamw", "one", 0.1, packed=mode != "zero2", reference="live")
    yield Case("zero3", 2, "adamw", "varying", 0.1, trains="lora", reference="live")


def probes() -> list[Case]:
    """On two ranks: every mode in both types, and SGD with momentum where it is not offloaded."""
    modes = [(mode, 1) for mode in (*MODES, *OFFLOADS)]
    modes += [(mode, 2) for mode in (*PIPELINES, "pipeline_zero1_offload")]
    return [Case("zero3_both", 2, "adamw", "varying", 0.1, precision="bf16")] + [
        case
        for mode, stages in modes
        for case in (
            Case(mode, 2, "adamw", "varying", 0.1, stages=stages),
            Case(mode, 2, "adamw", "varying", 0.1, precision="bf16", stages=stages),
            Case(mode, 2, "sgd", "varying", 0.1, stages=stages),
            Case(mode, 2, "adamw", "varying", 0.1, precision="bf16", stages=stages, shape="llama_tied"),
        )
        if not (case.optimizer == "sgd" and mode.endswith("offload"))
        and not (case.shape == "llama_tied" and stages == 1)
    ]
