"""Results beside each other: takes the objects of results.json, gives whether each reached its goals, the
tables of results.md, and docs/gpu.md."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, STAGES, Case
from benchmarks.paired import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
SAME_WORK = 0.02  # the most that a step's loss may be off that of a case beside it, relative
MEASURING = ("speed", "whole_run")  # bodies whose goals are of speed and memory
OWN_ROWS = ("trl-packed",)  # chooses its own rows, so its losses are of others
BY_NAME = {case.name: case for case in CASES}
Result = dict[str, Any]


def judge(result: Result, case: Case, is_rehearsal: bool) -> Result:
    """With `pass`, and in `reason` every goal that was missed; `goals` says both in words. A rehearsal has to
    come to its end, and to be equal where numbers are computed: speed and memory are nobody's."""
    goals_reached, missed = [], []
    for name, sense, bound in case.goals:
        value = figure(result, name)
        if value is None and name.startswith("ratio"):
            continue  # its other case was not run
        reached = value is not None and (value >= bound if sense == ">=" else value <= bound)
        text = f"{name} {shown(value)}, goal {sense} {bound:g}"
        goals_reached.append(f"{text}: {'reached' if reached else 'missed'}")
        if not reached and not (is_rehearsal and (case.body in MEASURING or case.mode == "fast")):
            missed.append(text)
    if result.get("loss_difference", 0) > SAME_WORK:
        missed.append(
            f"losses differ by {result['loss_difference']:.2%} from a case beside it: not the same work"
        )
    return result | {"goals": goals_reached, "pass": not missed, "reason": "; ".join(missed)}


def figure(result: Mapping[str, Any], name: str) -> float | None:
    if name.startswith("ratio "):
        return result.get("ratios", {}).get(name.removeprefix("ratio "))
    value = result.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def compare(results: Sequence[Result]) -> list[Result]:
    """In the order of the table; each case that has others of the same commit beside it gets `ratios` of its
    tokens per second to theirs, and the largest difference of its losses from theirs, and is judged again."""
    order = {case.name: number for number, case in enumerate(CASES)}
    by_name = {one["case"]: dict(one) for one in results if one["case"] in order}
    for one in by_name.values():
        case = BY_NAME[one["case"]]
        if not case.beside or "tokens_per_s" not in one:
            continue
        named = [by_name[name] for name in case.beside if "tokens_per_s" in by_name.get(name, {})]
        others = [other for other in named if other.get("commit") == one.get("commit")]
        one["ratios"] = {other["case"]: one["tokens_per_s"] / other["tokens_per_s"] for other in others}
        alike = [o for o in others if BY_NAME[o["case"]].settings["way"] not in OWN_ROWS]
        apart = [apart_by(one["losses"], other["losses"]) for other in alike]
        one |= {"loss_difference": max(apart)} if apart else {}
        one |= judge(one, case, bool(one.get("rehearsed")))
    return sorted(by_name.values(), key=lambda one: order[one["case"]])


def apart_by(ours: Sequence[float], theirs: Sequence[float]) -> float:
    pairs = list(zip(ours, theirs, strict=False))
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=math.inf)


# --- tables -------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    return "\n\n".join(part for stage in STAGES if (part := of_stage(stage, results))) + "\n"


def of_stage(stage: str, results: Sequence[Result]) -> str:
    mine = [one for one in results if one["stage"] == stage]
    if not mine:
        return ""
    header = [
        "case",
        "",
        "tokens/s",
        "MFU",
        "GPU GiB, measured / planned",
        "host GiB",
        "figures",
        "what was missed",
    ]
    rows = [
        [
            one["case"], word(one), shown(one.get("tokens_per_s"), 0), shown(one.get("mfu")), memory(one),
            shown(gib(one.get("host_peak")), 1), figures(one),
            one["reason"].replace("|", "/").replace("\n", " "),
        ]
        for one in mine
    ]  # fmt: skip
    parts = [f"### {stage}: {STAGES[stage]}", markdown(header, rows)]
    for one in mine:
        parts += [
            markdown(["ms", one["case"]], times(one[key])) for key in ("kernels", "step") if one.get(key)
        ]
    return "\n\n".join(parts)


def times(found: Mapping[str, Any]) -> list[list[str]]:
    """Rows of milliseconds, or of several figures, or of an error."""
    rows = []
    for name, value in found.items():
        if isinstance(value, Mapping):
            value = "; ".join(f"{key} {shown(one)}" for key, one in value.items())
        rows.append([name.replace("|", "/"), shown(value) if isinstance(value, float) else str(value)])
    return rows


def word(result: Mapping[str, Any]) -> str:
    if result["pass"] is None:
        return "not run"
    if not result.get("goals"):
        return "done" if result["pass"] else "failed"
    return "reached" if result["pass"] else "missed"


def memory(result: Mapping[str, Any]) -> str:
    measured = gib(result.get("peaks", {}).get("allocated"))
    return "–" if measured is None else f"{measured:.1f} / {shown(gib(result.get('planned')), 1)}"


def gib(size: float | None) -> float | None:
    return None if size is None else size / 2**30


def figures(result: Mapping[str, Any]) -> str:
    """What is neither in another column nor a list."""
    ratios = [f"{value:.2f} × {name}" for name, value in result.get("ratios", {}).items()]
    names = (
        "difference", "first_difference", "first_margin", "gradient_error", "output_error",
        "other_segment_bits",
        "matmul_tflops", "copy_tb_s", "to_device_gb_s", "to_host_gb_s", "disk_write_gb_s", "tokens_advised",
        "step_seconds", "spread", "pairs_per_s", "plan_error", "phase_error", "device_error",
        "loss_difference", "seconds_to_end", "checkpoints_at_kill",
    )  # fmt: skip
    return "; ".join([*ratios, *(f"{name} {shown(result[name])}" for name in names if name in result)]) or "–"


def shown(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "–"
    if digits != 3 or abs(value) >= 1000:
        return f"{value:,.{0 if abs(value) >= 1000 else digits}f}"
    return f"{value:.3g}"


# --- the page -----------------------------------------------------------------------------------------------

GUIDE = Path(__file__).with_name("guide.md")
MEASURED = Path(__file__).with_name("measured.json")
"""The results on the page, one a line."""
NOT_KEPT = ("argv", "printed", "longest", "phases", "reference_losses", "ratios", "loss_difference")


def merge(results: Sequence[Result]) -> list[Result]:
    """Put results of GPUs in the place of earlier ones of the same cases in `MEASURED`, and return all."""
    known = json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else []
    new = [one for one in results if one["pass"] is not None and not one.get("rehearsed")]
    by_name = {one["case"]: one for one in [*known, *new]}
    kept = [{key: one[key] for key in one if key not in NOT_KEPT} for one in by_name.values()]
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in kept)
    MEASURED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return kept


def page(results: Sequence[Result]) -> str:
    """The guide, then what was measured; rehearsals are not results."""
    guide = GUIDE.read_text(encoding="utf-8")
    real = compare([one for one in results if not one.get("rehearsed")])
    heads = "\n".join(f"- {line}" for line in sorted({head(one) for one in real}))
    missing = ", ".join(case.name for case in CASES if case.name not in {one["case"] for one in real})
    count = (
        f"{sum(one['pass'] for one in real)} of {len(real)} cases that were run reached their goals. Not run "
        f"yet: {missing}."
    )
    return f"{guide}{heads}\n\n{count}\n\n{table(real)}\n{goals()}\n"


def head(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return f"{result['date'][:10]}: {result['gpu']}; {result['machine']}; {versions}; dsft {result['commit']}"


def goals() -> str:
    rows = [[case.name, "; ".join(f"{name} {sense} {bound:g}" for name, sense, bound in case.goals)]
            for case in CASES if case.goals and case.stage not in ("setup", "correct")]  # fmt: skip
    return "### Goals, of one H200\n\n" + markdown(["case", "goals"], rows)
