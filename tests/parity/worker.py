"""Run on every rank of one launch: trains each case with the engine, then with the plain loop, and compares.

    python worker.py OUTPUT.json [NAME …]      the cases of these names; without one all

Rank 0 writes {case name: {figure: largest difference}} after each case; a rank that fails writes
OUTPUT.RANK.error.

fresh        |first weight − whole model's|, absolute: the same model in every layout
loss         |step's loss − plain|, absolute, over the steps
gradient     |gradient − plain| ÷ the tensor's largest |element|, over tensors and steps, before clipping, and
             both at the engine's weights of that step: `weights` shows the rounding of earlier steps
farther      where that is beyond the case's bound, in fp32: the same of the engine against the plain loop in
             float64 ÷ the same of the plain loop itself; 0 where it is within
norm         |gradient norm − plain| ÷ plain, over the steps
norm_exact   where that is beyond the case's bound, in fp32: the same against the plain loop in float64 at the
             engine's weights of that step; 0 where it is within
weights      |final weight − plain| ÷ the tensor's largest |element|, over tensors
change       ‖final weights − plain‖ ÷ ‖final weights − first weights‖
evaluation   |held-out loss after training − plain|, absolute
copies       of a tied parameter on two pipeline stages: |difference| ÷ the tensor's largest |element|
metrics      of pairs: |reported − plain| ÷ max(1, |plain|), at the engine's weights of that step
balance      |balance loss − plain| ÷ plain, over the steps
busy         whether every expert got a token in every step, of the shape that is made so that some do not
gathers      of the head's weight by ZeRO 3, the most in forward or backward, per micro-batch: |number − 1|
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_grad
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import Annotate, MicroBatch
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine import state
from dsft.engine.build import build_engine
from dsft.engine.frozen import FrozenEngine, build_frozen_engine
from dsft.engine.join import join
from dsft.engine.ops import prepare_ops
from dsft.engine.partition import sharding_for
from dsft.engine.self_check import check_packing, check_split
from dsft.model.attention import attend_per_segment
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.model.conversion import persistent_buffers
from dsft.model.head import Head, Top
from dsft.model.lora import PREFIX, WEIGHTS
from dsft.model.names import plain_name
from dsft.model.policy import Policy
from dsft.objective.api import Objective, means
from dsft.objective.classify import classification
from dsft.objective.distill import distillation
from dsft.objective.kto import kto
from dsft.objective.next_token import next_token
from dsft.objective.preference import preference
from dsft.objective.reward import reward
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import HostFacts
from dsft.plan.memory.sizes import BYTES_PER_LOGIT
from dsft.plan.reference import reference_config, reference_model
from dsft.rank.environment import detect
from dsft.reference.refer import look_up, refer_to_engine, refer_to_start
from dsft.reference.teacher import refer_to_teacher, with_teacher
from dsft.run.loop import Record
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Distill, Model, Spec
from tests.examples import dataset_of
from tests.make import packed as packed_micro_batch
from tests.make import padded as micro_batch
from tests.parity import pairs, plain
from tests.parity.cases import ACCUMULATION, BALANCE_WEIGHT, CHUNK_ROWS, FAULTY_STEP, SHAPES, Case, cases
from tests.process_groups import own_groups

VOCABULARY, SEED = 128, 11
FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = {"sgd": 0.1, "adamw": 3e-4, "adamw_default_eps": 1e-3, "adamw_8bit": 3e-4, "muon": 3e-4}
EPS = {"sgd": 1e-8, "adamw": 1e-4, "adamw_default_eps": 1e-8, "adamw_8bit": 1e-4, "muon": 1e-4}
DECAY = 0.1
SWAPPED = 1024
LABELS = ["one", "two", "three"]
DIVERGENCE = 0.3  # of KTO
BUCKETS = {"reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"}
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "groups": {},
    "trainable": {"trainable": ["model.layers.1.*", "model.layers.2.mlp.*", "*norm.weight"]},
    "lora": {
        "lora": {
            "rank": 3,
            "alpha": 5.0,
            "target_modules": ["q_proj", "v_proj", "down_proj"],
            "modules_to_save": ["lm_head"],
        }
    },
    "lora_tied": {"lora": {"rank": 3, "alpha": 5.0, "modules_to_save": ["embed_tokens", "lm_head"]}},
    "lora_fresh": {"lora": {"rank": 3, "alpha": 5.0, "target_modules": ["q_proj", "v_proj", "down_proj"]}},
    "dora": {
        "lora": {
            "rank": 2,
            "alpha": 3.0,
            "target_modules": ["k_proj", "up_proj"],
            "use_rslora": True,
            "use_dora": True,
        }
    },
}
LINEARS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
GROUPS = [
    {"parameters": "*.mlp.*", "learning_rate": 3.0, "weight_decay": 0.0},
    {"parameters": "*norm.weight", "weight_decay": 0.3},
    {"parameters": "lm_head.*", "learning_rate": 0.5},
]
"""Beside a learning rate of 1, so that they are multiples of each step's."""
LINEAR = nn.functional.linear
EXPECTED: dict[Case, tuple[plain.Outcome, float]] = {}
"""Of `expect`."""
WHOLE: dict[tuple[str, str], Policy] = {}
ADAPTERS: dict[str, str] = {}
"""Models as they start, and folders of adapters to start from, by the spec's `model`: each is made once."""


def main(output: Path, names: list[str]) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tempfile.tempdir = str(output.parent)  # which the test removes
    # DeepSpeed takes CPUs without fp16 instructions for unable; torch computes it there too, slowly.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    ranks = int(os.environ["WORLD_SIZE"])
    world = join(detect(os.environ), Layout(ranks, 1))
    for parts in {case.sequence_parallel for case in cases(ranks)}:  # groups that outlive the cases
        exchange_of(dataclasses.replace(world, layout=Layout(ranks, 1, parts)))
    results: dict[str, Any] = {}
    for case in cases(ranks):
        if case.name in names or not names:
            layout = Layout(ranks, case.stages, case.sequence_parallel)
            try:
                with own_groups():
                    results[case.name] = compare(case, dataclasses.replace(world, layout=layout))
            except Exception:  # a rank that fails leaves its peers in a collective, so the launch must end
                output.with_suffix(f".{world.rank}.error").write_text(
                    f"{case.name}\n{traceback.format_exc()}"
                )
                raise
            if world.rank == 0:
                print(case.name, results[case.name], flush=True)
                output.write_text(json.dumps(results, indent=1))
    world.close()


def parts(case: Case, spec: Spec, world: World) -> tuple[Policy, dict[str, Any]]:
    """This rank's part of the model, and the DeepSpeed configuration."""
    built = prepare_ops(spec, world, print)  # as a run does: compiled once for all tests, not by DeepSpeed
    facts = HostFacts(cpu_adam=False if case.torch_adam else built)
    config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel), facts)
    for key in BUCKETS & config["zero_optimization"].keys():  # several, and one tensor larger than any
        config["zero_optimization"][key] = 2_000
    if case.zero_stage == 3:  # else so small a model is kept whole on every rank, in one group
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 3_000}
    if case.on_disk:
        swap_small_tensors(config)
    mine = Part(world.stage, case.cut, sharding_for(config, world))
    policy = build_model(spec.model, FACTS, SEED, DTYPES[case.precision], mine)
    assert all(getattr(p, "ds_secondary_tensor", None) is None for p in policy.parameters())
    attend(policy, case, world)
    if case.chunked:
        cut_logits(policy)
    if case.twice:
        use_twice(policy.causal_lm)
    if case.fault:
        break_gradient(policy, world)
    return policy, config


def swap_small_tensors(config: dict[str, Any]) -> None:
    """Let DeepSpeed swap tensors from 1 KiB on, where it keeps those below 1 MiB in memory."""
    for module in (optimizer_utils, partitioned_param_swapper):
        module.MIN_AIO_BYTES = SWAPPED
    config["aio"]["block_size"] = SWAPPED
    section = config["zero_optimization"].get("offload_param")
    if section is not None:
        config["zero_optimization"]["stage3_prefetch_bucket_size"] = 0
        section["buffer_size"] = 10_000


def attend(policy: Policy, case: Case, world: World) -> None:
    if case.packed or case.sequence_parallel > 1:
        longest = SHAPES[case.shape]["max_position_embeddings"]
        attend_per_segment(policy.causal_lm, "auto", longest, exchange=exchange_of(world))


def compare(case: Case, world: World) -> dict[str, Any]:
    spec = with_adapter(case, make_spec(case), world)
    whole = whole_model(spec.model, case.precision)
    policy, config = parts(case, spec, world)
    model = plain_model(whole, case)
    task = task_of(case, spec, model, world)
    engine: Any = build_engine(policy, spec, config, world, task.objective)
    gradients = keep_gradients(engine)
    gathers = count_gathers(policy) if case.gathers_head else Counter()
    first = assemble(world, engine)

    steps = task.made(SEED, ACCUMULATION[case.micro_batches], world.layout.data_parallel, VOCABULARY)
    held_out = task.made(SEED + 1, (3,), world.layout.data_parallel, VOCABULARY)[0]
    *batches, held_out_batches = task.shares([*steps, held_out])
    refer = task.refer(policy, engine)
    before, sums, norms, balances = [], [], [], []
    check(case, engine, policy, steps, world)
    gathers.clear()
    for number, step in enumerate(steps):
        before.append(assemble(world, engine))
        BROKEN["now"] = case.fault and number == FAULTY_STEP
        result = (
            engine.step if step is steps[-1] else functools.partial(engine.first_step, applied_steps=number)
        )(refer(batches[number]), task.counts(step), RATES[case.optimizer])
        assert result.applied is not BROKEN["now"], f"rank {world.rank}, step {number}: {result.applied}"
        sums.append(world.sum(result.sums))
        norms.append(float(result.grad_norm))
        balances.append(float(world.sum(result.figures["experts"])[:, -1].sum()) if result.figures else 0.0)
    BROKEN["now"] = False
    most_gathers = max(gathers.values(), default=0) / sum(map(len, steps))
    evaluated = world.sum(engine.evaluate(refer(held_out_batches)))
    final = assemble(world, engine)
    changed = changed_while_frozen(world, engine, policy, whole)
    apart = copies_apart(case, world, engine)
    gathered = all_stages(world, gradients)
    engine._engine.destroy()
    nn.functional.linear = LINEAR  # ZeRO 3 leaves its own, which the plain loop must not use
    if world.rank:
        return {}

    start = {name: p.detach().float() for name, p in whole.named_trained().items()}
    skipped = (FAULTY_STEP,) if case.fault else ()
    applied = [i for i in range(len(steps)) if i not in skipped]
    records = [means(task.objective, s, task.counts(step), "") for s, step in zip(sums, steps, strict=True)]
    expected, expected_evaluation = expect(case, model, task, steps, held_out)
    evaluation = means(task.objective, evaluated, task.counts(held_out), "")["/loss"]
    gradient_apart, metrics_apart, balance_apart, exactly = [], [], [0.0], []
    norm_apart = {i: abs(norms[i] - expected.norms[i]) / expected.norms[i] for i in applied}
    for i in applied:
        gradient = known(i, task, expected) or plain.gradient(model, task.losses, before[i], steps[i])
        gradient_apart.append(relative(gathered[i], gradient))
        if isinstance(task.losses, plain.Balanced):
            balance_apart.append(abs(balances[i] - task.losses.found) / task.losses.found)
        metrics_apart.append(metrics_differ(records[i], task.losses))
        if case.precision == "fp32" and (
            gradient_apart[-1] > case.bounds()["gradient"] or norm_apart[i] > case.bounds()["norm"]
        ):
            exact = plain.gradient(copy.deepcopy(model).double(), task.losses, before[i], steps[i])
            exactly.append(from_exact(exact, gathered[i], gradient, norms[i]))
    farther, norm_exact = map(max, zip((0.0, 0.0), *exactly, strict=True))
    return {
        "fresh": max(float((first[n] - w).abs().max()) for n, w in start.items()),
        "loss": max(abs(a["/loss"] - b) for a, b in zip(records, expected.losses, strict=True)),
        "gradient": max(gradient_apart),
        "farther": farther,
        "norm": max(norm_apart.values()),
        "norm_exact": norm_exact,
        "weights": relative(final, expected.weights),
        "change": distance(final, expected.weights) / distance(expected.weights, start),
        "evaluation": abs(evaluation - expected_evaluation),
        "metrics": max(metrics_apart),
        "balance": max(balance_apart),
        "frozen": changed,
        "copies": apart,
        "gathers": abs(most_gathers - 1.0) if case.gathers_head else 0.0,
        "busy": float(case.shape == "qwen3_moe_idle" and not idle_experts(gathered)),
        "finite_when_skipped": any(torch.isfinite(torch.tensor(norms[i])) for i in skipped),
    }


def from_exact(
    exact: dict[str, Tensor], found: dict[str, Tensor], gradient: dict[str, Tensor], norm: float
) -> tuple[float, float]:
    """Return `farther` and `norm_exact` of a step. exact: the plain loop's gradient in float64; found, norm:
    the engine's; gradient: the plain loop's."""
    expected = float(torch.stack([part.norm() for part in exact.values()]).norm())
    return relative(found, exact) / relative(gradient, exact), abs(norm - expected) / expected


def known(step: int, task: Task, expected: plain.Outcome) -> dict[str, Tensor]:
    """Return the gradient of the first step, which `expect` has; {} for others, and for losses that keep
    something of their last step, with which the engine's metrics of that step are compared."""
    return expected.first if step == 0 and isinstance(task.losses, FunctionType) else {}


def whole_model(model: Model, precision: str) -> Policy:
    """Nobody changes it."""
    key = f"{model.head} {model.labels} {model.model_dump_json()}", precision
    if key not in WHOLE:
        WHOLE[key] = build_model(model, FACTS, SEED, DTYPES[precision])
    return WHOLE[key]


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned: rows, or pairs; `losses` is the plain loop's, `held_out` what it evaluates by, which
    knows no label smoothing."""

    objective: Objective
    losses: plain.Losses[Any]
    held_out: plain.Losses[Any]
    made: Callable[..., list[plain.Step[Any]]]
    counts: Callable[[plain.Step[Any]], dict[str, int]]
    shares: Callable[[list[plain.Step[Any]]], list[list[MicroBatch]]]
    refer: Callable[[Policy, Any], Annotate] = lambda policy, engine: lambda micro_batches: micro_batches


def expect(
    case: Case, model: nn.Module, task: Task, steps: list[Any], held_out: plain.Step[Any]
) -> tuple[plain.Outcome, float]:
    """Return the plain loop's training, and its held-out loss after it; made once for all cases that it
    knows as one."""
    key = dataclasses.replace(
        case, mode="plain", ranks=case.groups, stages=1, sequence_parallel=1, checkpointing=False,
        mlp_chunks=1, packed=False, chunked=False, shared=False, torch_adam=False, unplanned=False,
    )  # fmt: skip
    if key not in EXPECTED:
        skipped = (FAULTY_STEP,) if case.fault else ()
        optimizer = plain_optimizer(case, model)
        trained = plain.train(model, task.losses, steps, optimizer, case.max_norm, skipped)
        EXPECTED[key] = trained, plain.evaluate(model, task.held_out, held_out)
    return EXPECTED[key]


def metrics_differ(found: Record, losses: plain.Losses[Any]) -> float:
    """From those of the last step that `losses` was taken of. Which of two equal rewards is greater, rounding
    decides, so where a pair has no margin the accuracy is not compared."""
    if isinstance(losses, plain.Balanced):
        losses = losses.losses
    if not isinstance(
        losses, plain.Preference | plain.Reward | plain.Distillation | plain.Classes | plain.Kto
    ):
        return 0.0
    expected = {f"/{name}": value for name, value in losses.metrics().items()}
    assert found.keys() == {"/loss", *expected}, found.keys() ^ expected.keys()
    is_tie = isinstance(losses, plain.Preference | plain.Reward) and losses.least_margin() <= 1e-6
    names = [name for name in expected if "accuracies" not in name or not is_tie]
    return max(abs(found[name] - expected[name]) / max(1.0, abs(expected[name])) for name in names)


def task_of(case: Case, spec: Spec, model: nn.Module, world: World) -> Task:
    """`model`: the plain loop's, at the start."""
    if spec.reward is not None:
        rewards = plain.Reward(spec.reward.label_smoothing, spec.reward.center_rewards_coefficient)
        return Task(
            reward(spec.reward),
            balanced(case, rewards, 2),
            rewards,
            plain.make_pairs,
            pairs.counts,
            lambda steps: pairs.numbered(steps, world.data_rank, case.form, scored=True),
        )
    if spec.distill is not None:
        return distilled(case, spec.distill, world, *teacher_of(case, spec, world))
    if spec.classify is not None:
        classes = plain.Classes(len(LABELS))
        return Task(
            classification(),
            balanced(case, classes, 1),
            classes,
            plain.make_steps,
            pairs.of_labels,
            lambda steps: pairs.labeled(steps, world.data_rank, case.form, len(LABELS), None),
        )
    own = spec.dpo or spec.kto
    if own is None:
        return Task(
            next_token(case.label_smoothing),
            balanced(case, plain.next_token(case.label_smoothing), 1),
            plain.next_token(),
            functools.partial(plain.make_steps, short=case.short),
            lambda step: {"tokens": plain.count(plain.rows_of(step)), "sequences": len(plain.rows_of(step))},
            lambda steps: [share(step, world, case) for step in steps],
        )
    reference = copy.deepcopy(model).requires_grad_(False)
    if case.reference == "given":  # not the start, so that no reward is 0
        draw = torch.Generator().manual_seed(SEED)
        for parameter in reference.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    stored: list[Tensor] = []

    def shares(steps: list[plain.Step[Any]]) -> list[list[MicroBatch]]:
        is_given = case.reference == "given"
        stored.extend([pairs.referred(reference, steps, alone=spec.kto is not None)] if is_given else [])
        if spec.kto is not None:
            return pairs.labeled(steps, world.data_rank, case.form, 2, DIVERGENCE)
        return pairs.numbered(steps, world.data_rank, case.form)

    def refer(policy: Policy, engine: Any) -> Annotate:
        if case.reference == "adapter":
            return refer_to_start(policy, engine, spec)
        return look_up(stored[0].numpy()) if case.reference == "given" else live(case, spec, world)

    if spec.kto is not None:
        weights = spec.kto.undesirable_weight, spec.kto.desirable_weight
        labeled = plain.Kto(reference, spec.kto.beta, weights, DIVERGENCE)
        return Task(kto(spec.kto), labeled, labeled, plain.make_steps, pairs.of_labels, shares, refer)
    assert spec.dpo is not None
    sft_weight = 1.0 if case.loss_type == "orpo" else case.sft_weight
    losses = plain.Preference(reference, case.loss_type, spec.dpo.beta, sft_weight)
    training = balanced(case, losses, 2)
    return Task(preference(spec.dpo), training, losses, plain.make_pairs, pairs.counts, shares, refer)


def teacher_of(case: Case, spec: Spec, world: World) -> tuple[nn.Module, Callable[[], Any]]:
    """Return a teacher that is not the student, for the plain loop, and what opens it beside the student."""
    uneven = {**SHAPES[case.shape], "initializer_range": 0.3}
    model = reference_model(spec).model_copy(update={"from_config": uneven})
    teacher = build_model(model, FACTS, SEED, torch.float32).causal_lm
    return teacher, functools.partial(second_engine, case, spec, model, world)


def distilled(case: Case, own: Distill, world: World, teacher: nn.Module, opened: Callable[[], Any]) -> Task:
    """opened: returns the policy and the engine of a live teacher."""
    teacher.requires_grad_(False)
    losses, plainly = (
        plain.Distillation(teacher, own.loss_type, own.beta, own.temperature, own.weight, smoothing)
        for smoothing in (case.label_smoothing, 0.0)
    )

    def shares(steps: list[plain.Step[plain.Row]]) -> list[list[MicroBatch]]:
        batches = [share(step, world, case) for step in steps]
        if case.teacher == "live":
            return batches
        return [
            [
                with_teacher(batch, rows_of_teacher(losses, ranks[world.data_rank]))
                for batch, ranks in zip(mine, step, strict=True)
            ]
            for mine, step in zip(batches, steps, strict=True)
        ]

    def refer(policy: Policy, engine: Any) -> Annotate:
        if case.teacher == "given":
            return lambda micro_batches: micro_batches
        frozen, own_engine = opened()
        frozen.score_top(Top(own.top_k, own.top_k), own.temperature)
        return refer_to_teacher(own_engine)

    def counts(step: plain.Step[plain.Row]) -> dict[str, int]:
        return {"tokens": plain.count(plain.rows_of(step)), "sequences": len(plain.rows_of(step))}

    objective = distillation(own, case.label_smoothing)
    return Task(objective, losses, plainly, plain.make_steps, counts, shares, refer)


def rows_of_teacher(losses: plain.Distillation, rows: list[plain.Row]) -> Tensor:
    """What a store holds: of each target the tokens, their log-probabilities and that of no other token."""
    known = [losses.known(row) for row in rows] or [torch.zeros(0, VOCABULARY)]
    logps, tokens = torch.cat(known).sort(-1, descending=True)
    return torch.cat((tokens.float(), logps, torch.full((len(logps), 1), -torch.inf)), 1)


def balanced(case: Case, losses: plain.Losses[Any], sequences: int) -> plain.Losses[Any]:
    """`sequences`: of each row."""
    if case.balance == "none":
        return losses
    is_sigmoid, top_k = case.shape == "deepseek_v3", SHAPES[case.shape]["num_experts_per_tok"]
    return plain.Balanced(losses, case.balance, BALANCE_WEIGHT, top_k, is_sigmoid, sequences)


def live(case: Case, spec: Spec, world: World) -> Annotate:
    return refer_to_engine(second_engine(case, spec, reference_model(spec), world)[1])


def second_engine(case: Case, spec: Spec, model: Model, world: World) -> tuple[Policy, FrozenEngine]:
    """Return a second engine, which under ZeRO 3 keeps nothing whole either, and its policy."""
    config = reference_config(spec)
    if case.zero_stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    keep, dtype = sharding_for(config, world), DTYPES[case.precision]
    policy = build_model(model, FACTS, SEED, dtype, Part(world.stage, case.cut, keep))
    attend(policy, case, world)
    return policy, build_frozen_engine(policy, config, world)


def make_spec(case: Case) -> Spec:
    place = {"device": "nvme", "nvme_path": tempfile.gettempdir()} if case.on_disk else {"device": "cpu"}
    offload = {key: place for key in case.offloads}
    return Spec.model_validate(
        {
            "name": "parity",
            "task": task_name(case),
            "dpo": dpo_section(case),
            "kto": kto_section(case),
            "classify": {"labels": LABELS} if case.labels == "classify" else None,
            "reward": {"center_rewards_coefficient": 0.3, "label_smoothing": 0.1} if case.reward else None,
            "distill": distill_section(case),
            "model": {
                "from_config": SHAPES[case.shape],
                "gradient_checkpointing": case.checkpointing,
                "mlp_chunks": case.mlp_chunks,
                "experts": {
                    "balance": case.balance,
                    "balance_weight": None if case.balance == "none" else BALANCE_WEIGHT,
                },
                **_trained(case),
            },
            "data": {"train": [{"path": "builtin:quickstart"}]},
            "parallel": {
                "zero_stage": case.zero_stage,
                "pipeline_stages": case.stages,
                "sequence_parallel": case.sequence_parallel,
                "zero_hpz_partition_size": 2 if "hpz" in case.mode else 1,
                **offload,
            },
            "train": {
                "micro_batch_size": 2,
                "accumulation_steps": 1 if case.unplanned else 2,
                "precision": case.precision,
                "max_grad_norm": case.max_norm,
                "label_smoothing": case.label_smoothing,
            },
            "optim": {
                "name": case.optimizer.removesuffix("_default_eps"),
                "learning_rate": 1.0,  # the step's own rate is given to each step
                "weight_decay": 0.0 if case.optimizer == "sgd" else DECAY,
                "momentum": 0.9 if case.optimizer == "sgd" else 0.0,
                "eps": EPS[case.optimizer],
                "groups": GROUPS if case.trains == "groups" else [],
            },
        }
    )


def _trained(case: Case) -> dict[str, Any]:
    parts = copy.deepcopy(PARTS[case.trains])
    if case.has_scores and "lora" in parts:  # the score is trained in full without being named
        parts["lora"].pop("modules_to_save", None)
    return parts


def task_name(case: Case) -> str:
    if case.reward or case.labels != "none":
        return "reward" if case.reward else case.labels
    return "dpo" if case.of_answers else "pretrain" if case.teacher == "none" else "distill"


def dpo_section(case: Case) -> dict[str, Any] | None:
    if case.reference == "none" or case.labels == "kto":
        return None
    mode = "precomputed" if case.reference == "given" else case.reference
    beta = 0.5 if case.loss_type == "ipo" else 0.1
    return {"beta": beta, "loss_type": case.loss_type, "reference": mode, "sft_weight": case.sft_weight}


def kto_section(case: Case) -> dict[str, Any] | None:
    if case.labels != "kto":
        return None
    mode = "precomputed" if case.reference == "given" else case.reference
    return {"beta": 0.4, "desirable_weight": 1.2, "undesirable_weight": 0.7, "reference": mode}


def distill_section(case: Case) -> dict[str, Any] | None:
    if case.teacher == "none":
        return None
    mode = "precomputed" if case.teacher == "given" else "live"
    keys = {"reference": mode, "loss_type": case.divergence, "top_k": VOCABULARY}
    return keys | {"beta": 0.3, "temperature": 1.5, "weight": 0.7}


def with_adapter(case: Case, spec: Spec, world: World) -> Spec:
    """Adapters start from a saved one, none of whose values is 0 or 1, unless they are to be fresh."""
    if spec.model.lora is None or case.trains == "lora_fresh":
        return spec
    key = f"{spec.model.head} {spec.model.labels} {spec.model.model_dump_json()}"
    if key not in ADAPTERS:
        ADAPTERS[key] = world.broadcast(tempfile.mkdtemp())
        if world.rank == 0:
            trained = build_model(spec.model, FACTS, SEED, torch.float32).named_trained()
            draw = torch.Generator().manual_seed(SEED)
            values = {
                f"{PREFIX}{name}": p.detach() + 0.05 * torch.randn(p.shape, generator=draw)
                for name, p in trained.items()
            }
            save_file(values, Path(ADAPTERS[key], WEIGHTS))
        world.broadcast(None)
    lora = spec.model.lora.model_copy(update={"path": ADAPTERS[key]})
    return spec.model_copy(update={"model": spec.model.model_copy(update={"lora": lora})})


def changed_while_frozen(world: World, engine: Any, policy: Policy, whole: Policy) -> int:
    """Elements of frozen parameters that are other than at the start, over all ranks. Under ZeRO 3 parameters
    that were prefetched for a backward may still be on their way after an evaluation, and cannot be gathered
    once more: they are released first, as dsft does before it exchanges values (`Snapshot`)."""
    if engine._engine.zero_optimization_stage() == 3:
        engine._engine.optimizer.empty_partition_cache()
    start = dict(whole.causal_lm.named_parameters())
    changed = 0
    for name, parameter in policy.causal_lm.named_parameters():
        if not parameter.requires_grad:
            with GatheredParameters([parameter], enabled=hasattr(parameter, "ds_tensor")):
                changed += int((parameter.detach() != start[name]).sum())
    return sum(world.gather(changed))


def plain_model(whole: Policy, case: Case) -> nn.Module:
    shape = SHAPES[case.shape] | {"pad_token_id": None}  # Gemma's is 0, an embedding without a gradient
    config = AutoConfig.for_model(vocab_size=VOCABULARY, use_cache=False, **shape)
    config.num_labels = len(LABELS) if case.labels == "classify" else 1
    auto = AutoModelForSequenceClassification if case.has_scores else AutoModelForCausalLM
    model: Any = auto.from_config(config, experts_implementation="eager")
    if "lora" in PARTS[case.trains]:
        lora = PARTS[case.trains]["lora"]
        scale = lora["alpha"] / (lora["rank"] ** 0.5 if "use_rslora" in lora else lora["rank"])
        plain.adapt(model, lora.get("target_modules", LINEARS), lora["rank"], scale, "use_dora" in lora)
        if case.has_scores:
            model.score.requires_grad_(True)
        else:
            model.get_output_embeddings().requires_grad_("modules_to_save" in lora)
    for name, parameter in model.named_parameters():
        if case.trains == "trainable":
            parameter.requires_grad_("layers.1." in name or "layers.2.mlp." in name or "norm.weight" in name)
    values = {plain_name(n): p.float() for n, p in whole.causal_lm.named_parameters()}
    values |= persistent_buffers(whole.causal_lm)
    if case.twice:
        use_twice(model)
    missing, unexpected = model.load_state_dict(values, strict=False)
    second_names = model.all_tied_weights_keys if config.tie_word_embeddings else ()
    buffers = dict(model.named_buffers())  # biases of a router, which begin at 0 in both
    assert set(missing) - buffers.keys() == set(second_names) and not unexpected, (missing, unexpected)
    return model


def plain_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    rate = RATES[case.optimizer]
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    groups = plain.decayed_groups(model, DECAY)
    if case.trains == "groups":
        groups = [{"params": [p], **plain_settings(name, rate)} for name, p in model.named_parameters()]
    if case.optimizer == "muon":
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        return plain.Muon(model, rate, DECAY, EPS[case.optimizer], dtype)
    if case.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, rate, eps=EPS[case.optimizer])
    return torch.optim.AdamW(groups, rate, eps=EPS[case.optimizer])


def plain_settings(name: str, rate: float) -> dict[str, float]:
    """Return what GROUPS say, by hand."""
    if ".mlp." in name:
        return {"lr": 3 * rate, "weight_decay": 0.0}
    if name.endswith("norm.weight"):
        return {"lr": rate, "weight_decay": 0.3}
    return {"lr": 0.5 * rate if name == "lm_head.weight" else rate, "weight_decay": DECAY}


def share(step: plain.Step, world: World, case: Case) -> list[MicroBatch]:
    made = packed_micro_batch if case.packed else micro_batch
    return [made(ranks[world.data_rank]) for ranks in step]


def proof_rows(steps: list[plain.Step]) -> Dataset:
    rows = [row for step in steps for row in plain.rows_of(step)]
    examples = [Example(np.array(ids, np.int32), np.array(trained)) for ids, trained in rows]
    return dataset_of(examples)


def check(case: Case, engine: Any, policy: Policy, steps: list[plain.Step], world: World) -> None:
    """As every start does."""
    if case.of_answers:
        return
    dataset = proof_rows(steps)
    if case.packed:
        check_packing(engine, policy, dataset, world, case.precision, pad_id=7)
    if case.sequence_parallel > 1:
        check_split(engine, policy, dataset, world, case.precision, pad_id=7)


BROKEN = {"now": False}


def break_gradient(policy: Policy, world: World) -> None:
    """While BROKEN, the gradient that reaches the first layer on rank 0 is infinite."""
    if world.rank:
        return

    def on_forward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        if output.requires_grad and BROKEN["now"]:
            output.register_hook(lambda gradient: gradient * float("inf"))

    policy.causal_lm.model.layers[0].register_forward_hook(on_forward)


def use_twice(causal_lm: Any) -> None:
    """The second layer's MLP is applied to its input and to the same turned round, and both results are added
    up: in one backward its weights get two gradients of about the same size."""
    mlp = causal_lm.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) + forward(hidden.flip(-1))


def cut_logits(policy: Policy) -> None:
    for module in policy.modules():
        if isinstance(module, Head):
            module.chunk_bytes = CHUNK_ROWS * VOCABULARY * BYTES_PER_LOGIT


def count_gathers(policy: Policy) -> Counter[str]:
    """Return how often ZeRO 3 gathers the head's weight from here on, in forward and in backward."""
    (weight,) = (module.weight for module in policy.modules() if isinstance(module, Head))
    found: Counter[str] = Counter()

    def counting(gather: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        direction = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        found[direction] += sum(parameter is weight for parameter in parameters)
        return gather(parameters, *args, **kwargs)

    for parameter in policy.parameters():  # DeepSpeed asks the first of those that it gathers together
        given: Any = parameter
        given.all_gather_coalesced = functools.partial(counting, given.all_gather_coalesced)
    return found


def keep_gradients(engine: Any) -> list[dict[str, Tensor]]:
    """Return the reduced gradients as they are before the optimizer's step, per step, by name; a
    collective."""
    kept: list[dict[str, Tensor]] = []
    optimizer, trained = engine._engine.optimizer, engine._trained
    step = optimizer.step

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scaler = engine._deepspeed.scaler  # of fp16
        scale = 1.0 if scaler is None else scaler.loss_scale
        kept.append({name: full_gradient(p).detach().float() / scale for name, p in trained.items()})
        return step(*args, **kwargs)

    optimizer.step = wrapped
    return kept


def full_gradient(parameter: Any) -> Tensor:
    """DeepSpeed's own copy, where it keeps the gradient apart from the parameter."""
    is_apart = hasattr(parameter, "ds_tensor") or hasattr(parameter, "_hp_mapping")
    gradient: Tensor = safe_get_full_grad(parameter) if is_apart else parameter.grad
    return gradient


def assemble(world: World, engine: Any) -> dict[str, Tensor]:
    """Return the fp32 values over all ranks, from what each says it owns; every element must come exactly
    once."""
    values = ((f.name, f.start, f.data) for f in engine.owned_fragments() if f.kind == "value")
    return put_together(world, values, engine.shapes())


def copies_apart(case: Case, world: World, engine: Any) -> float:
    """Between what two stages hold of a tied parameter, values and moments: |difference| ÷ the largest
    |element|. Nothing else is held by two stages."""
    stages = [set(names) for names in world.gather(list(engine.shapes()))][:: world.layout.shards]
    tied = set().union(*(one & other for one, other in itertools.combinations(stages, 2)))
    is_tied = case.shape.endswith("_tied") and case.trains in ("all", "lora_tied") and case.stages > 1
    is_tied = is_tied and not case.has_scores
    assert tied == ({"model.embed_tokens.weight"} if is_tied else set()), tied
    mine = {name: p for name, p in engine._trained.items() if name in tied}
    for parameter in mine.values():
        parameter.ds_pipe_replicated = False  # else only the first stage's is given
    held = list(state.owned_fragments(engine._engine, mine, world.shard_rank, world.layout.shards))
    shapes = {f"{f.kind} {f.name} {world.stage}": engine.shapes()[f.name] for f in held}
    parts = ((f"{f.kind} {f.name} {world.stage}", f.start, f.data) for f in held)
    found = put_together(world, parts, shapes)
    first = {name: value for name, value in found.items() if name.endswith(" 0")}
    last = {name[:-1] + "0": value for name, value in found.items() if name not in first}
    return relative(last, first) if is_tied else 0.0


def put_together(
    world: World, parts: Iterable[tuple[str, int, Tensor]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """From (name, start, elements) of all ranks; a collective."""
    mine = [(name, start, data.detach().clone().numpy()) for name, start, data in parts]
    shapes = merge(world.gather(dict(shapes)))
    found = {name: torch.full(shape, float("nan")).flatten() for name, shape in shapes.items()}
    for name, start, data in (fragment for rank in world.gather(mine) for fragment in rank):
        target = found[name][start : start + len(data)]
        assert len(target) == len(data) and target.isnan().all(), f"{name} from {start} is owned twice"
        target.copy_(torch.from_numpy(data))
    assert not any(value.isnan().any() for value in found.values()), "an element is owned by no rank"
    return {name: value.view(shapes[name]) for name, value in found.items()}


def all_stages(world: World, gradients: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return the whole model's gradients of each step, from those of a stage, which all of its ranks have; a
    collective. Arrays are pickled in less time than tensors."""
    is_last = world.shard_rank == world.layout.shards - 1
    mine = [{name: gradient.numpy() for name, gradient in step.items() if is_last} for step in gradients]
    steps = (merge(parts) for parts in zip(*world.gather(mine), strict=True))
    return [{name: torch.from_numpy(gradient) for name, gradient in step.items()} for step in steps]


def merge(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    least = torch.finfo(torch.float32).tiny  # fresh adapters' A have no gradient in the first step
    return max(float((found[n] - e).abs().max() / e.abs().max().clamp(least)) for n, e in expected.items())


def idle_experts(gradients: list[dict[str, Tensor]]) -> int:
    """Experts that got no token in a step, so that no element of theirs has a gradient."""
    stacked = [g for step in gradients for name, g in step.items() if name.endswith("experts.down_proj")]
    return sum(int((g == 0).all(-1).all(-1).sum()) for g in stacked)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
