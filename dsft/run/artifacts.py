"""Write down how a run was made: its folder, its report, its memory file and the facts in its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dsft.checkpoint.card import origin_of
from dsft.checkpoint.compare import changed_generation
from dsft.checkpoint.export import write_model_folder
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.save import CheckpointState
from dsft.data.sets.load import RunData
from dsft.data.tokenizer.load import keep_tokens
from dsft.dist.world import World
from dsft.model.build import has_frozen
from dsft.plan.ds_entries import ConfigEntry
from dsft.plan.memory.ranks import memory as memory_plan
from dsft.plan.memory.reference import with_reference
from dsft.plan.memory.sizes import with_device
from dsft.plan.reference import has_engine, in_stages, reference_facts
from dsft.plan.schedule import batch_scale, scaling_equation
from dsft.reference.model import config_of
from dsft.report.folder import Provenance, versions, write_folder
from dsft.report.memory import PHASES, MemoryFile, MemoryMeter, Peaks, Phase
from dsft.report.run import Report
from dsft.run.loop import Progress
from dsft.setup.identity import Identity
from dsft.setup.inputs import Inputs
from dsft.setup.job import Job
from dsft.setup.resolve import Resolved
from dsft.spec.load import dump_spec
from dsft.tasks.api import Annotator

SAMPLE_TOKENS = 512
"""Most tokens of a row that the exported tokenizer is compared on."""


def open_report(
    job: Job, config: Mapping[str, Any], loaded: RunData, world: World, last_step: int, step: int
) -> Report:
    is_first, shown = world.rank == 0, shown_config(job, config, loaded)
    report = world.each(lambda: Report.open(job.folder, last_step, step, job.spec, shown, enabled=is_first))
    scaling = scaling_equation(job.spec.optim, job.batch.global_batch_size)
    if scaling is not None:
        report.line(scaling)
    return report


def facts_of(
    job: Job,
    inputs: Inputs,
    compared: Mapping[str, Identity],
    progress: Progress,
    held_out_loss: float | None,
    annotator: Annotator | None,
) -> CheckpointState:
    """Return the facts that a checkpoint stores. compared: `built_from` and `software`, for the fields of
    `CheckpointState` of these names, and `files`, by `dsft.setup.identity.file_digests`."""
    files = compared["files"].get("weights")
    model, is_known = job.spec.model, held_out_loss is not None and math.isfinite(held_out_loss)
    return CheckpointState(
        progress=asdict(progress),
        spec=job.spec.model_dump(mode="json"),
        batch=asdict(job.batch),
        data=inputs.loaded.identity,
        layout=asdict(job.layout) | {"zero_stage": job.spec.parallel.zero_stage},
        versions=versions(),
        held_out_loss=held_out_loss if is_known else None,
        base=files if has_frozen(model) or inputs.around else None,
        built_from=compared["built_from"],
        software=compared["software"],
        new_rows=asdict(inputs.rows) if inputs.rows else None,
        reference=dict(annotator.identity) if annotator else None,
        origin=origin_of(model.name_or_path, files, reference_facts(job.spec)),
    )


def describe(
    job: Job, keys: Sequence[ConfigEntry], inputs: Inputs, start: CheckpointReader | None
) -> list[str]:
    """Write the files in the run's folder that document how it was made, and the files that an export needs
    beside the weights. Return lines to print: one for a token that was added to those that end an answer, one
    where AutoTokenizer would make other tokens, and a warning for each key of generation_config.json that
    differs from `start`, since only the export will have it."""
    spec, account = job.spec, inputs.loaded.account
    by_deepspeed = has_engine(spec) and not in_stages(spec)
    reference = config_of(spec, inputs.facts) if by_deepspeed else None
    hostfile = job.promise.hostfile if job.promise else None
    origin = Provenance(dump_spec(spec), keys, hostfile, job.command, account, reference)
    write_folder(job.folder, origin)
    tokenizer = inputs.tokenizer
    stops = write_model_folder(
        job.model_folder, inputs.config, tokenizer, job.spec.model.name_or_path, inputs.turn_end
    )
    lines = list(changed_generation(start, job.model_folder)) if start is not None else []
    if stops:
        names = [str(tokenizer.convert_ids_to_tokens(stop)) for stop in stops]
        listed = " and ".join(f"{name!r} ({stop})" for name, stop in zip(names, stops, strict=True))
        lines.append(
            f"export: answers end with {names[0]!r}, so generation_config.json stops at it too: eos_token_id "
            f"{listed}"
        )
    rows = (row.input_ids[:SAMPLE_TOKENS].tolist() for row in inputs.sample())
    return [*lines, *keep_tokens(tokenizer, job.model_folder, rows)]


def shown_config(job: Job, config: Mapping[str, Any], loaded: RunData) -> dict[str, Any]:
    """Return the config that Weights & Biases shows for the run: the spec, with the ledger of the rows under
    `data`, and the DeepSpeed configuration, versions and batch sizes."""
    spec = job.spec.model_dump(mode="json")
    return spec | {
        "data": spec["data"] | {"ledger": loaded.account},
        "deepspeed": dict(config),
        "versions": versions(),
        "batch": asdict(job.batch),
        "batch_scale": batch_scale(job.spec.optim, job.batch.global_batch_size),
    }


def open_memory(resolved: Resolved, job: Job, tokens: int, world: World) -> MemoryFile:
    """Open the memory file, which shows the planned bytes of the fullest rank beside the measured ones.
    tokens: of one micro-batch."""
    counted, on_gpu = resolved.counted, world.device.type != "cpu"
    spec = with_device(resolved.spec, world.device.type, world.places[world.rank].device.memory)
    alone = memory_plan(counted, spec, job.layout, {}, tokens)
    ranks = with_reference(alone, counted, spec, job.layout, {}, tokens)[0].stages
    figures: dict[Phase, Peaks] = {}
    for phase in PHASES:
        if on_gpu:
            figures[phase] = {
                "device_allocated": max(rank.phase(phase) for rank in ranks),
                "host_rss": max(rank.offloaded for rank in ranks),
            }
        else:
            figures[phase] = {
                "host_rss": max(rank.phase(phase) + rank.offloaded + rank.retained for rank in ranks)
            }
    folder = job.folder if world.rank == 0 else None
    return MemoryFile(folder, MemoryMeter(world.device), world.gather, figures)
