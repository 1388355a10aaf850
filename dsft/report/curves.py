"""Plot a run's losses, learning rate and gradient norm into curves.png.

matplotlib is imported only when the plot is drawn, and needs no display. If the plot cannot be made, a line
says so; the run does not fail.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsft.errors import printable
from dsft.report.jsonl import STEP

Points = tuple[list[int], list[float]]
"""Steps and values."""

SMOOTHED_FROM = 60
"""Number of points from which on the training loss is also shown smoothed."""
BLUE, RED = "#1f5fa8", "#c0392b"
REWARDS = ("rewards/margins", "rewards/accuracies")
COLORS = (BLUE, "#e07a1f", "#2a9d5c", "#8e44ad", "#b8336a", "#0f8b8d")
EVALUATIONS = ("#e07a1f", "#2a9d5c", "#8e44ad", "#b8336a", "#0f8b8d", "#7a5c3e")


def write_curves(path: Path, name: str, records: Sequence[Mapping[str, float]]) -> str:
    """Plot `records` (of metrics.jsonl, the whole run's) into `path`. Return a line for the user."""
    try:
        figure(name, records).savefig(path, dpi=150)
    except Exception as error:  # noqa: B902  a full disk, a broken matplotlib: no reason for a run to fail
        return f"no {path.name}: {' '.join(str(error).split()) or type(error).__name__}"
    return f"curves: {path}"


def series(records: Sequence[Mapping[str, float]], key: str) -> Points:
    """Return steps and values of one metric where it is finite."""
    found = [
        (int(record[STEP]), record[key]) for record in records if math.isfinite(record.get(key, math.nan))
    ]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: Sequence[float]) -> list[float]:
    """Return centered moving averages, over a window of about a fortieth of the run that narrows at both
    ends, so that the curve does not lag behind."""
    reach, count = max(2, len(values) // 80), len(values)
    widths = [min(reach, i, count - 1 - i) for i in range(count)]
    return [statistics.fmean(values[i - width : i + width + 1]) for i, width in enumerate(widths)]


def svg(drawn: Any) -> str:
    """Return a figure as an SVG element, for an HTML page."""
    buffer = io.StringIO()
    drawn.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def compared(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Any:
    """Return a figure with the losses of several runs: name -> records."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(drawn)
    for axis, key, title in zip(
        drawn.subplots(1, 2), ("train/loss", "eval/loss"), ("training loss", "held-out loss"), strict=True
    ):
        for number, (name, records) in enumerate(runs.items()):
            steps, values = series(records, key)
            shown = smoothed(values) if len(values) >= SMOOTHED_FROM else values
            if values:
                axis.plot(steps, shown, color=COLORS[number % len(COLORS)], label=_last(name, values))
        axis.set_title(f"{title} (nats)", fontsize=10, loc="left")
        axis.set_xlabel("optimizer step")
        axis.grid(visible=True, color="#e3e5e8", linewidth=0.8)
        if axis.lines:
            axis.legend(frameon=False, fontsize=9)
    return drawn


def figure(name: str, records: Sequence[Mapping[str, float]]) -> Any:
    """Return the figure of one run: losses, rewards of pairs, learning rate and gradient norm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(drawn)
    rows: list[Any] = [["loss", "loss"], ["rate", "norm"]]
    heights = [1.6, 1.0]
    if any(key.endswith(REWARDS[0]) for record in records for key in record):
        rows, heights = [rows[0], list(REWARDS), rows[1]], [1.6, 1.0, 1.0]
    axes = drawn.subplot_mosaic(rows, height_ratios=heights)
    drawn.suptitle(_plain(name), fontsize=13, fontweight="bold")
    _losses(axes["loss"], records)
    for key in REWARDS:
        if key in axes:
            _rewards(axes[key], records, key)
    _line(axes["rate"], series(records, "train/learning_rate"), "learning rate")
    axes["rate"].set_ylim(bottom=0)
    _norm(axes["norm"], records)
    for axis in axes.values():
        axis.set_xlabel("optimizer step")
        axis.grid(visible=True, color="#e3e5e8", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.margins(x=0.01)
    return drawn


def _losses(axis: Any, records: Sequence[Mapping[str, float]]) -> None:
    steps, values = series(records, "train/loss")
    if len(values) >= SMOOTHED_FROM:
        axis.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.9)
        axis.plot(steps, smoothed(values), color=BLUE, linewidth=1.8, label=f"train {values[-1]:.4f}")
    else:
        marker = "o" if len(values) == 1 else None
        axis.plot(steps, values, color=BLUE, linewidth=1.5, marker=marker, label=_last("train", values))
    keys = {key for record in records for key in record if re.fullmatch(r"eval/(.+/)?loss", key)}
    for number, key in enumerate(sorted(keys, key=lambda key: (key.count("/"), key))):
        at, losses = series(records, key)
        label = _last(key.removesuffix("/loss"), losses)
        color = EVALUATIONS[number % len(EVALUATIONS)]
        whole = (
            {"linewidth": 1.6, "zorder": 3} if key == "eval/loss" else {"linewidth": 1.2, "linestyle": "--"}
        )
        axis.plot(at, losses, color=color, marker="o", markersize=4, label=label, **whole)
    axis.set_title("loss (nats)", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=9)


def _rewards(axis: Any, records: Sequence[Mapping[str, float]], key: str) -> None:
    """Plot a metric of preference pairs, in training and held out."""
    _line(axis, series(records, f"train/{key}"), key)
    steps, values = series(records, f"eval/{key}")
    if values:
        axis.plot(steps, values, color=EVALUATIONS[0], marker="o", markersize=4, label=_last("eval", values))
        axis.legend(frameon=False, fontsize=9)


def _plain(name: str) -> str:
    """Return the name as matplotlib shows it: as text, not as a formula between dollar signs."""
    return printable(name).replace("$", r"\$")


def _last(name: str, values: Sequence[float]) -> str:
    return f"{_plain(name)} {values[-1]:.4f}" if values else _plain(name)


def _line(axis: Any, points: Points, title: str) -> None:
    axis.plot(*points, color=BLUE, linewidth=1.5, marker="o" if len(points[0]) == 1 else None)
    axis.set_title(title, fontsize=10, loc="left")


def _norm(axis: Any, records: Sequence[Mapping[str, float]]) -> None:
    points = series(records, "train/grad_norm")
    _line(axis, points, "gradient norm, before clipping")
    positive = [value for value in points[1] if value > 0]
    if positive and max(positive) > 10 * min(positive):
        axis.set_yscale("log")
    skipped = [r[STEP] for r in records if "train/grad_norm" in r and not math.isfinite(r["train/grad_norm"])]
    for step in skipped:
        axis.axvline(step, color=RED, alpha=0.5, linewidth=1)
    if skipped:
        axis.set_title(f"{len(skipped)} not applied", fontsize=9, loc="right", color=RED)
