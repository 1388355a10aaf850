"""Run on every rank of one launch: trains each architecture from a folder under ZeRO 2 and 3, and with rows
split over the ranks, by a step of padded rows and one of packed ones, and with the plain loop; exports what
was trained.

    python worker.py FOLDER [KIND …]      KIND: run only these architectures

FOLDER/KIND holds a model that transformers saved. Every rank writes FOLDER/results.RANK.json with its share
of the architectures: {kind: {mode: {"padded": figures, "packed": figures, …} or {"refused": text}}}.

loss         |step's loss − plain|, absolute
gradient     |gradient − plain| ÷ the tensor's largest |element|, over tensors, both at the engine's weights
weights      |weight after both steps − plain| ÷ the tensor's largest |element|, over tensors
export       |logits of the exported folder − logits of the final weights|, absolute

The mode "float64" has the same figures of the plain loop in float32 against itself in float64: what an
architecture's own rounding is. The mode "shared" is of preference pairs in one process, where attention is
per segment: answers' log-probabilities and gradients with each prompt once, against rows by themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import groups
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dsft.checkpoint.export import export_checkpoint
from dsft.checkpoint.files import read_files
from dsft.checkpoint.save import CheckpointState, save
from dsft.checkpoint.tensors import write_beside
from dsft.data.steps.batch import MicroBatch
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.errors import DsftError
from dsft.model.attention import attend_per_segment, own_attention
from dsft.model.attention_split import Exchange
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts, resolve_config
from dsft.model.conversion import persistent_buffers
from dsft.model.policy import Policy
from dsft.model.split_check import check_can_split
from dsft.model.weights import Sharding
from dsft.objective.answers import answer_logps
from dsft.objective.next_token import next_token
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.memory.sizes import BYTES_PER_LOGIT
from dsft.rank.environment import detect
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Checkpoint, Spec
from tests.architectures.cases import ARCHITECTURES, VOCABULARY
from tests.make import forward, packed, padded
from tests.parity import pairs, plain
from tests.parity.worker import DECAY, assemble, keep_gradients, merge, relative
from tests.specs import minimal_spec

FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
MODES = {"zero2": 2, "zero3": 3, "split": 2}
"""The ZeRO stage of each mode; split: rows are split over the two ranks."""
STEPS = ("padded", "packed")
RATE, EPS, MAX_NORM = 3e-4, 1e-4, 1.0
Tensors = dict[str, Tensor]


@dataclasses.dataclass
class Outcome:
    """Of one engine, the same on every rank; `before`: the weights at the start of each step."""

    losses: list[float]
    before: list[Tensors]
    gradients: list[Tensors]
    final: Tensors
    attention: str = "auto"  # of the packed step; "refused" where it is padded too


def main(folder: Path, kinds: list[str]) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    world = join(detect(os.environ), Layout(ranks, 1))
    gc.freeze()  # what is imported need not be looked through after every engine
    steps = plain.make_steps(5, (2, 2), ranks, VOCABULARY)
    trained = {kind: {mode: train(folder, kind, mode, steps, world) for mode in MODES} for kind in kinds}
    results = {kind: judge(folder / kind, trained[kind], steps) for kind in kinds[world.rank :: ranks]}
    (folder / f"results.{world.rank}.json").write_text(json.dumps(results, indent=1))
    world.close()


def train(folder: Path, kind: str, mode: str, steps: list[plain.Step], world: World) -> Outcome | str:
    """Return what came of it, or why there is nothing; a rank that fails inside the engine ends the
    launch."""
    try:
        is_split = mode == "split"
        if is_split:
            world = dataclasses.replace(world, layout=Layout(world.world_size, 1, world.world_size))
        attention = "auto" if is_split else attention_for_packed(folder / kind)
        spec = make_spec(folder / kind, mode, attention)
        config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))
        policy = build(spec, sharding_for(config, world), exchange_of(world))
        if mode == "zero3":  # else so small a model is kept whole on every rank, in one group
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 3_000}
        world.first(lambda: write_beside(folder / f"{kind}-model", persistent_buffers(policy.causal_lm)))
        engine: Any = build_engine(policy, spec, config, world, next_token())
        outcome = run(engine, policy, steps, world, attention)
        if not is_split:
            facts = CheckpointState(
                {"step": 1}, spec.model_dump(mode="json"), {"global_batch_size": 1}, {}, {}, {}
            )
            save(
                folder / f"{kind}-{mode}", engine.owned_fragments(), engine.shapes(), facts, world,
                model_files=read_files(folder / f"{kind}-model"), retention=Checkpoint(keep_last=None),
            )  # fmt: skip
        engine._engine.destroy()
        return outcome
    except DsftError as error:
        return str(error)
    except Exception:
        (folder / f"{world.rank}.error").write_text(f"{kind} {mode}\n{traceback.format_exc()}")
        raise
    finally:
        groups.mpu = None
        gc.collect()
        gc.freeze()


@functools.cache
def attention_for_packed(folder: Path) -> str:
    """Per segment (auto), the model's own where that is not exact (eager), or none that is (refused)."""
    for attention in ("auto", "eager"):
        with suppress(DsftError):
            try_packed(make_spec(folder, "zero2", attention))
            return attention
    return "refused"


def try_packed(spec: Spec) -> None:
    """Raises DsftError where the attention cannot be exact, which it says in a packed row's first pass, or
    where a changed neighbor shows it."""
    policy = build(spec, Sharding())
    one, other, row = ([1, 2, 3], [True] * 3), ([9, 8, 7], [True] * 3), ([4, 5, 6, 7, 8, 9], [True] * 6)
    with torch.no_grad():
        before, after = (score(policy, packed([neighbor, row])) for neighbor in (one, other))
    if not torch.allclose(before[0, 3:], after[0, 3:], rtol=0, atol=1e-5):
        raise DsftError("a packed row's neighbor changes its loss")


def score(policy: Policy, batch: MicroBatch) -> Tensor:
    logps: Tensor = forward(policy, batch).logps
    return logps


def build(spec: Spec, keep: Sharding, exchange: Exchange | None = None) -> Policy:
    """As a run does."""
    length = spec.data.max_length
    if exchange is not None:
        check_can_split(resolve_config(spec.model, FACTS), exchange.size, length)
    policy = build_model(spec.model, FACTS, seed=0, dtype=torch.float32, part=Part(sharding=keep))
    if spec.data.packing:
        attend_per_segment(policy.causal_lm, spec.model.attention, length, exchange=exchange)
    (head,) = policy._head
    assert head is not None, "the output layer is dsft's own"
    head.chunk_bytes = 5 * VOCABULARY * BYTES_PER_LOGIT  # in chunks of five tokens, small as it is
    return policy


def run(engine: Any, policy: Policy, steps: list[plain.Step], world: World, attention: str) -> Outcome:
    gradients = keep_gradients(engine)
    losses, before = [], []
    for name, step in zip(STEPS, steps, strict=True):
        is_packed = name == "packed" and attention != "refused"
        lay = packed if is_packed else padded
        before.append(assemble(world, engine))
        counts = {"tokens": plain.count(plain.rows_of(step))}
        is_split = world.layout.sequence_parallel > 1  # one group has all ranks' rows
        share = [lay(plain.rows_of([ranks]) if is_split else ranks[world.data_rank]) for ranks in step]
        with nullcontext() if is_packed or is_split else own_attention(policy.causal_lm):
            result = engine.step(share, counts, RATE)
        losses.append(float(world.sum(result.sums)[0]) / counts["tokens"])
    gathered = [merge(world.gather(g)) for g in gradients]
    return Outcome(losses, before, gathered, assemble(world, engine), attention)


def make_spec(folder: Path, mode: str, attention: str = "auto") -> Spec:
    return minimal_spec(
        model={
            "name_or_path": str(folder),
            "gradient_checkpointing": mode != "zero2",
            "attention": attention.replace("refused", "auto"),
        },
        data={"packing": attention != "refused"},
        parallel={"zero_stage": MODES[mode], "sequence_parallel": 2 if mode == "split" else 1},
        train={
            "micro_batch_size": 2,
            "accumulation_steps": 2,
            "precision": "fp32",
            "max_grad_norm": MAX_NORM,
        },
        optim={"name": "adamw", "learning_rate": 1.0, "weight_decay": DECAY, "eps": EPS},
    )


def judge(folder: Path, outcomes: Mapping[str, Outcome | str], steps: list[plain.Step]) -> dict[str, Any]:
    try:
        return compare(folder, outcomes, steps)
    except Exception:
        return dict.fromkeys(outcomes, {"failed": traceback.format_exc()})


def compare(folder: Path, outcomes: Mapping[str, Outcome | str], steps: list[plain.Step]) -> dict[str, Any]:
    model = plain_model(folder)
    expected = plain_outcome(model, steps)
    exact = plain_outcome(plain_model(folder).double(), steps)
    results: dict[str, Any] = {"float64": differences(expected, exact), "shared": shared_prompts(folder)}
    for mode, outcome in outcomes.items():
        if isinstance(outcome, str):
            results[mode] = {"refused": outcome}
            continue
        at_these = [
            plain.gradient(model, plain.next_token(), whole(model, weights), step)
            for weights, step in zip(outcome.before, steps, strict=True)
        ]
        results[mode] = differences(outcome, dataclasses.replace(expected, gradients=at_these))
        results[mode]["attention"] = outcome.attention
        if mode != "split":
            results[mode] |= exported(folder, mode, model, outcome.final)
    return results


def plain_model(folder: Path) -> PreTrainedModel:
    """As transformers loads it; experts are computed one after the other, not as the engines do."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config)
    for name, parameter in made.named_parameters():  # from_pretrained forgets what the class freezes
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model


def plain_outcome(model: PreTrainedModel, steps: list[plain.Step]) -> Outcome:
    """By the plain loop, in the model's type; `gradients` are those of its first weights."""
    first = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [plain.gradient(model, plain.next_token(), first, step) for step in steps]
    model.zero_grad()
    optimizer = torch.optim.AdamW(plain.decayed_groups(model, DECAY), RATE, eps=EPS)
    found = plain.train(model.train(), plain.next_token(), steps, optimizer, MAX_NORM)
    return Outcome(found.losses, [], gradients, found.weights)


def differences(one: Outcome, other: Outcome) -> dict[str, Any]:
    weights = relative(one.final, other.final)
    return {
        step: {
            "loss": abs(one.losses[number] - other.losses[number]),
            "gradient": off(one.gradients[number], other.gradients[number]),
            "weights": weights,
        }
        for number, step in enumerate(STEPS)
    }


def off(found: Tensors, expected: Tensors) -> float:
    """As `relative`; a tensor whose gradient is nothing but rounding counts by the largest of all tensors (a
    bias of keys, which without rotary positions moves all of a row's scores alike)."""
    largest = max(e.abs().max() for e in expected.values())
    is_noise = {name: bool(e.abs().max() < 1e-6 * largest) for name, e in expected.items()}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(
        float((found[n] - e).abs().max() / (largest if is_noise[n] else e.abs().max()))
        for n, e in expected.items()
    )


def shared_prompts(folder: Path) -> dict[str, float]:
    """answers: |log-probability − padded| ÷ |padded|; gradient: as of a step, each answer weighed otherwise;
    rounding: the larger of both, of the padded rows against themselves in float64."""
    if attention_for_packed(folder) != "auto":
        return {}
    policy, task = build(make_spec(folder, "zero2"), Sharding()), plain.make_pairs(5, (3,), 1, VOCABULARY)[0]
    shared = answers_of(policy, pairs.micro_batch(plain.rows_of(task), 0, "shared"))
    with own_attention(policy.causal_lm):
        padded = pairs.micro_batch(plain.rows_of(task), 0, "padded")
        alone = answers_of(policy, padded)
        policy.causal_lm.set_experts_implementation("eager")  # the others know no float64
        exact = answers_of(policy.double(), padded)
    answers, gradient = apart(shared, alone)
    return {"answers": answers, "gradient": gradient, "rounding": max(apart(alone, exact))}


def answers_of(policy: Policy, batch: MicroBatch) -> tuple[Tensor, Tensors]:
    batch = batch.to(torch.device("cpu"))
    logps = forward(policy, batch).logps
    answers = answer_logps(logps, batch)
    weights = torch.arange(1.0, 1.0 + answers.numel(), dtype=answers.dtype).view_as(answers)
    trained = policy.named_trained()
    found = torch.autograd.grad((answers * weights).sum(), list(trained.values()), allow_unused=True)
    return answers.detach(), {n: g for n, g in zip(trained, found, strict=True) if g is not None}


def apart(one: tuple[Tensor, Tensors], other: tuple[Tensor, Tensors]) -> tuple[float, float]:
    return float(((one[0] - other[0]) / other[0]).abs().max()), off(one[1], other[1])


def exported(folder: Path, mode: str, model: PreTrainedModel, final: Tensors) -> dict[str, Any]:
    """Exports the checkpoint of `mode`, and loads it as transformers does."""
    run = folder.with_name(f"{folder.name}-{mode}")
    export_checkpoint(run / "checkpoints" / "step-1", run / "export")
    again, report = AutoModelForCausalLM.from_pretrained(
        run / "export", output_loading_info=True, experts_implementation="eager"
    )
    model.load_state_dict(whole(model, final))
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        difference = (again.eval()(ids).logits - model.eval()(ids).logits).abs().max()
    return {
        "export": float(difference),
        "report": {key: sorted(map(str, found)) for key, found in report.items() if found},
        "names": sorted(names_in(folder) ^ names_in(run / "export")),
    }


def whole(model: PreTrainedModel, weights: Tensors) -> Tensors:
    """Return a state dict of `model` with `weights`, which names a tied tensor once, and what is trained
    alone."""
    first = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    every = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    return model.state_dict() | {name: weights[first[id(parameter)]] for name, parameter in every}


def names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(ARCHITECTURES))
