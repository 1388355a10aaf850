"""One rank of the check at step 0 on real engines: prints, per case, its messages, and how far the scores of
an evaluation are from the reference's. Started by test_first_step.py with two ranks.

The reference's log-probabilities are those of the whole model, each answer alone, with the weights, rows and
adapter of the case.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dsft.data.sets.dataset import Example
from dsft.data.sets.load import HeldOutSet
from dsft.data.steps.collate import collate_padded
from dsft.data.steps.steps import TrainSteps, evaluation
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.engine.self_check import whole_rows
from dsft.errors import SpecError
from dsft.model.attention import attend_per_segment
from dsft.model.build import Part, build_model, switch_off_dropout
from dsft.model.config import TokenFacts
from dsft.model.lora import PREFIX, WEIGHTS
from dsft.model.policy import Policy
from dsft.objective.preference import preference
from dsft.plan.cut import balanced
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import detect
from dsft.reference.check import StartCheck, check_start
from dsft.reference.refer import adapter_off, look_up
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Dpo, Model, Spec
from dsft.tasks.api import EvaluationSet
from dsft.tasks.preference import score_pairs
from tests.examples import dataset_of
from tests.process_groups import own_groups
from tests.specs import llama, minimal_spec

VOCABULARY, SEED, PAD, PAIRS = 128, 11, 7, 12
FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
WIDE = {"initializer_range": 0.2, "max_position_embeddings": 128}  # logits as spread as a trained model's
LLAMA = llama(32, 64, 4, 2, **WIDE)
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.1, **WIDE}
LORA = {"rank": 2, "alpha": 4.0, "target_modules": ["q_proj", "down_proj"]}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """form: padded, packed, or packed with shared prompts; reference: what differs in it; dropout: left
    on."""

    name: str
    zero_stage: int = 1
    precision: str = "fp32"
    form: str = "packed"
    reference: str = "the start"
    stages: int = 1
    model: Any = None
    lora: bool = False
    dropout: bool = False


CASES = (
    Case("fp32"),
    Case("fp32, shared prompts", zero_stage=2, form="shared"),
    Case("fp32, ZeRO 3, padded", zero_stage=3, form="padded"),
    Case("fp32, pipeline", stages=2),
    Case("bf16, shared prompts", precision="bf16", form="shared"),
    Case("an adapter that both have", lora=True),
    Case("dropout switched off", model=GPT2, form="padded"),
    Case("dropout", model=GPT2, form="padded", dropout=True),
    Case("other weights", reference="weights"),
    Case("one weight in bf16", reference="one weight", precision="bf16"),
    Case("other weights, pipeline", reference="weights", stages=2),
    Case("another template", reference="template", precision="bf16"),
    Case("other rows", reference="rows", precision="bf16"),
    Case("an adapter that the reference lacks", lora=True, reference="bare"),
)


def main() -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    world = join(detect(os.environ), Layout(ranks, 1))
    for case in CASES:
        own = replace(world, layout=Layout(ranks, case.stages))
        with own_groups():
            messages, apart = zip(*world.gather(outcome(case, own)), strict=True)
        if world.rank == 0:
            print("CASE " + json.dumps({"case": case.name, "messages": messages, "apart": apart}), flush=True)
    world.close()


def outcome(case: Case, world: World) -> tuple[str, float]:
    spec = make_spec(case, world)
    config = deepspeed_config(spec, batch_sizes(spec.train, world.layout.data_parallel))
    dtype = DTYPES[case.precision]
    pairs = [pair(number, case.form == "shared") for number in range(PAIRS)]
    dataset = dataset_of(pairs, pairs=True, file="pairs.jsonl")
    logps = reference_logps(case, build_model(spec.model, FACTS, SEED, dtype), pairs)

    keep, cut = sharding_for(config, world), balanced([1] * 4, case.stages)
    policy = build_model(spec.model, FACTS, SEED, dtype, Part(world.stage, cut, keep))
    if not case.dropout:
        switch_off_dropout(policy.causal_lm)
    if spec.data.packing:
        attend_per_segment(policy.causal_lm, "auto", spec.data.max_length)
    dpo = Dpo()
    engine: Any = build_engine(policy, spec, config, world, preference(dpo))
    sizes = batch_sizes(spec.train, world.layout.data_parallel, spec.data if spec.data.packing else None)
    steps = TrainSteps(dataset, sizes, world.data_rank, SEED, PAD)
    micro_batches = look_up(logps.numpy())(steps.step(0).micro_batches)
    without = partial(adapter_off, policy) if case.lora else None
    held_out = HeldOutSet(None, dataset)
    assigned = evaluation(dataset, sizes, world.data_rank, PAD)
    table = score_pairs(EvaluationSet(held_out, *assigned, look_up(logps.numpy())), engine, world)
    assert table.answers.reference is not None and torch.equal(table.answers.reference, logps)
    assert table.answers.num_targets.tolist() == [[sum(a.trained) for a in whole_rows(one)] for one in pairs]
    apart = float((table.logps - logps).abs().max())
    try:
        first = StartCheck(spec, dpo.beta, dataset, micro_batches, PAD, without)
        return check_start(first, engine, policy, world), apart
    except SpecError as error:
        return str(error), apart
    finally:
        engine._engine.destroy()


def make_spec(case: Case, world: World) -> Spec:
    model: dict[str, Any] = {"from_config": case.model or LLAMA}
    if case.lora:
        model["lora"] = LORA | {"path": saved_adapter(world)}
    return minimal_spec(
        "dpo",
        model=model,
        data={"train": [{"path": "pairs.jsonl"}], "packing": case.form != "padded", "max_length": 64},
        parallel={"zero_stage": case.zero_stage, "pipeline_stages": case.stages},
        train={"micro_batch_size": 2, "global_batch_size": PAIRS, "precision": case.precision},
    )


def saved_adapter(world: World) -> str:
    """One that is not 0."""
    folder = Path(world.broadcast(tempfile.mkdtemp()))
    if world.rank == 0:
        model = Model.model_validate({"from_config": LLAMA, "lora": LORA})
        draw = torch.Generator().manual_seed(SEED)
        trained = build_model(model, FACTS, SEED, torch.float32).named_trained()
        save_file(
            {f"{PREFIX}{n}": 0.1 * torch.randn(p.shape, generator=draw) for n, p in trained.items()},
            folder / WEIGHTS,
        )
    world.broadcast(None)
    return str(folder)


def pair(number: int, shared: bool, prompt_token: int = 3) -> Example:
    """Return a prompt of 3 to 6 tokens, answers of 4 to 30."""
    draw = np.random.default_rng(number)
    prompt = [1, prompt_token, *draw.integers(10, VOCABULARY, 1 + number % 4)]
    chosen, rejected = (draw.integers(10, VOCABULARY, n) for n in draw.integers(4, 31, 2))
    again = prompt[-1:] if shared else prompt
    ids = [*prompt, *chosen, *again, *rejected]
    trained = [0] * len(prompt) + [1] * len(chosen) + [0] * len(again) + [1] * len(rejected)
    segments = (len(prompt) + len(chosen), len(again) + len(rejected))
    starts = (0, len(prompt) - 1) if shared else None
    return Example(np.array(ids, np.int32), np.array(trained, bool), segments, starts)


def reference_logps(case: Case, reference: Policy, pairs: Sequence[Example]) -> Tensor:
    """(n, 2) float64."""
    reference.eval()
    if case.reference == "weights":
        draw = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for p in reference.parameters():
                p.add_((0.02 * torch.randn(p.shape, generator=draw)).to(p.dtype))
    if case.reference == "one weight":
        with torch.no_grad():
            next(p for n, p in reference.named_parameters() if n.endswith("q_proj.weight")).mul_(1.1)
    if case.reference == "template":
        pairs = [pair(number, shared=False, prompt_token=4) for number in range(len(pairs))]
    if case.reference == "rows":
        pairs = [*pairs[:3], pairs[4], pairs[3], *pairs[5:]]
    rows = [collate_padded([answer], PAD) for one in pairs for answer in whole_rows(one)]
    with torch.no_grad(), adapter_off(reference if case.reference == "bare" else torch.nn.Module()):
        sums = [reference(row.tokens.input_ids, row.tokens).logps.double().sum() for row in rows]
    return torch.stack(sums).view(-1, 2)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
