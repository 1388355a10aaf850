"""Print a plan as text or JSON: the command `dsft plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dsft.plan.build import Plan, build_plan, memory_limits, rank_ranges
from dsft.plan.compare import compare
from dsft.plan.cut import cut_of
from dsft.plan.ds_config import entries
from dsft.plan.ds_entries import ABSENT, ConfigEntry, HostFacts, entries_of_run, nested
from dsft.plan.duration import Duration, duration_lines, steps_line
from dsft.plan.memory.offload import swap_keys, swapped
from dsft.plan.memory.ranks import RankMemory
from dsft.plan.memory.reference import ReferenceMemory
from dsft.plan.memory.sizes import needed
from dsft.plan.mixture import active_line, gather_line
from dsft.plan.reference import (
    has_engine,
    in_stages,
    reference_entries,
    reference_line,
    scores_in_training,
)
from dsft.plan.schedule import batch_scale, scaling_equation
from dsft.plan.show_compare import MEMORY, comparison_mapping, comparison_parts
from dsft.plan.smaller import smaller
from dsft.plan.storage import FP32
from dsft.plan.tables import heading, printed, table
from dsft.plan.traffic import bubble
from dsft.spec.batch import has_wide_gradients
from dsft.spec.load import load_spec
from dsft.spec.patterns import group_of
from dsft.spec.schema import Spec
from dsft.system.disk import size_text

NOT_COUNTED = (
    "Peak memory of a run. Activations, logits and the memory of a GPU's driver are estimates; padding of "
    "flat buffers and the driver's memory on the host are not counted. Each run measures it (memory.json)."
)
SHOWN_RANGES = 16


def print_plan(
    spec_path: Path,
    overrides: Sequence[str],
    *,
    as_json: bool,
    explain: bool,
    comparing: bool,
    world_size: int | None,
    measure: Callable[[Plan], Duration],
) -> None:
    """Plan the spec and print the plan, or the comparison of all layouts on its hosts. The data files are not
    checked, since they may be on another machine. measure: returns what the run takes."""
    plan = build_plan(load_spec(spec_path, overrides, check_files=False), world_size)
    if comparing:
        found, fewer = compare(plan), smaller(plan)
        if as_json:
            print(json.dumps(comparison_mapping(plan, found, fewer), indent=2))
        else:
            print(printed(comparison_parts(plan, found, fewer)), end="")
    elif as_json:
        print(json.dumps(as_mapping(plan, measure(plan)), indent=2))
    else:
        print(printed(parts(plan, measure(plan), explain=explain)), end="")


def as_mapping(plan: Plan, taken: Duration | None = None) -> dict[str, Any]:
    """Return the plan as a mapping for JSON: sizes in bytes and elements, times in seconds or hours, ranges
    inclusive. taken: what the run takes."""
    spec = plan.spec
    return {
        "name": spec.name,
        "world_size": plan.layout.world_size,
        "world_size_assumed": plan.assumed,
        "batch": dataclasses.asdict(plan.batch),
        "max_steps": spec.train.max_steps,
        "learning_rate": spec.optim.learning_rate * batch_scale(spec.optim, plan.batch.global_batch_size),
        "num_train_epochs": spec.train.num_train_epochs,
        "run": taken and taken.as_mapping(),
        "layout": [dataclasses.asdict(ranks) for ranks in rank_ranges(plan.layout, plan.hosts)],
        "model": {
            "architecture": plan.census.architecture,
            "parameters": plan.census.numel,
            "active": plan.census.active,
            "trained": plan.census.trained,
            "layers": plan.census.num_layers,
            "layers_of_stages": cut_of(spec.parallel, plan.census).counts,
        },
        "memory": {
            "per_gpu": _per_gpu(plan.memory.stages),
            "per_host": dict(plan.memory.hosts),
            "not_counted": NOT_COUNTED,
        },
        "recomputation": [dataclasses.asdict(choice) for choice in plan.recomputation],
        "swapped": _swapped(plan),
        "bubble": bubble(plan.layout.pipeline_stages, plan.batch.accumulation_steps),
        "traffic": [dataclasses.asdict(flow) | {"bytes": flow.bytes} for flow in plan.traffic],
        "reference": _reference_mapping(plan),
        "deepspeed": nested(_keys(plan)),
        "reasons": {entry.key: entry.reason for entry in _keys(plan)},
        "warnings": list(plan.warnings),
    }


def _per_gpu(stages: Sequence[RankMemory]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(rank) | {"device": rank.device, "gpu": rank.gpu} for rank in stages]


def _reference_mapping(plan: Plan) -> dict[str, Any] | None:
    """Return the reference's part of the mapping; None if the loss has no reference. Its entry "deepspeed" is
    None if the reference has no DeepSpeed engine of its own."""
    reference = plan.reference
    if reference is None:
        return None
    keys = _reference_keys(plan)
    return {
        "line": reference_line(plan.spec),
        "bytes_per_target": _stored_per_target(plan),
        "per_gpu": _per_gpu(reference.stages),
        "per_host": None if reference.hosts is None else dict(reference.hosts),
        "deepspeed": nested(keys) if keys else None,
        "reasons": {entry.key: entry.reason for entry in keys},
    }


def _stored_per_target(plan: Plan) -> int:
    """Return the bytes of a teacher's store for each target; 0 for a reference of answers, which stores a few
    numbers for each, and for one that scores while the run trains."""
    own = plan.spec.reference
    return 0 if own is None or scores_in_training(plan.spec) else own.teacher_values * FP32


def _reference_keys(plan: Plan) -> tuple[ConfigEntry, ...]:
    """Return the DeepSpeed keys of the reference; none if the policy's engine scores, or a pipeline, which
    runs without DeepSpeed."""
    if not has_engine(plan.spec) or in_stages(plan.spec):
        return ()
    return reference_entries(plan.spec, plan.reference_census.elements)


def parts(plan: Plan, taken: Duration | None = None, *, explain: bool) -> Iterator[RenderableType]:
    """Yield the parts of the output in order; with `explain` also every DeepSpeed key, its value and the
    reason. taken: what the run takes."""
    spec = plan.spec
    yield Text(f"{spec.name}: {spec.task}, {plan.census.architecture}, {plan.census.numel:,} parameters")
    yield from map(Text, active_line(plan.census))
    if plan.census.trained < plan.census.numel:
        share = plan.census.trained / plan.census.numel
        yield Text(f"{plan.census.trained:,} of them ({share:.3%}) are trained, the others frozen.")
    yield from map(Text, [*_quantized(plan), *_groups(plan)])
    if plan.assumed:
        yield Text(
            "The spec has no cluster, so the number of processes is known only when a run starts. This plan "
            f"is for {plan.layout.world_size}; --processes sets another number."
        )
    yield heading("Batch")
    yield Text(plan.batch.equation())
    yield from map(Text, filter(None, [scaling_equation(spec.optim, plan.batch.global_batch_size)]))
    yield heading("Run")
    yield from map(Text, [steps_line(plan)] if taken is None else duration_lines(plan, taken))
    yield heading("Ranks")
    yield from _ranks(plan)
    yield heading("Memory")
    yield _memory(plan, plan.memory.stages, plan.memory.hosts)
    for host, size in _swapped(plan).items():
        yield Text(f"{host} swaps at most {size_text(size)} to its disk (nvme_path); so much must be free.")
    yield from map(Text, _fits(plan))
    if spec.parallel.zero_stage == 3 and plan.layout.shards > 1:
        yield from map(Text, gather_line(plan.census, spec))
    yield Text(NOT_COUNTED)
    yield from _recomputation(plan)
    yield heading("Step")
    stages, micro_batches = plan.layout.pipeline_stages, plan.batch.accumulation_steps
    if stages > 1:
        packed = "; more in a packed step, which has fewer micro-batches" if plan.spec.data.packing else ""
        yield Text(
            f"Bubble: (stages {stages} - 1) ÷ (micro-batches {micro_batches} + stages {stages} - 1) = "
            f"{bubble(stages, micro_batches):.1%} of the step in which a stage waits{packed}"
        )
    yield _traffic(plan)
    yield from map(Text, _less_traffic(plan))
    yield from map(Text, _attention(plan.spec))
    if plan.reference is not None:
        yield heading("Reference")
        yield from _reference(plan, plan.reference)
    if explain:
        yield heading("DeepSpeed")
        yield _entries(_keys(plan))
        yield from _of_run(plan)
        if _reference_keys(plan):
            yield heading("DeepSpeed, of the reference")
            yield _entries(_reference_keys(plan))
    if plan.warnings:
        yield heading("Warnings")
        for warning in plan.warnings:
            yield Text(warning)


def _attention(spec: Spec) -> Iterator[str]:
    """Yield the line on attention of packed rows, if the spec names the device. A run tests what is available
    and reports it."""
    accelerator = spec.accelerator
    if accelerator is None or not spec.data.packing or spec.model.attention != "auto":
        return
    if accelerator.name.lower() == "cpu":
        found = "segment by segment, as FlashAttention needs a GPU"
    elif spec.train.precision == "fp32":
        found = "segment by segment, as FlashAttention does not compute in fp32"
    else:
        found = "FlashAttention in one call (docs/packing.md: not with soft-caps or attention dropout)"
    yield f"Attention of packed rows: {found}"


def _quantized(plan: Plan) -> Iterator[str]:
    """Yield the line on weights that are stored in 4 bits, if there are any."""
    if own := [parameter for parameter in plan.census.parameters if parameter.form != "plain"]:
        size = sum(tensor.bytes for one in own for tensor in one.stored(plan.spec.train.precision))
        numel = sum(parameter.numel for parameter in own)
        yield f"{numel:,} of them are stored in 4 bits ({own[0].form.upper()}): {size_text(size)}."


def _groups(plan: Plan) -> Iterator[str]:
    """Yield a line for each of optim.groups, with the parameters that it matches and no earlier group
    does."""
    optim = plan.spec.optim
    for index, group in enumerate(optim.groups):
        found = [p for p in plan.census.parameters if p.trained and group_of(p.name, optim) == index]
        rate = optim.learning_rate if group.learning_rate is None else group.learning_rate
        decay = "the default" if group.weight_decay is None else f"{group.weight_decay:g}"
        yield (
            f"{group.parameters}: learning rate {rate:g}, weight decay {decay}, for {len(found)} tensors of "
            f"{sum(p.numel for p in found):,} elements"
        )


def _keys(plan: Plan) -> tuple[ConfigEntry, ...]:
    """Return the DeepSpeed keys. If the world size is known only at the start, those that depend on it are
    left out."""
    return entries(plan.spec, None if plan.assumed else plan.batch, HostFacts(plan.census.elements))


def _of_run(plan: Plan) -> Iterator[RenderableType]:
    """Yield the keys of the run's last start, by its folder, whose values are not those of the plan."""
    folder, planned = Path(plan.spec.output_dir, plan.spec.name), {one.key: one.value for one in _keys(plan)}
    other = [one for one in entries_of_run(folder) if planned.get(one.key, ABSENT) != one.value]
    if other:
        yield heading("DeepSpeed, of the run")
        yield Text(f"The run in {folder} was last started with other values of these keys.")
        yield _entries(other)


def _ranks(plan: Plan) -> Iterator[RenderableType]:
    found, stages = rank_ranges(plan.layout, plan.hosts), plan.layout.pipeline_stages
    splits = plan.layout.sequence_parallel > 1
    rows = [
        (
            one.host,
            *map(_range, (one.ranks, one.local_ranks)),
            f"{one.stage} of {stages}",
            *map(_range, (one.data_ranks, *([one.sequence_ranks] if splits else []))),
        )
        for one in found[:SHOWN_RANGES]
    ]
    head = ["host", "ranks", "local ranks", "pipeline stage", "data ranks"]
    yield table([*head, "sequence ranks, of each row's tokens"] if splits else head, rows)
    if len(found) > SHOWN_RANGES:
        yield Text(f"… {len(found) - SHOWN_RANGES} more; --json has all")


def _range(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}-{pair[1]}"


def _memory(plan: Plan, stages: Sequence[RankMemory], hosts: Mapping[str, int] | None) -> RenderableType:
    """Return the table of the bytes of one rank of each stage, and of the hosts with all their processes."""
    rows: list[list[str]] = []
    head = [f"stage {rank.stage}" for rank in stages] if len(stages) > 1 else ["bytes"]
    if len(stages) == plan.layout.pipeline_stages > 1:
        owned = map(cut_of(plan.spec.parallel, plan.census).layers, range(len(stages)))
        rows.append(["layers", *(_range((layers[0], layers[-1])) for layers in owned)])
    for field, label in MEMORY.items():
        sizes = [getattr(rank, field) for rank in stages]
        if any(sizes):
            rows.append([label, *map(size_text, sizes)])
    sizes_of = dict(hosts or {})
    if len(sizes_of) > 1 and len(set(sizes_of.values())) == 1:
        sizes_of = {"": next(iter(sizes_of.values()))}
    for host, size in sizes_of.items():
        label = f"host {host}" if host else "each host"
        rows.append([f"{label}, with its processes", size_text(size), *[""] * (len(stages) - 1)])
    return table(["per GPU", *head], rows)


def _recomputation(plan: Plan) -> Iterator[RenderableType]:
    """Yield the table of what other choices of model.gradient_checkpointing cost, where it is set."""
    if not plan.recomputation:
        return
    yield heading("Gradient checkpointing")
    own = plan.spec.model.gradient_checkpointing
    rows = [
        (
            json.dumps(choice.value) + ("  (this plan)" if choice.value == own else ""),
            str(choice.layers),
            size_text(choice.gpu),
            f"{choice.work - 1:+.0%}",
        )
        for choice in plan.recomputation
    ]
    yield table(("value", "layers", "per GPU", "matrix products"), rows)


def _swapped(plan: Plan) -> dict[str, int]:
    """Return host -> bytes that all its ranks swap to its disk; empty if nothing is swapped."""
    if not swap_keys(plan.spec):
        return {}
    rank = swapped(plan.census, plan.spec, plan.layout.shards)
    return {host: slots * rank.on_disk for host, slots in plan.hosts.items()}


def _fits(plan: Plan) -> Iterator[str]:
    """Yield a line for a GPU and for a host whose memory is known, if the run fits there. If it does not fit,
    there is a warning instead."""
    gpu, host = memory_limits(plan.spec)
    of_gpu = max(rank.gpu for rank in plan.memory.stages)
    if gpu is not None and of_gpu <= gpu:
        yield f"Fits: {size_text(of_gpu)} of the {size_text(gpu)} of a GPU ({of_gpu / gpu:.0%})"
    elif gpu is not None and has_wide_gradients(plan.spec, plan.batch):
        yield (
            "On one GPU parallel.zero_stage: 3 with train.accumulation_steps: 1 takes 16 bytes for each "
            "trained parameter instead of 18, since gradients stay in bf16: "
            f"{size_text(2 * plan.census.trained)} less."
        )
    of_host = max(plan.memory.hosts.values())
    if host is not None and needed(of_host) <= host:
        yield f"Fits: {size_text(of_host)} of the {size_text(host)} of a host, with a tenth to spare"


def _traffic(plan: Plan) -> RenderableType:
    """Return the table of what the busiest rank sends, reads and writes in a step."""
    if not plan.traffic:
        return Text("Ranks exchange nothing.")
    head = ("traffic of a rank, at most", "times per step", "bytes each", "bytes per step", "link")
    rows = [
        (flow.what, str(flow.times), size_text(flow.bytes_each), size_text(flow.bytes), flow.link)
        for flow in plan.traffic
    ]
    return table(head, rows)


def _less_traffic(plan: Plan) -> Iterator[str]:
    """Yield a hint how to reduce traffic if ZeRO 2 or 3 sends gradients between hosts after each micro-batch
    in bf16 training."""
    train, crossing = plan.spec.train, [flow for flow in plan.traffic if flow.link == "between hosts"]
    gradients = next((flow for flow in crossing if flow.what == "gradients"), None)
    if gradients is not None and plan.spec.parallel.zero_stage >= 2 and train.precision == "bf16":
        ways = [] if train.reduce_dtype == "bf16" else ["train.reduce_dtype: bf16 halves their size"]
        ways += ["fewer and larger micro-batches send them less often"] if gradients.times > 1 else []
        if ways:
            yield f"Gradients are sent between hosts after each micro-batch: {', '.join(ways)}."


def _reference(plan: Plan, reference: ReferenceMemory) -> Iterator[RenderableType]:
    """Yield which the reference is, and its memory. Beside the policy its weights are also in the policy's
    table."""
    line = reference_line(plan.spec).removeprefix("reference: ")
    yield Text(f"{line[0].upper()}{line[1:]}.")
    if reference.stages:
        before = f"It scores all {plan.spec.task_kind.unit}s before the policy is loaded."
        if stored := _stored_per_target(plan):
            before += f" Its store takes {stored:,} bytes for each token that is trained on."
        before += " This pass takes at most:"
        yield Text(before if reference.hosts is not None else "While it scores it takes:")
        yield _memory(plan, reference.stages, reference.hosts)


def _entries(found: Sequence[ConfigEntry]) -> RenderableType:
    rows = [(one.key, "-" if one.value is ABSENT else json.dumps(one.value), one.reason) for one in found]
    return table(("key", "value", "reason"), rows, fixed="key")
