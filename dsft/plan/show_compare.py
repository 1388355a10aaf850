"""Print the comparison of a run's layouts as text or JSON: the command `dsft plan --compare`."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from dsft.plan.build import Plan, build_plan
from dsft.plan.compare import ROOMY, Candidate, Comparison, LayoutKeys, Need, Size, compare
from dsft.plan.cost import assumed
from dsft.plan.memory.sizes import runs_on_cpu
from dsft.plan.promised import load
from dsft.plan.tables import figures, heading, printed, size_text
from dsft.plan.traffic import bubble
from dsft.spec.document import Finding, dotted

_VALUES = re.compile(r"\d+|'[^']*'")  # the values in a rule's message; its other words are always the same

SHOWN = 24  # layouts per table; --json has all


def print_comparison(
    spec_path: Path, overrides: Sequence[str], *, as_json: bool, world_size: int | None
) -> None:
    """Compare the layouts on the spec's hosts and print the comparison."""
    plan = build_plan(load(spec_path, overrides, check_files=False), world_size)
    found = compare(plan)
    if as_json:
        print(json.dumps(as_mapping(plan, found), indent=2))
    else:
        print(printed(parts(plan, found)), end="")


def as_mapping(plan: Plan, found: Comparison) -> dict[str, Any]:
    """Return the comparison as a mapping for JSON: sizes in bytes, times in seconds; candidates in the order
    to try them, with every micro-batch size that was evaluated."""
    verdicts = (("fits", found.fitting), ("too large", found.too_large), ("refused", found.refused))
    return {
        "name": plan.spec.name,
        "global_batch_size": plan.batch.global_batch_size,
        "world_size": plan.layout.world_size,
        "limits": dataclasses.asdict(found.limits),
        "assumed": assumed(plan.spec),
        "advice": list(found.fitting[0].overrides) if found.fitting else None,
        "candidates": [_mapping(one, verdict) for verdict, group in verdicts for one in group],
    }


def _mapping(candidate: Candidate, verdict: str) -> dict[str, Any]:
    best = candidate.best
    return {
        "verdict": verdict,
        "layout": dataclasses.asdict(candidate.choice),
        "overrides": list(candidate.overrides),
        "warnings": list(candidate.warnings),
        "micro_batch_size": best.batch.micro_batch_size if best else None,
        "sizes": [_size_mapping(size, candidate.choice) for size in candidate.sizes],
        "refused": [_reason(finding) for finding in candidate.refused],
    }


def _size_mapping(size: Size, choice: LayoutKeys) -> dict[str, Any]:
    return {
        "micro_batch_size": size.batch.micro_batch_size,
        "accumulation_steps": size.batch.accumulation_steps,
        "per_gpu": size.device,
        "per_host": dict(size.memory.hosts),
        "tight": size.is_tight,
        "over": [dataclasses.asdict(over) for over in size.over],
        "bubble": bubble(choice.pipeline_stages, size.batch.accumulation_steps),
        "traffic": [dataclasses.asdict(flow) | {"bytes": flow.bytes} for flow in size.traffic],
        "seconds": size.cost.seconds,
        "of_which": dataclasses.asdict(size.cost),
    }


def parts(plan: Plan, found: Comparison) -> Iterator[RenderableType]:
    """Yield the parts of the output in order."""
    limits = found.limits
    gpu, host = (_limit(limit) for limit in (limits.device, limits.host))
    where = f"{_count(plan.layout.world_size, 'rank')} of {_count(len(plan.hosts), 'host')}"
    yield Text(
        f"{plan.spec.name}: {plan.batch.global_batch_size} examples a step on {where}; "
        f"a GPU has {gpu}, a host {host}"
    )
    yield from map(Text, _unknown(plan, found))
    yield heading("Advice")
    yield from map(Text, _advice(plan, found))
    if found.fitting:
        yield heading("What fits, in the order to try it")
        yield _fitting(found.fitting[:SHOWN])
        if any(one.best is not None and one.best.is_tight for one in found.fitting):
            yield Text(f"Tight: over {ROOMY:.0%} of what a GPU or a host has.")
        yield from map(Text, _more(found.fitting))
        yield Text(_how_estimated(plan))
    if found.too_large:
        yield heading("What is too large")
        yield _too_large(found.too_large[:SHOWN])
        yield from map(Text, _more(found.too_large))
    if found.refused:
        yield heading("What is refused")
        yield _refused(found)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _limit(limit: int | None) -> str:
    return "memory that is not known" if limit is None else size_text(limit)


def _unknown(plan: Plan, found: Comparison) -> Iterator[str]:
    for limit, key, of in (
        (found.limits.device, "cluster.accelerator.memory_gib", "GPU"),
        (found.limits.host, "cluster.host_memory_gib", "host"),
    ):
        if limit is None and not (of == "GPU" and runs_on_cpu(plan.spec)):
            yield f"{key} is not given, so no layout counts as too large for a {of}; give it"


def _more(group: Sequence[Candidate]) -> Iterator[str]:
    if len(group) > SHOWN:
        yield f"… {len(group) - SHOWN} more; --json has all"


def _advice(plan: Plan, found: Comparison) -> Iterator[str]:
    if not found.fitting:
        yield "No layout fits. Take more hosts, a smaller model or data.max_length, or model.lora."
        if not _has_disk(plan):
            disk = "parallel.zero_stage=3 parallel.offload_optimizer='{device: nvme, nvme_path: FOLDER}'"
            yield f"Offload to NVMe was not looked at, for want of an nvme_path: compare again with {disk}."
        return
    first = found.fitting[0]
    assert first.best is not None
    yield f"{label(first.choice)}{_details(first.choice)}; {_batch(first.best)}"
    yield f"  {_typed(first)}"
    for order in range(first.choice.order):
        least = next((one for one in found.too_large if one.choice.order == order), None)
        if least is not None:
            yield f"{label(least.choice)}{_details(least.choice)}: {_over(least.sizes[0].over[0])}"
    yield from (f"warning: {warning}" for warning in first.warnings)
    if first.best.is_tight:
        yield f"warning: it takes {first.best.full:.0%} of a bound, and the plan's figures are not that sure"
    yield from _faster(first, found.fitting)


def _has_disk(plan: Plan) -> bool:
    parallel = plan.spec.parallel
    return bool(parallel.offload_optimizer.nvme_path or parallel.offload_parameters.nvme_path)


def _faster(first: Candidate, fitting: Sequence[Candidate]) -> Iterator[str]:
    """Yield lines on the layout that is fastest by the estimate, if it takes less than 0.9 of the time of the
    advised one."""
    fastest = min(fitting, key=lambda one: one.seconds)
    share = fastest.seconds / first.seconds
    if share < 0.9:
        name = label(fastest.choice) + _details(fastest.choice)
        yield f"By the estimate faster, {share:.2f} of its time: {name}"
        yield f"  {_typed(fastest)}"


def _typed(candidate: Candidate) -> str:
    return shlex.join(candidate.overrides) if candidate.overrides else "(the spec as it is)"


def label(choice: LayoutKeys) -> str:
    """Return the layout in words."""
    zero = "plain data parallel" if choice.zero_stage == 0 else f"ZeRO {choice.zero_stage}"
    words = [zero if choice.pipeline_stages == 1 else f"{choice.pipeline_stages} stages, {zero}"]
    where = {"cpu": "host", "nvme": "NVMe"}
    if choice.offload_optimizer != "none":
        words.append(f"optimizer on {where[choice.offload_optimizer]}")
    if choice.offload_parameters != "none":
        words.append(f"parameters on {where[choice.offload_parameters]}")
    return ", ".join(words)


def _details(choice: LayoutKeys) -> str:
    checkpointing = ", checkpointing" if choice.checkpointing else ""
    return checkpointing + (f", {choice.reference} reference" if choice.reference else "")


def _batch(size: Size) -> str:
    return f"micro-batch {size.batch.micro_batch_size} × accumulation {size.batch.accumulation_steps}"


def _fitting(group: Sequence[Candidate]) -> Table:
    table = figures(
        "layout", "micro-batch × accumulation", "GPU", "host", "", "bubble", "step, about", "waiting"
    )
    for candidate in group:
        size = candidate.best
        if size is not None:
            waiting = size.cost.idle + size.cost.travelling + size.cost.updating
            table.add_row(
                label(candidate.choice) + _details(candidate.choice),
                f"{size.batch.micro_batch_size} × {size.batch.accumulation_steps}",
                size_text(size.device),
                size_text(max(size.memory.hosts.values())),
                "tight" if size.is_tight else "",
                f"{candidate.bubble:.1%}" if candidate.choice.pipeline_stages > 1 else "",
                f"{size.cost.seconds:.3g} s",
                f"{waiting / size.cost.seconds:.0%}",
            )
    return table


def _too_large(group: Sequence[Candidate]) -> Table:
    table = figures("layout", "smallest micro-batch")
    table.add_column("does not fit")
    for one in group:
        size = one.sizes[0]
        table.add_row(
            label(one.choice) + _details(one.choice), str(size.batch.micro_batch_size), _over(size.over[0])
        )
    return table


def _over(over: Need) -> str:
    return (
        f"{over.where} needs {size_text(over.needs)} of {size_text(over.limit)}, "
        f"{size_text(over.needs - over.limit)} too much"
    )


def _refused(found: Comparison) -> Table:
    """Return a table with a row for each rule: the number of layouts whose first refusal it is, what they
    have in common, and the reason."""
    groups: dict[tuple[Any, ...], list[Candidate]] = {}
    for one in found.refused:
        first = one.refused[0]
        groups.setdefault((first.path, _VALUES.sub("", first.message)), []).append(one)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("layouts", "of", "why"):
        table.add_column(column, overflow="fold")
    whole = (*found.fitting, *found.too_large, *found.refused)
    for group in groups.values():
        table.add_row(str(len(group)), _common(group, whole), _reason(group[0].refused[0]))
    return table


def _common(group: Sequence[Candidate], whole: Sequence[Candidate]) -> str:
    """Return what distinguishes these layouts from the others: for each key their values, unless they have
    all values that occur."""
    words = []
    for field in dataclasses.fields(LayoutKeys):
        here, all_of_them = (
            list(dict.fromkeys(getattr(one.choice, field.name) for one in some)) for some in (group, whole)
        )
        if len(here) < len(all_of_them):
            words.append(f"{field.name} {', '.join(str(value).lower() for value in here)}")
    return "; ".join(words)


def _reason(finding: Finding) -> str:
    return f"{dotted(finding.path)}: {finding.message}"


def _how_estimated(plan: Plan) -> str:
    speeds = assumed(plan.spec)
    links = ", ".join(f"{link} {speed / 1e9:g} GB/s" for link, speed in speeds["links"].items())
    return (
        f"A step's seconds rank, and are no forecast: {speeds['reached']:.0%} of {speeds['tflops']:g} "
        f"TFLOP/s, {links}, nothing beside anything else. Waiting: bubble, traffic, the host's optimizer."
    )
