"""One run on one rank, from the process group to the exported model: the story that `train.py` starts.

Takes a checked spec with its batch sizes and DeepSpeed configuration. Every rank tells the same story; what
one must do alone (the run's folder, printed lines, the export) rank 0 does, and all agree on how that went.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from dsft.checkpoint.card import origin_of
from dsft.checkpoint.compare import check_same_base, check_same_rows, check_same_run
from dsft.checkpoint.export import write_beside, write_model_folder
from dsft.checkpoint.lock import hold
from dsft.checkpoint.read import Checkpoint, find, step_folder
from dsft.checkpoint.retain import Retention
from dsft.checkpoint.save import Facts, save
from dsft.data.sets.load import Loaded
from dsft.data.steps.ahead import ahead
from dsft.data.steps.steps import Laid, TrainSteps, evaluation
from dsft.ending import finish
from dsft.engine.api import Engine, LossScale
from dsft.engine.build import build_engine
from dsft.engine.partition import keep_for
from dsft.engine.proof import prove_head, prove_packing
from dsft.engine.start import check_precision
from dsft.engine.world import World, join
from dsft.errors import DsftError, StorageError, WorldError
from dsft.inputs import Inputs, longest, read_inputs
from dsft.launch.environment import Launched
from dsft.loop import Progress, Record, Run, Schedule, evaluation_record, fit
from dsft.model.attention import attend_per_segment
from dsft.model.build import build_model, check_trainable, has_frozen
from dsft.model.census import take_census
from dsft.model.dropout import switch_off_dropout
from dsft.model.names import kept_beside
from dsft.model.policy import Policy
from dsft.objective.api import Objective
from dsft.objective.next_token import next_token
from dsft.objective.preference import preference
from dsft.plan.batch import BatchSizes
from dsft.plan.census import Census, census_from
from dsft.plan.ds_config import Elements, bucket_sizes, sized
from dsft.plan.flops import peak_tflops, work
from dsft.plan.layout import Layout
from dsft.plan.memory import memory as memory_plan
from dsft.plan.reference import dpo_of, has_engine, in_stages, reference_facts
from dsft.plan.reference_memory import with_reference
from dsft.plan.schedule import batch_scale, learning_rate, scaling_equation, total_steps
from dsft.reference.adapter import adapter_off
from dsft.reference.check import FEW, check_start
from dsft.reference.check import Start as FirstStep
from dsft.reference.evaluate import PairSet, pair_evaluation
from dsft.reference.model import config_of
from dsft.reference.recheck import random_pairs
from dsft.reference.source import Source, Start, as_it_is, of_zeros, source_of, store_of
from dsft.rehearsal import rehearse
from dsft.report.folder import Origin, versions, write_folder
from dsft.report.jsonl import storage_error
from dsft.report.memory import PHASES, MemoryMeter, Peaks, Phase
from dsft.report.memory_file import MemoryFile
from dsft.report.profile import StepTrace, traced_step
from dsft.report.run import Report
from dsft.report.sinks import check_installed
from dsft.spec.load import dump_spec
from dsft.spec.schema import Spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Say = Callable[[str], None]
Trace = Callable[[int], AbstractContextManager[object]]
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is known before torch is imported. notes: how the configuration came about, a line each;
    hostfile: the text of the launcher's, None without one; command: argv; kept: the keys of zero_optimization
    that a DeepSpeed JSON of the user's decides; profile: the step to trace, 0 for one of dsft's choice."""

    spec: Spec
    batch: BatchSizes
    config: Mapping[str, Any]
    notes: Sequence[str]
    launched: Launched
    layout: Layout
    hostfile: str | None
    command: Sequence[str]
    kept: frozenset[str] = frozenset()
    profile: int | None = None

    @property
    def folder(self) -> Path:
        return Path(self.spec.output_dir, self.spec.name)

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"


def run(job: Job) -> None:
    """Train, from the newest whole checkpoint where there is one, and export. Raises DsftError."""
    spec = job.spec
    world = join(job.launched, job.layout)
    say: Say = (lambda text: print(text, flush=True)) if world.rank == 0 else (lambda text: None)
    with ExitStack() as held:
        prove_same("the spec or the DeepSpeed JSON", [spec.model_dump(mode="json"), dict(job.config)], world)
        world.each(lambda: check_precision(spec.train.precision))
        world.first(lambda: check_installed(spec))
        world.first(lambda: take_folder(job.folder, held))
        prove_shared(job.folder, world)
        for line in (*job.notes, f"batch: {job.batch.equation()}"):
            say(line)
        start = resume_point(job, world, say)
        progress = Progress(**start.state["progress"]) if start else Progress()
        # Where the spec says how many steps there are, no row need be read to see that all are done.
        done = progress.step >= (spec.train.max_steps or math.inf)
        saved = None if done else train(job, world, start, progress, say)
        if saved is None:
            assert start is not None, "a run has at least one step"
            saved = start.path
            say(
                f"{spec.name} is finished at step {progress.step}; train.max_steps or train.num_train_epochs "
                "gives it more."
            )
        world.close()
        if world.rank == 0:  # alone, and for as long as a large model takes
            finish(spec, job.folder, saved, say)


def take_folder(folder: Path, held: ExitStack) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"output_dir: {folder} cannot be made ({error.strerror}); set another output_dir."
        ) from None
    held.enter_context(hold(folder))


def prove_shared(folder: Path, world: World) -> None:
    """Every rank must see the file that rank 0 writes: a checkpoint is one folder with a part from each."""
    path = folder / ".shared"
    nonce = world.first(lambda: _written(path, secrets.token_hex(8)))
    blind = [rank for rank, seen in enumerate(world.gather(_read(path))) if seen != nonce]
    if blind:
        raise WorldError(
            f"output_dir: {folder} is not the same folder on rank(s) {blind} as on rank 0; put output_dir "
            "on a disk that all hosts share."
        )


def _written(path: Path, text: str) -> str:
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise storage_error(path, error) from None
    return text


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def prove_same(what: str, mine: Any, world: World) -> None:
    """Every rank must have read the same from its host's disk: else each would train another run, and hang
    where they count other micro-batches. `mine`: JSON values."""
    digests = world.gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise WorldError(
            f"{what} is not the same on rank(s) {others} as on rank 0; give all hosts the same files, or put "
            "them on a disk that all hosts share."
        )


def resume_point(job: Job, world: World, say: Say) -> Checkpoint | None:
    """The checkpoint that checkpoint.resume names, verified by rank 0, of a run with this very spec."""

    def choose() -> Path | None:
        found = find(job.folder, job.spec.checkpoint.resume)
        for note in found.notes:
            say(f"warning: {note}")
        if found.path is not None:
            check_same_run(Checkpoint.open(found.path), job.spec, job.batch, None)
        return found.path

    path = world.first(choose)
    return world.each(lambda: Checkpoint.open(path)) if path else None


def train(job: Job, world: World, start: Checkpoint | None, progress: Progress, say: Say) -> Path | None:
    """Build the engine, bring it to `progress`, and go on to the last step. The checkpoint of its end; None
    where no step is left."""
    spec, folder = job.spec, job.folder
    inputs = world.each(lambda: read_inputs(spec, say, first=world.rank == 0))
    rows = [data.fingerprint for data in (inputs.train, *(held_out.data for held_out in inputs.held_out))]
    prove_same("what is read from data.train and data.eval", rows, world)
    last_step = total_steps(spec.train, len(inputs.train), job.batch.global_batch_size)
    if start is not None:
        check_same_run(start, spec, job.batch, inputs.loaded.identity)
        check_same_base(start, inputs.files)
        check_same_rows(start, asdict(inputs.rows) if inputs.rows else None)
    if progress.step >= last_step:
        return None
    traced = None if job.profile is None else traced_step(job.profile or None, progress.step + 1, last_step)
    counted = world.first(lambda: counted_model(job, inputs))
    for line in untrained_rows(job, inputs, counted):
        say(line)
    job = sized_job(job, counted, say)
    world.first(lambda: describe(job, inputs))
    largest = longest(inputs, job.batch, spec.train, last_step)
    figures = planned(job, counted, largest[0].input_ids.numel(), on_gpu=world.device.type != "cpu")
    memory = MemoryFile(folder if world.rank == 0 else None, MemoryMeter(world.device), world.gather, figures)
    objective = objective_of(spec)
    built = build(job, inputs, world, objective, Start(folder, start, say))
    engine, reference = built.engine, built.reference
    rehearse(engine, of_zeros(largest[0]), largest[1] and of_zeros(largest[1]), memory.meter)
    memory.enter("load")
    say(
        bring_to(engine, start, progress, world)
        if start
        else f"starting at step 0: {folder} has no checkpoint"
    )
    for line in prove(job, inputs, world, built, fresh=start is None):
        say(line)
    report = open_report(job, inputs.loaded, world, last_step, progress.step)
    latest: Record = {}

    def tell(record: Record) -> None:
        latest.update(record)
        report.metrics(record | memory.record())

    retention = Retention(spec.checkpoint.keep_last, spec.checkpoint.keep_best)

    def keep(progress: Progress, held_out_loss: float | None) -> None:
        proof = reference.unchanged.proof(world) if reference and progress.step == last_step else None
        facts = facts_of(job, inputs, progress, held_out_loss, reference, unchanged=isinstance(proof, str))
        fragments, shapes = engine.owned(), engine.shapes()
        report.line(
            save(folder, fragments, shapes, facts, world, model_folder=job.model_folder, retention=retention)
        )
        tell_proof(proof, report.line)

    steps = train_steps(job, inputs, world)
    evaluate = held_out_evaluation(job, inputs, world, engine, objective, reference)
    hooks = Run(
        world.sum,
        during("evaluation", evaluate, memory) if evaluate else None,
        tell,
        during("save", keep, memory),
        world.world_size,
        world.rank,
        mfu_of(job, inputs, counted, world),
        trace_of(job, traced, world, report.line),
        reference.now if reference else as_it_is,
    )
    memory.enter("steady")
    try:
        with ahead(steps, last_step, world.device, reference.ahead if reference else as_it_is) as soon:
            end = fit(engine, objective, soon, schedule(spec, last_step, job.batch), hooks, progress)
    finally:
        report.close(latest | memory.record() | inputs.loaded.summary)
    return step_folder(folder, end.step)


def tell_proof(proof: str | DsftError | None, say: Say) -> None:
    """Raises it where it is an error."""
    if isinstance(proof, DsftError):
        raise proof
    if proof is not None:
        say(proof)


def open_report(job: Job, loaded: Loaded, world: World, last_step: int, step: int) -> Report:
    is_first, shown = world.rank == 0, shown_config(job, loaded)
    report = world.each(lambda: Report.open(job.folder, last_step, step, job.spec, shown, enabled=is_first))
    scaling = scaling_equation(job.spec.optim, job.batch.global_batch_size)
    if scaling is not None:
        report.line(scaling)
    return report


def counted_model(job: Job, inputs: Inputs) -> Census:
    return census_from(take_census(job.spec.model, job.layout.pipeline_stages, inputs.facts))


def untrained_rows(job: Job, inputs: Inputs, counted: Census) -> Iterator[str]:
    """A warning where embeddings with new rows are frozen: they stay the mean."""
    if inputs.rows is None:
        return
    size = inputs.config.get_text_config().vocab_size
    frozen = [p for p in counted.parameters if p.layer is None and p.shape[0] == size and not p.trained]
    modules = [n.rsplit(".", 2)[-2] for p in frozen for n in (p.name, *p.aliases)]
    if frozen:
        key = "model.lora.modules_to_save" if job.spec.model.lora else "model.trainable"
        named = modules if job.spec.model.lora else [p.name for p in frozen]
        yield (
            f"warning: the new rows of {' and '.join(p.name for p in frozen)} stay the mean, since these are "
            f"not trained; {key}: [{', '.join(named)}] trains them"
        )


def sized_job(job: Job, counted: Census, say: Say) -> Job:
    """With bucket sizes by the model's. A line for each that a DeepSpeed JSON decides otherwise."""
    elements = Elements(counted.numel, counted.trained)
    for key, size in bucket_sizes(elements):
        given = job.config["zero_optimization"].get(key)
        if key in job.kept and given != size:
            say(f"{key}: the DeepSpeed JSON's {given:,} is used; the model's size would give {size:,}")
    return replace(job, config=sized(job.config, elements, job.kept))


def during(phase: Phase, work: Callable[P, T], memory: MemoryFile) -> Callable[P, T]:
    """`work`, whose memory counts under `phase`."""

    def measured(*args: P.args, **kwargs: P.kwargs) -> T:
        memory.enter(phase)
        result = work(*args, **kwargs)
        memory.enter("steady")
        return result

    return measured


def planned(job: Job, counted: Census, tokens: int, on_gpu: bool) -> dict[Phase, Peaks]:
    """The plan's bytes of the fullest rank, for micro-batches of so many tokens."""
    alone = memory_plan(counted, job.spec, job.layout, {}, tokens)
    ranks = with_reference(alone, counted, job.spec, job.layout, {}, tokens)[0].stages
    figures: dict[Phase, Peaks] = {}
    for phase in PHASES:
        if on_gpu:
            figures[phase] = {
                "device_allocated": max(rank.phase(phase) for rank in ranks),
                "host_rss": max(rank.offloaded for rank in ranks),
            }
        else:
            figures[phase] = {"host_rss": max(rank.phase(phase) + rank.offloaded for rank in ranks)}
    return figures


def mfu_of(
    job: Job, inputs: Inputs, counted: Census, world: World
) -> Callable[[int, int, float], float] | None:
    """None on a CPU, in fp32 and on a GPU that is not in the table, unless the spec names the peak."""
    accelerator = job.spec.cluster.accelerator if job.spec.cluster else None
    peak = accelerator.peak_tflops if accelerator else None
    if peak is None and world.device.type == "cuda" and job.spec.train.precision != "fp32":
        peak = peak_tflops(torch.cuda.get_device_name(world.device))
    if peak is None or world.device.type == "cpu":
        return None
    config: Any = inputs.config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return partial(work(counted, width).mfu, peak_tflops=peak * world.world_size)


def trace_of(job: Job, traced: int | None, world: World, say: Say) -> Trace:
    """Of the step that `--profile` asks for, on rank 0."""
    if traced is None or world.rank != 0:
        return lambda step: nullcontext()
    return StepTrace(job.folder, traced, say)


def objective_of(spec: Spec) -> Objective:
    """sft and pretraining differ in their data alone."""
    return preference(dpo_of(spec)) if spec.task == "dpo" else next_token()


@dataclass(frozen=True)
class Built:
    """This rank's part of the model, its engine, and the reference where the objective has one."""

    policy: Policy
    engine: Engine
    reference: Source | None = None


def build(job: Job, inputs: Inputs, world: World, objective: Objective, start: Start) -> Built:
    """From fresh or pretrained values. A reference's stored values are there before the model is."""
    spec = job.spec
    dtype, stages = DTYPES[spec.train.precision], job.layout.pipeline_stages
    keep = keep_for(job.config, world)
    if inputs.files is not None:
        prove_same(f"model.name_or_path {spec.model.name_or_path!r}", inputs.files, world)
    has_store = objective.needs_reference and dpo_of(spec).reference == "precomputed"
    size = job.batch.micro_batch_size
    stored = store_of(spec, inputs, world, job.launched, size, start) if has_store else None

    switched_off: list[str] = []

    def part() -> Policy:
        policy = build_model(spec.model, inputs.facts, spec.train.seed, dtype, world.stage, stages, keep)
        check_trainable(policy.causal_lm)
        if spec.task == "dpo":
            switched_off.extend(switch_off_dropout(policy.causal_lm))
        if spec.data.packing:
            attend_per_segment(policy.causal_lm, spec.model.attention, spec.data.max_length)
        return policy

    policy = world.each(part)
    if switched_off:
        start.say(f"dropout: {' and '.join(switched_off)} set to 0, as a policy with dropout is no reference")
    world.first(lambda: write_beside(job.model_folder, kept_beside(policy.causal_lm)))
    engine = build_engine(policy, spec, job.config, world, objective)
    if not objective.needs_reference:
        return Built(policy, engine)
    return Built(policy, engine, source_of(spec, inputs, world, policy, engine, stored, start))


def bring_to(engine: Engine, start: Checkpoint, progress: Progress, world: World) -> str:
    """Give the engine the checkpoint's state; a line that says so."""
    world.each(lambda: engine.load(start.read, progress.applied_steps))
    if progress.loss_scale is not None:
        engine.set_loss_scale(LossScale(progress.loss_scale, progress.loss_scale_steps))
    return f"going on from step {progress.step}: {start.path}"


def prove(job: Job, inputs: Inputs, world: World, built: Built, *, fresh: bool) -> Iterator[str]:
    """What must hold on real rows before anything is trained, a line each. fresh: no step is done."""
    spec, policy, engine = job.spec, built.policy, built.engine
    yield prove_head(engine, policy, inputs.train, world, inputs.pad_id)
    if spec.data.packing:
        yield prove_packing(engine, policy, inputs.train, world, spec.train.precision, inputs.pad_id)
    if built.reference and fresh and dpo_of(spec).reference_model is None:
        yield prove_start(job, inputs, world, built, built.reference)


def prove_start(job: Job, inputs: Inputs, world: World, built: Built, reference: Source) -> str:
    """That a policy that has learned nothing is its reference, on pairs of the first step, and of a store on
    random ones too, other ones at each start."""
    spec, policy, pad = job.spec, built.policy, inputs.pad_id
    looked_at = train_steps(job, inputs, world).step(0).micro_batches[:FEW]
    if reference.is_stored:
        ids = world.broadcast(random_pairs(len(inputs.train), dpo_of(spec).recheck_rows))
        looked_at += tuple(Laid(inputs.train, ids, job.batch, world.data_rank, pad)) if len(ids) else ()
    micro_batches = reference.refers[0](looked_at)
    # Not under ZeRO 3, where every pass must use the modules that the last one did.
    bare = partial(adapter_off, policy) if spec.model.lora and spec.parallel.zero_stage < 3 else None
    first = FirstStep(dpo_of(spec), inputs.train, micro_batches, pad, bare)
    return check_start(first, built.engine, policy, world)


def train_steps(job: Job, inputs: Inputs, world: World) -> TrainSteps:
    train = job.spec.train
    return TrainSteps(
        inputs.train, job.batch, world.data_rank, train.seed, inputs.pad_id, train.neftune_alpha
    )


def schedule(spec: Spec, last_step: int, batch: BatchSizes) -> Schedule:
    scale = batch_scale(spec.optim, batch.global_batch_size)
    return Schedule(
        total_steps=last_step,
        log_every=spec.train.log_every,
        eval_every=spec.train.eval_every,
        save_every=spec.checkpoint.every,
        learning_rate=lambda step: scale * learning_rate(spec.optim, step, last_step),
        max_nonfinite_in_a_row=spec.train.max_consecutive_nonfinite,
        seed=spec.train.seed,
        evaluate_saved=spec.checkpoint.keep_best is not None,
        evaluate_first=spec.train.eval_on_start,
    )


def facts_of(
    job: Job,
    inputs: Inputs,
    progress: Progress,
    held_out_loss: float | None,
    reference: Source | None,
    *,
    unchanged: bool,
) -> Facts:
    """unchanged: whether the reference was shown to be what it was at the start."""
    model, is_known = job.spec.model, held_out_loss is not None and math.isfinite(held_out_loss)
    return Facts(
        progress=asdict(progress),
        spec=job.spec.model_dump(mode="json"),
        batch=asdict(job.batch),
        data=inputs.loaded.identity,
        layout=asdict(job.layout) | {"zero_stage": job.spec.parallel.zero_stage},
        versions=versions(),
        held_out_loss=held_out_loss if is_known else None,
        base=inputs.files if has_frozen(model) else None,
        new_rows=asdict(inputs.rows) if inputs.rows else None,
        reference=reference.memory if reference else None,
        origin=origin_of(model.name_or_path, inputs.files, reference_facts(job.spec, unchanged=unchanged)),
    )


def held_out_evaluation(
    job: Job, inputs: Inputs, world: World, engine: Engine, objective: Objective, reference: Source | None
) -> Callable[[int], Record] | None:
    """step -> metrics; None where nothing is held out."""
    if not inputs.held_out:
        return None
    if objective.of_answers is not None:
        refers = reference.refers[1:] if reference else [None] * len(inputs.held_out)
        sets = [
            PairSet(one, *evaluation(one.data, job.batch, world.data_rank, inputs.pad_id), refer)
            for one, refer in zip(inputs.held_out, refers, strict=True)
        ]
        return pair_evaluation(sets, objective, dpo_of(job.spec), engine, world, job.folder)
    names = [held_out.name for held_out in inputs.held_out]
    dealt = [evaluation(one.data, job.batch, world.data_rank, inputs.pad_id) for one in inputs.held_out]
    counts = [count for _, count in dealt]

    def evaluate(step: int) -> Record:
        sums = [engine.evaluate(micro_batches) for micro_batches, _ in dealt]
        return evaluation_record(objective, world.sum(torch.stack(sums)), counts, names)

    return evaluate


def describe(job: Job, inputs: Inputs) -> None:
    """What the run's folder says of how it was made, and what an export needs beside the weights."""
    spec, account = job.spec, inputs.loaded.account
    by_deepspeed = has_engine(spec) and not in_stages(spec)
    reference = config_of(spec, inputs.facts) if by_deepspeed else None
    origin = Origin(dump_spec(spec), job.config, job.hostfile, job.command, account, reference)
    write_folder(job.folder, origin)
    write_model_folder(job.model_folder, inputs.config, inputs.tokenizer, job.spec.model.name_or_path)


def shown_config(job: Job, loaded: Loaded) -> dict[str, Any]:
    """What Weights & Biases shows of the run; `data` has the account of the rows beside the spec's keys."""
    spec = job.spec.model_dump(mode="json")
    return spec | {
        "data": spec["data"] | {"ledger": loaded.account},
        "deepspeed": dict(job.config),
        "versions": versions(),
        "batch": asdict(job.batch),
        "batch_scale": batch_scale(job.spec.optim, job.batch.global_batch_size),
    }
