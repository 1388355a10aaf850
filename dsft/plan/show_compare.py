"""Format the comparison of a run's layouts as text or JSON, for `dsft plan --compare`."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from dsft.plan.build import GPU_MEMORY, HOST_MEMORY, Plan, memory_limits
from dsft.plan.compare import ROOMY, Candidate, Comparison, LayoutKeys, LongestRow, Size
from dsft.plan.cost import assumed
from dsft.plan.mixture import active_line, gather_line
from dsft.plan.smaller import Smaller
from dsft.plan.tables import heading, table
from dsft.spec.batch import BatchSizes
from dsft.spec.document import dotted
from dsft.spec.findings import Finding
from dsft.system.disk import size_text

_VALUES = re.compile(r"\d+|'[^']*'")  # the values in a rule's message; its other words are always the same

MEMORY = {
    "parameters": "parameters",
    "copies": "second copies of the parameters",
    "reference": "reference",
    "gradients": "gradients",
    "master": "fp32 weights",
    "moments": "optimizer states",
    "buffers": "buffers and copies",
    "activations": "activations, about",
    "head": "logits, about",
    "beside": "driver and fragments, about",
    "gpu": "total",
    "offloaded": "in the host's memory",
    "retained": "freed, but retained by malloc",
}
"""Field of RankMemory -> its name in tables."""

SHOWN, FEWER = 8, 3  # layouts per table; --json has all


def comparison_mapping(plan: Plan, found: Comparison, fewer: Smaller | None = None) -> dict[str, Any]:
    """Return the comparison as a mapping for JSON: sizes in bytes, times in seconds; candidates in the order
    to try them, with every micro-batch size that was evaluated. fewer: what fits with fewer bits."""
    verdicts = (("fits", found.fitting), ("too large", found.too_large), ("refused", found.refused))
    return {
        "name": plan.spec.name,
        "global_batch_size": plan.batch.global_batch_size,
        "world_size": plan.layout.world_size,
        "limits": dict(zip(("device", "host"), memory_limits(plan.spec), strict=True)),
        "assumed": assumed(plan.spec),
        "advice": list(found.advice.overrides) if found.advice else None,
        "candidates": [_mapping(one, verdict) for verdict, group in verdicts for one in group],
        "with_fewer_bits": fewer
        and {
            "change": fewer.change,
            "refused": fewer.refused,
            "candidates": [_mapping(one, "fits") for one in fewer.fitting],
        },
        "longest_rows": [dataclasses.asdict(row) for row in found.longest],
    }


def _mapping(candidate: Candidate, verdict: str) -> dict[str, Any]:
    best = candidate.best
    return {
        "verdict": verdict,
        "layout": dataclasses.asdict(candidate.keys),
        "overrides": list(candidate.overrides),
        "warnings": list(candidate.warnings),
        "micro_batch_size": best.batch.micro_batch_size if best else None,
        "sizes": [
            {
                "micro_batch_size": size.batch.micro_batch_size,
                "accumulation_steps": size.batch.accumulation_steps,
                "per_gpu": size.device,
                "per_host": dict(size.memory.hosts),
                "tight": size.is_tight,
                "over": [dataclasses.asdict(over) for over in size.over],
                "bubble": size.bubble,
                "traffic": [dataclasses.asdict(flow) | {"bytes": flow.bytes} for flow in size.traffic],
                "seconds": size.cost.seconds,
                "of_which": dataclasses.asdict(size.cost),
            }
            for size in candidate.sizes
        ],
        "refused": [_reason(finding) for finding in candidate.refused],
    }


def comparison_parts(plan: Plan, found: Comparison, fewer: Smaller | None = None) -> Iterator[RenderableType]:
    """Yield the parts of the output in order. fewer: what fits with fewer bits."""
    ranks, hosts = plan.layout.world_size, len(plan.hosts)
    yield Text(
        f"{plan.spec.name}: {plan.batch.global_batch_size} examples a step on {ranks} "
        f"rank{'s' * (ranks > 1)} of {hosts} host{'s' * (hosts > 1)}, {plan.census.numel:,} parameters"
    )
    yield from map(Text, active_line(plan.census))
    keys = ((GPU_MEMORY, "GPU"), (HOST_MEMORY, "host"))
    for limit, (key, place) in zip(memory_limits(plan.spec), keys, strict=True):
        if limit is not None:
            yield Text(f"Memory of a {place}: {size_text(limit)} ({key})")
        elif not (place == "GPU" and plan.spec.is_on_cpu):
            yield Text(f"{key} is not set, so no layout is too large for a {place}; set it")
    yield heading("Advice")
    yield from map(Text, _advice(plan, found))
    if found.fitting:
        yield heading("What fits, in the order to try it")
        yield _fitting(found.fitting[:SHOWN])
        if any(one.best is not None and one.best.is_tight for one in found.fitting):
            yield Text(f"Tight: over {ROOMY:.0%} of the memory of a GPU or a host.")
        yield from _more(found.fitting)
        speeds = assumed(plan.spec)
        links = ", ".join(f"{link} {speed / 1e9:g} GB/s" for link, speed in speeds["links"].items())
        yield Text(
            "The times of a step rank the layouts; they are no forecast. They assume "
            f"{speeds['reached']:.0%} of {speeds['tflops']:g} TFLOP/s, {links}, and no overlap. Waiting: "
            "for other pipeline stages, for traffic, and for the optimizer on the host."
        )
    if found.too_large:
        yield heading("What is too large")
        rows = [
            (label(one.keys), str(one.sizes[0].batch.micro_batch_size), _over(one.sizes[0]))
            for one in found.too_large[:SHOWN]
        ]
        yield table(("layout", "smallest micro-batch", "does not fit"), rows)
        yield from _more(found.too_large)
        if any(one.keys.zero_stage == 3 for one in found.too_large):
            yield from map(Text, gather_line(plan.census, plan.spec))
    if found.refused:
        yield heading("What is refused")
        rules = len({_VALUES.sub("", _reason(one.refused[0])) for one in found.refused})
        yield Text(
            f"{len(found.refused)} layouts, for {rules} reason{'s' * (rules > 1)}, such as "
            f"{label(found.refused[0].keys)}: {_reason(found.refused[0].refused[0])}. --json has all."
        )
    yield from _with_fewer_bits(fewer)
    if found.longest:
        yield heading("The longest row (data.max_length) that fits, by the ranks that split it")
        yield _longest(plan, found.longest)


def _with_fewer_bits(found: Smaller | None) -> Iterator[RenderableType]:
    if found is None:
        return
    yield heading(f"What fits without offload with {found.title} ({found.change}), which changes the results")
    if found.refused:
        yield Text(f"Nothing: {' '.join(found.refused.split())}")
    elif not found.fitting:
        yield Text("Nothing.")
    else:
        yield _fitting(found.fitting[:FEWER])
        yield from _more(found.fitting, FEWER)
        yield Text(f"The first of them: {_typed(found.fitting[0])}")


def _more(group: Sequence[Candidate], shown: int = SHOWN) -> Iterator[Text]:
    if len(group) > shown:
        yield Text(f"… {len(group) - shown} more; --json has all")


def _advice(plan: Plan, found: Comparison) -> Iterator[str]:
    parallel = plan.spec.parallel
    first = found.advice
    if first is None:
        yield "No layout fits. Take more hosts, a smaller model, a smaller data.max_length, or model.lora."
        if not (parallel.offload_optimizer.nvme_path or parallel.offload_parameters.nvme_path):
            disk = "parallel.zero_stage=3 parallel.offload_optimizer='{device: nvme, nvme_path: FOLDER}'"
            yield f"Offload to NVMe needs a folder; to include it, compare again with {disk}."
        return
    assert first.best is not None
    batch = first.best.batch
    micro, accumulation = batch.micro_batch_size, batch.accumulation_steps
    yield f"{label(first.keys)}; micro-batch {micro} × accumulation {accumulation}"
    yield f"  {_typed(first)}"
    for order in range(first.keys.order):
        least = next((one for one in found.too_large if one.keys.order == order), None)
        if least is not None:
            yield f"{label(least.keys)}: {_over(least.sizes[0])}"
    yield from (f"warning: {warning}" for warning in first.warnings)
    if first.best.is_tight:
        yield (
            f"warning: it takes {first.best.full:.0%} of the memory of a GPU or a host, and the plan's "
            "figures are not that exact"
        )
    as_good = [one for one in found.fitting if len(one.warnings) <= len(first.warnings)]
    fastest = min(as_good, key=lambda one: one.seconds)
    share = fastest.seconds / first.seconds
    if share < 0.9:
        yield f"Estimated to be faster ({share:.0%} of the time of a step): {label(fastest.keys)}"
        yield f"  {_typed(fastest)}"


def _typed(candidate: Candidate) -> str:
    return shlex.join(candidate.overrides) if candidate.overrides else "(the spec as it is)"


def label(keys: LayoutKeys) -> str:
    """Return the layout in words."""
    where = {"cpu": "host", "nvme": "NVMe"}
    words = [
        keys.pipeline_stages > 1 and f"{keys.pipeline_stages} stages",
        f"ZeRO {keys.zero_stage}" if keys.zero_stage else "plain data parallel",
        keys.offload_optimizer != "none" and f"optimizer on {where[keys.offload_optimizer]}",
        keys.offload_parameters != "none" and f"parameters on {where[keys.offload_parameters]}",
        keys.copied > 1 and f"copies on {keys.copied} ranks each",
        keys.sequence_parallel > 1 and f"rows over {keys.sequence_parallel} ranks",
        keys.checkpointing
        and "checkpointing" + f" {keys.checkpointing:.3g}" * (keys.checkpointing is not True),
        keys.reference is not None and f"{keys.reference} reference",
    ]
    return ", ".join(word for word in words if word)


def _fitting(group: Sequence[Candidate]) -> RenderableType:
    rows = [
        (
            label(candidate.keys),
            _batch(size.batch),
            size_text(size.device),
            size_text(max(size.memory.hosts.values())),
            "tight" if size.is_tight else "",
            f"{size.bubble:.1%}" if size.bubble else "",
            f"{size.cost.seconds:.3g} s",
            f"{1 - size.cost.computing / size.cost.seconds:.0%}",
        )
        for candidate in group
        if (size := candidate.best) is not None
    ]
    head = ("layout", "micro-batch × accumulation", "GPU", "host", "", "bubble", "step, about", "waiting")
    return table(head, rows)


def _longest(plan: Plan, found: Sequence[LongestRow]) -> RenderableType:
    marks = {plan.layout.sequence_parallel: ", as in the spec"}
    rows = [
        (
            str(row.sequence_parallel) + marks.get(row.sequence_parallel, ""),
            str(row.batch.data_parallel),
            _batch(row.batch),
            f"{row.tokens:,}",
            row.limit,
        )
        for row in found
    ]
    head = ("parallel.sequence_parallel", "groups", "micro-batch × accumulation", "tokens", "what limits it")
    return table(head, rows)


def _batch(batch: BatchSizes) -> str:
    return f"{batch.micro_batch_size} × {batch.accumulation_steps}"


def _over(size: Size) -> str:
    need = size.over[0]
    most = ""
    if need.key == GPU_MEMORY:
        rank = max(size.memory.stages, key=lambda rank: rank.gpu)
        names = MEMORY | {"buffers": "gathered parameters and buffers"}
        parts = [part for part in MEMORY if part not in ("gpu", "offloaded", "retained")]
        part = max(parts, key=lambda part: getattr(rank, part))
        most = f"; {size_text(getattr(rank, part))} of it {names[part].removesuffix(', about')}"
    return (
        f"{need.where} needs {size_text(need.needs)} of {size_text(need.limit)}, "
        f"{size_text(need.needs - need.limit)} too much{most}"
    )


def _reason(finding: Finding) -> str:
    return f"{dotted(finding.path)}: {finding.message}"
