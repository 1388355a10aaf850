"""Run on every rank of one launch: scores with a frozen engine, and compares with the whole model.

    python frozen_worker.py OUTPUT.json [NAME …]      the cases of these names; without one all

Rank 0 writes {case name: {figure: largest difference}}; a rank that fails writes OUTPUT.RANK.error.

score     |log-probability − whole model's|, absolute, over the targets
policy    |loss − the same steps' without a reference beside them|, absolute, over the steps
left      what is left of the engine, once it is closed, in DeepSpeed and of its parameters: a number
reference |answer's log-probability − the start's|, relative, of a reference inside the policy, in each step
switched  adapters that are off, or values that are not the policy's own, once the reference was asked
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils import groups
from safetensors.torch import save_file
from torch import Tensor

from dsft.data.steps.batch import NO_TARGET, Answers, MicroBatch
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.api import Engine
from dsft.engine.build import build_engine
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.model.lora import PREFIX, WEIGHTS
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.objective.next_token import next_token
from dsft.plan.cut import balanced
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.reference import reference_model
from dsft.rank.environment import detect
from dsft.reference.model import open_reference
from dsft.reference.refer import refer_to_start
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from tests.make import make_micro_batch
from tests.process_groups import own_groups
from tests.specs import llama, minimal_spec

VOCABULARY, SEED = 96, 7
FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = llama(32, 64, 4, 4, 2, max_position_embeddings=64, initializer_range=0.2)
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "replicated": {"reference_zero_stage": 0},
    "zero3": {"reference_zero_stage": 3},
    "zero3_offload": {"reference_zero_stage": 3, "reference_offload": "cpu"},
}
BESIDE = ((0, "zero3"), (1, "replicated"), (2, "zero3"), (3, "replicated"), (3, "zero3_offload"))
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4},
    "dora": {"rank": 4, "use_dora": True},
    "head": {"rank": 4, "modules_to_save": ["lm_head"]},
    "continued": {"rank": 4},
    "continued_dora": {"rank": 4, "use_dora": True, "modules_to_save": ["lm_head"]},
}
INSIDE: dict[str, tuple[str, ...]] = {
    "lora": ("1", "3"),
    "dora": ("0",),
    "head": ("2", "pipeline"),
    "continued": ("1",),
    "continued_dora": ("2", "3", "pipeline"),
}
"""The ZeRO stages of a policy that is its own reference."""
STEPS = 3


def spec_of(
    zero_stage: int,
    dpo: dict[str, Any],
    precision: str = "fp32",
    stages: int = 1,
    model: dict[str, Any] | None = None,
    parts: int = 1,
) -> Spec:
    return minimal_spec(
        "dpo",
        model={"from_config": LLAMA, **(model or {})},
        data={"train": [{"path": "none.jsonl"}], "max_length": 32},
        train={"micro_batch_size": 2, "accumulation_steps": 2, "precision": precision, "seed": SEED},
        optim={"name": "adamw", "learning_rate": 1e-2},
        parallel={"zero_stage": zero_stage, "pipeline_stages": stages, "sequence_parallel": parts},
        dpo={"reference": "live", **dpo},
    )


def micro_batch(seed: int, rows: int = 2, length: int = 13) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    targets = ids.roll(-1, 1).masked_fill(torch.arange(length) < 4, NO_TARGET)
    targets[:, -1] = NO_TARGET
    counts = (targets != NO_TARGET).sum(1).view(-1, 2)
    pairs = Answers(torch.arange(rows // 2), counts)
    return make_micro_batch(ids, torch.arange(length).repeat(rows, 1), targets, answers=pairs)


def batches(world: World, step: int) -> list[MicroBatch]:
    """Of this data rank; others on the next, of other lengths."""
    first = 100 * step + 10 * world.data_rank
    return [micro_batch(first + i, length=11 + 3 * i + world.data_rank) for i in range(2)]


def whole_scores(spec: Spec, found: list[MicroBatch]) -> list[Tensor]:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.train.precision]
    policy = build_model(reference_model(spec), FACTS, SEED, dtype).eval()
    with torch.no_grad():
        return [policy(b.tokens.input_ids, b.tokens).logps for b in found]


def apart(found: tuple[Tensor, ...], wanted: list[Tensor]) -> float:
    return max((float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)), default=0.0)


def alone(world: World, mode: str, precision: str, parts: int = 1) -> dict[str, float]:
    """The engine by itself, and what is left of it. Its config has dropout, which it does not apply.
    `parts`: the ranks that split each row."""
    dropped = {"from_config": {**LLAMA, "attention_dropout": 0.3}}
    spec = spec_of(1, MODES[mode], precision, model=dropped, parts=parts)
    world = replace(world, layout=Layout(world.world_size, 1, parts))
    reference = open_reference(spec, FACTS, world)
    found = batches(world, 0)
    score = apart(reference.engine.score(found), whole_scores(spec, found))
    score = max(score, apart(reference.engine.score(found), whole_scores(spec, found)))
    module = weakref.ref(reference.policy.causal_lm)
    reference.engine.close()
    left = len(parameter_offload.FWD_MODULE_STACK) + (groups.mpu is not None)
    left += sum(p.numel() for p in reference.policy.parameters())
    del reference
    gc.collect()
    return {"score": score, "left": left + (module() is not None)}


def in_stages(world: World) -> dict[str, float]:
    dropped = {"from_config": {**LLAMA, "attention_dropout": 0.3}}
    spec = spec_of(1, {}, stages=world.world_size, model=dropped)
    places = Layout(world.world_size, world.world_size)
    staged = World(world.rank, world.world_size, world.local_rank, places, world.device)
    reference = open_reference(spec, FACTS, staged)
    found = batches(staged, 0)
    scored = reference.engine.score(found)
    is_last = staged.stage == world.world_size - 1
    assert len(scored) == (len(found) if is_last else 0)
    score = apart(scored, whole_scores(spec, found)) if is_last else 0.0
    reference.engine.close()
    return {"score": score, "left": float(sum(p.numel() for p in reference.policy.parameters()))}


def beside(world: World, zero_stage: int, mode: str, stages: int = 1) -> dict[str, float]:
    """A policy that trains, and a reference that is asked before each of its steps."""
    spec = spec_of(zero_stage, MODES[mode], stages=stages)
    places = Layout(world.world_size, stages)
    world = World(world.rank, world.world_size, world.local_rank, places, world.device)
    lonely = losses_alone(world, zero_stage, stages)
    reference = open_reference(spec, FACTS, world)
    differences = [0.0]

    def ask(step: int) -> None:
        found = batches(world, step)
        scored = reference.engine.score(found)
        assert bool(scored) == (world.stage == stages - 1)
        if scored:
            differences.append(apart(scored, whole_scores(spec, found)))

    accompanied = losses(world, spec, ask)
    reference.engine.close()
    policy = max(abs(a - b) for a, b in zip(lonely, accompanied, strict=True))
    return {"score": max(differences), "policy": policy}


def inside(world: World, zero_stage: int, stages: int, trained: str, adapter: str) -> dict[str, float]:
    """A policy with adapters that trains, and is its own reference, before each of its steps."""
    lora = {**ADAPTERS[trained], **({"path": adapter} if trained.startswith("continued") else {})}
    spec = spec_of(zero_stage, {"reference": "adapter"}, stages=stages, model={"lora": lora})
    places = Layout(world.world_size, stages)
    world = World(world.rank, world.world_size, world.local_rank, places, world.device)
    lonely = losses(world, spec, lambda step: None)
    differences, switched = [0.0], [0]

    def asking(policy: Policy, engine: Engine) -> Callable[[int], None]:
        start = refer_to_start(policy, engine, spec)

        def ask(step: int) -> None:
            found = batches(world, step)
            before = [home.detach().clone() for home in held(policy)]
            filled = start(found)
            same = zip(before, held(policy), strict=True)
            switched.append(sum(not torch.equal(a, b) for a, b in same) + adapters_off(policy))
            if world.stage == stages - 1:
                for batch, logps in zip(filled, whole_scores(spec, found), strict=True):
                    wanted = answer_logps(logps, batch)
                    assert batch.answers is not None and batch.answers.reference is not None
                    differences.append(float(((batch.answers.reference - wanted) / wanted).abs().max()))

        return ask

    accompanied = losses(world, spec, asking=asking)
    policy = max(abs(a - b) for a, b in zip(lonely, accompanied, strict=True))
    moved = abs(lonely[-1] - lonely[0])
    assert moved > 1e-3, f"nothing was learned: {lonely}"
    return {"reference": max(differences), "policy": policy, "switched": float(max(switched))}


def held(policy: Policy) -> list[Tensor]:
    return [getattr(parameter, "ds_tensor", parameter) for parameter in policy.parameters()]


def adapters_off(policy: Policy) -> int:
    return sum(getattr(module, "_disable_adapters", False) for module in policy.modules())


def write_adapter(folder: Path, lora: dict[str, Any]) -> None:
    """One that changes what the model says."""
    model = spec_of(0, {}, model={"lora": lora}).model
    named = build_model(model, FACTS, SEED, torch.float32).named_trained()
    generator = torch.Generator().manual_seed(5)
    values = {
        PREFIX + name: parameter.detach() + 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in named.items()
    }
    folder.mkdir(parents=True)
    save_file(values, folder / WEIGHTS)


def losses(
    world: World,
    spec: Spec,
    before: Callable[[int], None] = lambda step: None,
    asking: Callable[[Policy, Engine], Callable[[int], None]] | None = None,
) -> list[float]:
    batch = batch_sizes(spec.train, world.layout.data_parallel)
    config = deepspeed_config(spec, batch)
    cut = balanced([1] * 4, world.layout.pipeline_stages)
    keep = sharding_for(config, world)
    policy = build_model(spec.model, FACTS, SEED, torch.float32, Part(world.stage, cut, keep))
    engine: Any = build_engine(policy, spec, config, world, next_token())
    if asking is not None:
        before = asking(policy, engine)
    found = []
    for step in range(STEPS):
        before(step)
        mine = batches(world, step)
        targets = torch.tensor([float(sum((b.tokens.targets != NO_TARGET).sum() for b in mine))])
        counts = {"tokens": int(world.sum(targets)) // cut.stages}
        result = engine.step(mine, counts, 1e-2)
        found.append(float(world.sum(result.sums)) / counts["tokens"])
    destroy(engine)
    return found


LONELY: dict[tuple[int, int], list[float]] = {}


def losses_alone(world: World, zero_stage: int, stages: int) -> list[float]:
    """Those without a reference, which are the same whatever the reference."""
    if (zero_stage, stages) not in LONELY:
        LONELY[zero_stage, stages] = losses(world, spec_of(zero_stage, MODES["default"], stages=stages))
    return LONELY[zero_stage, stages]


def destroy(engine: Any) -> None:
    engine._engine.destroy()
    groups.mpu = None
    parameter_offload.FWD_MODULE_STACK.clear()


def cases(world: World, folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    for mode in list(MODES)[1:]:
        for precision in ("fp32", "bf16"):
            yield f"{mode}-{precision}", functools.partial(alone, world, mode, precision)
    for mode in ("replicated", "zero3_offload"):
        yield f"split-{mode}-fp32", functools.partial(alone, world, mode, "fp32", world.world_size)
    yield "pipeline-fp32", functools.partial(in_stages, world)
    for zero_stage, mode in BESIDE:
        yield f"beside-{zero_stage}-{mode}", functools.partial(beside, world, zero_stage, mode)
    yield "beside-pipeline", functools.partial(beside, world, 1, "default", stages=world.world_size)
    for trained, lora in ADAPTERS.items():
        world.first(functools.partial(write_adapter, folder / trained, lora))
        for name in INSIDE[trained]:
            zero_stage, stages = (1, world.world_size) if name == "pipeline" else (int(name), 1)
            case = functools.partial(inside, world, zero_stage, stages, trained, str(folder / trained))
            yield f"inside-{name}-{trained}", case


def main(output: Path, names: list[str]) -> None:
    launched = detect(os.environ)
    world = join(launched, Layout(launched.world_size, 1))
    gc.freeze()  # what is imported need not be looked through after every engine
    exchange_of(replace(world, layout=Layout(world.world_size, 1, world.world_size)))  # outlives the cases
    figures: dict[str, dict[str, float]] = {}
    try:
        for name, case in cases(world, output.parent / "adapters"):
            if not names or name in names:
                with own_groups():
                    everywhere = world.gather(case())
                figures[name] = {k: max(mine[k] for mine in everywhere) for k in everywhere[0]}
    except BaseException:
        output.with_suffix(f".{world.rank}.error").write_text(traceback.format_exc())
        raise
    if world.rank == 0:
        output.write_text(json.dumps(figures, indent=1))
    world.close()
    os._exit(0)  # the threads of a process group can abort the interpreter's own end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
