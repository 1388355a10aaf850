"""`dsft rehearse SPEC --ranks N`: run one rank of each kind of a run of N ranks, in the real size and
without GPUs, and show its memory, collectives and checkpoint beside the plan.

The real DeepSpeed engine runs on torch's meta device with torch's fake process group
(dsft/engine/rehearsal.py), since a user without a GPU has no other. Nothing is computed or sent, and each
kind of rank is a process.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.text import Text

from dsft.checkpoint.files import header_of
from dsft.checkpoint.save import METADATA, entries_of, file_of
from dsft.data.rows import FIELDS
from dsft.data.steps.batch import Annotate, Answers, MicroBatch, Segments, Tokens, unchanged
from dsft.data.tokenizer.load import open_tokenizer
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.meter import CPU, CUDA, Meter, NoMemory
from dsft.engine.partition import sharding_for
from dsft.engine.rehearsal import WORKSPACE, NoValues, begin
from dsft.errors import DsftError, Problem, SpecError, WorldError, brief
from dsft.model.attention import attend
from dsft.model.build import Part, build_model
from dsft.model.census import take_census
from dsft.model.config import TokenFacts, resolve_config, token_facts
from dsft.model.quantize import load_bitsandbytes
from dsft.model.split_points import find_split_points
from dsft.model.weights import DTYPES, Weights
from dsft.plan.build import Plan, build_plan
from dsft.plan.cut import Cut, cut_of
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import HostFacts
from dsft.plan.memory.layer import mlp_chunks
from dsft.plan.memory.offload import largest_part
from dsft.plan.memory.ranks import memory
from dsft.plan.memory.reference import with_reference
from dsft.plan.memory.sizes import GIB, gpu_bytes, with_device
from dsft.plan.reference import reference_model, scores_in_training
from dsft.plan.tables import heading, printed, table
from dsft.plan.traffic import traffic
from dsft.spec.document import quote
from dsft.spec.findings import value_at
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from dsft.system.disk import size_text
from dsft.system.process import die_with
from dsft.tasks.referenced import live_reference
from dsft.tasks.registry import task_of

MOST_RANKS = 512
GPU = 80 * GIB  # bytes of a GPU where the spec does not give them
UNKNOWN = {
    "model.compile": True, "optim.name": "muon", "parallel.offload_optimizer.device": "nvme",
    "parallel.offload_parameters.device": "nvme",
}  # fmt: skip
"""Values that are refused, by their keys."""
NAMES = {"load": "start", "first_step": "first step", "steady": "step"}
"""Phases by the names of the report, where these differ."""


@dataclass(frozen=True)
class Setup:
    """What all ranks of a run know. spec: with all that the plan decides; batch: the largest micro-batch,
    of which a step has `number`; gpu: bytes of a GPU."""

    spec: Spec
    facts: TokenFacts
    config: Mapping[str, Any]
    cut: Cut
    batch: MicroBatch
    number: int
    gpu: int


def rehearse(path: Path, overrides: Sequence[str], ranks: int, *, as_json: bool) -> None:
    """Print what the rehearsal finds. Raises SpecError for a spec that does not fit `ranks`, or is not
    known here."""
    if not 1 <= ranks <= MOST_RANKS:
        raise _refused("ranks", f"{ranks} is not between 1 and {MOST_RANKS}; give a number of these")
    spec = load_spec(path, overrides, check_files=False, ranks=ranks)
    _check_known(spec)
    plan = build_plan(spec, ranks)
    setup = setup_of(plan)
    stages = sorted({0, min(1, plan.layout.pipeline_stages - 1), plan.layout.pipeline_stages - 1})
    kinds = in_processes(setup, plan, stages)
    flows = traffic(plan.census, setup.spec, plan.layout, plan.hosts, setup.batch.shape.numel())
    sent = sum(flow.bytes for flow in flows if flow.link in ("within a host", "between hosts"))
    result = {"ranks": ranks, "kinds": kinds, "traffic": sent}
    text = json.dumps(result, indent=1) + "\n" if as_json else printed(_parts(plan, result))
    print(text, end="", flush=True)


def _check_known(spec: Spec) -> None:
    """Raise SpecError for what is not rehearsed."""
    for key, value in UNKNOWN.items():
        if value_at(spec, key) == value:
            shown = quote(value) if isinstance(value, str) else "this"
            why = f"dsft rehearse does not know {shown} yet; dsft plan SPEC shows its estimate"
            raise _refused(key, why)


def _refused(key: str, message: str) -> SpecError:
    return SpecError("The run cannot be rehearsed.", [Problem(key, message)])


def setup_of(plan: Plan) -> Setup:
    tokenizer, added = open_tokenizer(plan.spec.model)
    on_cpu = plan.spec.is_on_cpu
    gpu = gpu_bytes(plan.spec) or GPU
    model = plan.spec.model.model_copy(update={"kernels": "torch"})  # Liger's are Triton's, which need a GPU
    spec = with_device(plan.spec.model_copy(update={"model": model}), "cpu" if on_cpu else "cuda", gpu)
    batch = largest_micro_batch(spec, plan.batch.micro_batch_size, plan.batch.tokens_per_micro_batch)
    chunks = mlp_chunks(spec, plan.census, plan.layout.part(batch.shape.numel()))
    spec = spec.model_copy(update={"model": model.model_copy(update={"mlp_chunks": chunks})})
    facts = HostFacts(plan.census.elements, largest_part(plan.census, plan.layout.shards))
    config = deepspeed_config(spec, plan.batch, facts)
    cut = cut_of(spec.parallel, plan.census)
    of_tokens = token_facts(tokenizer, added.first_id)
    return Setup(spec, of_tokens, config, cut, batch, plan.batch.accumulation_steps, gpu)


def largest_micro_batch(spec: Spec, size: int, budget: int | None) -> MicroBatch:
    """Return a micro-batch of rows of data.max_length tokens, all of them targets. size: examples of a
    micro-batch; budget: the most tokens of a packed one, None where rows are padded."""
    length, answers = spec.data.max_length, spec.task_kind.rows if spec.task_kind.whole else 1
    rows, rest = size * answers, 0
    if budget is not None:
        rows = max(answers, budget // length // answers * answers)
        rest = max(0, budget - rows * length) if answers == 1 else 0
    positions = torch.arange(length).repeat(rows, 1)
    if budget is not None:
        positions = torch.cat((positions.flatten(), torch.arange(rest)))[None]
    ids = torch.ones_like(positions)
    lengths = (length,) * rows + (rest,) * (rest > 0)
    targets = torch.tensor(lengths).view(-1, answers)
    types = dict.fromkeys(spec.task_kind.fields, torch.float64) | (
        {"label": torch.int64} if spec.labels else {}
    )
    values = {name: torch.full((len(targets),), FIELDS[name].missing, dtype=of) for name, of in types.items()}
    compared = Answers(torch.arange(len(targets)), targets, values=values)
    batch = MicroBatch(
        Tokens(ids, positions, ids),
        None if budget is None else Segments(lengths),
        compared if spec.task_kind.whole or values else None,
    )
    return task_of(spec).for_probe(spec, batch)


def in_processes(setup: Setup, plan: Plan, stages: Sequence[int]) -> list[dict[str, Any]]:
    """Return what `rehearse_rank` finds for each stage, in a process of its own. Raises DsftError where a
    rank cannot be rehearsed, WorldError where its process is killed."""
    context, ours = multiprocessing.get_context("fork"), (os.getpid(),)
    with ExitStack() as running:
        pools = [running.enter_context(ProcessPoolExecutor(1, context, die_with, ours)) for _ in stages]
        each = zip(pools, stages, strict=True)
        ranks = [pool.submit(rehearse_rank, setup, plan, stage) for pool, stage in each]
        try:
            return [rank.result() for rank in ranks]
        except BrokenProcessPool:
            raise WorldError(
                "The process of a rehearsed rank was killed; if the machine's memory was full, free some and "
                "start again."
            ) from None
        except DsftError:
            raise
        except Exception as error:  # of an operation that has no values here, as some models need
            raise DsftError(f"a rank could not be rehearsed: {brief(error)}") from error


# --- one rank ---------------------------------------------------------------------------------------------


def rehearse_rank(setup: Setup, plan: Plan, stage: int) -> dict[str, Any]:
    """Rehearse the first rank of a stage, in a process of its own. Return its figures."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    spec = setup.spec
    models = (spec.model, reference_model(spec)) if scores_in_training(spec) else (spec.model,)
    for model in models if setup.cut.stages > 1 else ():
        find_split_points(resolve_config(model, setup.facts))  # computes, so before the rehearsal
        take_census(model, setup.facts)  # so does this
    load_bitsandbytes()  # asks torch for a GPU, so before the rehearsal
    mode = NoMemory(CPU if spec.is_on_cpu else CUDA)
    world = begin(mode, stage * plan.layout.shards, plan.layout, setup.gpu, _trained(plan, setup.cut))
    with mode:
        saved = run_phases(setup, world, mode, NoValues())
    layout, kind = plan.layout, mode.device.type
    beside = WORKSPACE if kind == "cuda" else 0  # which no phase of the plan has
    sizes = spec, layout, plan.hosts, setup.batch.shape.numel()
    planned = with_reference(memory(plan.census, *sizes), plan.reference_census, *sizes)[0].stages[stage]
    phases = {
        name: {
            "seconds": one.seconds, "peak": one.peak[kind], "host": one.peak["cpu"],
            "planned": planned.phase(name) + beside,
            "collectives": [[*key, *counts] for key, counts in sorted(one.collectives.items())],
        }
        for name, one in mode.phases.items()
    }  # fmt: skip
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"stage": stage, "rank": world.rank, "phases": phases, "saved": saved, "resident": resident}
    return found | {"planned_host": planned.offloaded}


def _trained(plan: Plan, cut: Cut) -> dict[int, list[str]]:
    """Return the names of the trained parameters of each stage."""
    return {
        stage: [one.name for one in plan.census.stage(stage, cut) if one.trained]
        for stage in range(cut.stages)
    }


def run_phases(setup: Setup, world: World, meter: Meter, source: Weights | None = None) -> dict[str, int]:
    """Build the engine of a rank, and make a step on the largest micro-batches, an evaluation and what a
    save reads. Return the sizes of the checkpoint's files of this rank. source: of weights; None: fresh
    ones."""
    spec, task = setup.spec, task_of(setup.spec)
    objective = task.objective(spec)
    meter.enter("load")
    dtype, tokens = DTYPES[spec.train.precision], world.layout.part(setup.batch.shape.numel())
    part = Part(world.stage, setup.cut, sharding_for(setup.config, world))
    policy = build_model(spec.model, setup.facts, 0, dtype, part, tokens, source)
    attend(policy.causal_lm, spec.model, spec.data, world.device, exchange_of(world))
    engine = build_engine(policy, spec, setup.config, world, objective)
    fill: Annotate = unchanged
    if scores_in_training(spec):
        fill = live_reference(spec, setup.facts, world, policy, engine, source=source)
    hidden = policy.causal_lm.config.get_text_config().hidden_size
    rows = setup.batch.shape[0]
    meter.begin_training(dtype, (rows, tokens // rows, hidden))
    meter.enter("first_step")
    for _ in range(2):  # a run probes several sizes, and ZeRO 3 prefetches from the second on
        engine.probe(setup.batch)
    counts = {name: 1 for name in ("sequences", *(term.count for term in objective.terms))}
    for _ in range(2):  # only the second is shown: it has moments
        meter.enter("steady")
        engine.step(fill([setup.batch] * setup.number), counts, 1e-3)
    meter.enter("evaluation")
    engine.evaluate(fill([setup.batch]))
    meter.enter("save")
    mine = list(engine.owned_fragments())
    for fragment in mine:
        fragment.data.numel()  # kept no longer, as in a save
    begins, size = header_of(entries_of(mine), METADATA)
    meter.enter("end")
    meter.phases.pop("end")
    return {file_of(world.rank): len(begins) + size}


# --- the report -------------------------------------------------------------------------------------------


def _parts(plan: Plan, result: Mapping[str, Any]) -> Iterator[RenderableType]:
    layout = plan.layout
    model = f"{plan.census.architecture}, {plan.census.numel:,} parameters"
    yield Text(f"{plan.spec.name}: {model}, {layout.world_size} ranks")
    for found in result["kinds"]:
        stage = f", stage {found['stage']} of {layout.pipeline_stages}" if layout.pipeline_stages > 1 else ""
        yield heading(f"rank {found['rank']}{stage}")
        rows, collectives = [], []
        for name, one in found["phases"].items():
            error = one["planned"] / one["peak"] - 1
            sizes = (size_text(one[key], 2) for key in ("peak", "planned"))
            rows.append([NAMES.get(name, name), *sizes, f"{error:+.1%}", f"{one['seconds']:.1f} s"])
            for kind, ranks, calls, size, sent in one["collectives"]:
                figures = (str(ranks), str(calls), size_text(size), size_text(sent))
                collectives.append([NAMES.get(name, name), kind.strip("_"), *figures])
        yield table(["phase", "peak", "plan", "plan's error", "rehearsed in"], rows)
        if host := found["planned_host"]:
            size = size_text(found["phases"]["steady"]["host"], 2)
            yield Text(f"in a step the host's tensors: {size}; by the plan {size_text(host, 2)}")
        yield table(["phase", "collective", "ranks", "calls", "bytes", "sent by a rank"], collectives)
        for file, size in found["saved"].items():
            yield Text(f"checkpoint: {file}, {size_text(size, 2)}")
    sent = max(sum(one[4] for one in kind["phases"]["steady"]["collectives"]) for kind in result["kinds"])
    yield Text(f"\nsent in a step: {size_text(sent)}; by the plan {size_text(result['traffic'])}")
