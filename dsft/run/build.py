"""Build what a run needs before its first step: this rank's part of the model, its engine and what annotates
its micro-batches. Write down how the run was made, and what an export needs beside the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsft.checkpoint.compare import changed_generation
from dsft.checkpoint.export import read_model_files, write_model_folder
from dsft.checkpoint.tensors import write_beside, write_names
from dsft.data.tokenizer.load import keep_tokens
from dsft.dist.sequence import exchange_of
from dsft.engine.build import build_engine
from dsft.engine.partition import sharding_for, share_buffers
from dsft.model.attention import attend
from dsft.model.build import Part, build_model, switch_off_dropout
from dsft.model.conversion import persistent_buffers, renames
from dsft.model.experts import described, left_out
from dsft.model.files import tensor_names
from dsft.model.policy import Policy
from dsft.model.weights import DTYPES
from dsft.plan.ds_entries import ConfigEntry
from dsft.plan.reference import has_engine, in_stages
from dsft.reference.model import config_of
from dsft.report.folder import Provenance, write_folder
from dsft.report.memory import MemoryFile
from dsft.setup.inputs import Inputs
from dsft.setup.resolve import Plan
from dsft.setup.run import Run
from dsft.spec.load import dump_spec
from dsft.spec.rules import warnings
from dsft.spec.schema import Reference
from dsft.system.process import is_verbose
from dsft.tasks.api import Model, Task

SAMPLE_TOKENS = 512
"""Most tokens of a row that the exported tokenizer is compared on."""


def build(run: Run, inputs: Inputs, plan: Plan, memory: MemoryFile, task: Task) -> Model:
    """Build the model from fresh or pretrained weights, its engine and its annotator. A collective."""
    run = replace(run, spec=plan.spec)
    spec, world = run.spec, run.world
    objective = task.objective(spec)
    prepared = task.before_policy(run, inputs, memory)
    memory.enter("load")
    dtype = DTYPES[spec.train.precision]
    sharding, exchange = sharding_for(plan.config, world), exchange_of(world)

    switched_off: list[str] = []
    notes: list[str] = []
    attention: list[str] = []

    def build_part() -> Policy:
        mine = Part(world.stage, plan.cut, sharding)
        policy = build_model(spec.model, inputs.facts, spec.train.seed, dtype, mine, plan.tokens)
        known = warnings(spec)  # printed before the imports
        lines = [*described(policy.causal_lm), *filter(None, [policy.kernels])]
        notes.extend(line for line in lines if line not in known)
        if spec.model.lora is not None:
            notes.extend(left_out(policy.causal_lm))
        if isinstance(spec.of_task, Reference) and spec.of_task.is_initial_policy:
            switched_off.extend(switch_off_dropout(policy.causal_lm))
        attention.append(attend(policy.causal_lm, spec.model, spec.data, world.device, exchange))
        return policy

    policy = world.each(build_part)
    share_buffers(policy.causal_lm, world)
    if switched_off:
        run.log(
            f"dropout: {' and '.join(switched_off)} set to 0, since policy and reference are compared "
            "without dropout"
        )
    for line in sorted({line for lines in world.gather(notes) for line in lines}, reverse=True):
        run.log(line)
    for line in sorted({line for lines in world.gather(attention) for line in lines if line}):
        if is_verbose():
            run.log(line)
    files = write_model_files(run, policy)
    engine = build_engine(policy, spec, plan.config, world, objective)
    annotator = task.annotator(run, inputs, policy, engine, prepared)
    return Model(policy, engine, objective, annotator, plan, memory, files)


def write_model_files(run: Run, policy: Policy) -> dict[str, bytes]:
    """Write what an export needs of the model beside its parameters into the run's model folder: tensors of
    all stages, and the names in the files that it was read from. Return the folder's files on rank 0. A
    collective."""
    world, name = run.world, run.spec.model.name_or_path
    files: dict[str, bytes] = {}
    buffers = {n: b for stage in world.gather(persistent_buffers(policy.causal_lm)) for n, b in stage.items()}

    def write() -> None:
        write_beside(run.model_folder, buffers)
        if name is not None and renames(policy.causal_lm):
            if names := tensor_names(name):  # none where the files are pickled
                write_names(run.model_folder, names)
        files.update(read_model_files(run.model_folder))

    world.first(write)
    return files


def describe(run: Run, inputs: Inputs, keys: Sequence[ConfigEntry]) -> list[str]:
    """Write the files in the run's folder that document how it was made, and the files that an export needs
    beside the weights. Return lines to print: one for a token that was added to those that end an answer, one
    where AutoTokenizer would make other tokens, and a warning for each key of generation_config.json that
    differs from the run's start, since only the export will have it."""
    spec, account = run.spec, inputs.loaded.account
    by_deepspeed = has_engine(spec) and not in_stages(spec)
    reference = config_of(spec, inputs.facts) if by_deepspeed else None
    hostfile = run.promise.hostfile if run.promise else None
    origin = Provenance(dump_spec(spec), keys, hostfile, run.command, account, reference)
    write_folder(run.folder, origin)
    tokenizer = inputs.tokenizer
    stops = write_model_folder(
        run.model_folder, inputs.config, tokenizer, run.spec.model.name_or_path, inputs.turn_end
    )
    lines = list(changed_generation(run.start, run.model_folder)) if run.start is not None else []
    if stops:
        names = [str(tokenizer.convert_ids_to_tokens(stop)) for stop in stops]
        listed = " and ".join(f"{name!r} ({stop})" for name, stop in zip(names, stops, strict=True))
        lines.append(
            f"export: answers end with {names[0]!r}, so generation_config.json stops at it too: eos_token_id "
            f"{listed}"
        )
    rows = (row.input_ids[:SAMPLE_TOKENS].tolist() for row in inputs.sample())
    return [*lines, *keep_tokens(tokenizer, run.model_folder, rows)]
