"""Print the longest rows that fit, as text or JSON: the command `dsft plan --longest`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from dsft.plan.build import Plan, build_plan, memory_limits
from dsft.plan.compare import ROOMY
from dsft.plan.longest import LongestRow, hints, longest_rows
from dsft.plan.tables import figures, printed
from dsft.spec.load import load_spec
from dsft.system.disk import size_text


def print_longest(
    spec_path: Path, overrides: Sequence[str], *, as_json: bool, world_size: int | None
) -> None:
    """Find the longest rows on the spec's hosts and print them."""
    plan = build_plan(load_spec(spec_path, overrides, check_files=False), world_size)
    found = longest_rows(plan)
    if as_json:
        limits = dict(zip(("device", "host"), memory_limits(plan.spec), strict=True))
        rows = [dataclasses.asdict(row) for row in found]
        print(json.dumps({"name": plan.spec.name, "limits": limits, "share": ROOMY, "rows": rows}, indent=2))
    else:
        print(printed(parts(plan, found)), end="")


def parts(plan: Plan, found: list[LongestRow]) -> Iterator[RenderableType]:
    """Yield the parts of the output in order."""
    places = zip(("GPU", "host"), memory_limits(plan.spec), strict=True)
    limits = " and ".join(f"the {size_text(limit)} of a {place}" for place, limit in places if limit)
    yield Text(
        f"{plan.spec.name}: the longest rows (data.max_length) that take at most {ROOMY:.0%} of {limits}, "
        f"with {plan.batch.global_batch_size} examples a step"
    )
    table = figures(
        "parallel.sequence_parallel", "groups", "micro-batch × accumulation", "longest row, in tokens"
    )
    table.add_column("longer rows exceed")
    for row in found:
        own = ", as in the spec" if row.sequence_parallel == plan.layout.sequence_parallel else ""
        if row.batch is not None:
            sizes = f"{row.batch.micro_batch_size} × {row.batch.accumulation_steps}"
            tokens = f"{row.tokens:,}" if row.tokens else "none"
            groups = str(row.batch.data_parallel)
            table.add_row(f"{row.sequence_parallel}{own}", groups, sizes, tokens, row.limit)
    yield table
    refused = next((row for row in found if row.refused), None)
    if refused is not None:
        yield Text(f"With parallel.sequence_parallel={refused.sequence_parallel}: {refused.refused}")
    if plan.spec.data.max_tokens_per_micro_batch is not None:
        yield Text("data.max_tokens_per_micro_batch is raised with the row where it is less.")
    ways = list(hints(plan, found))
    if ways:
        yield Text(f"What may allow longer rows: {', '.join(ways)}.")
