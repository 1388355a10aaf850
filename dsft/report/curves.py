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
from dsft.report.console import PLOTTED
from dsft.report.jsonl import STEP

Points = tuple[list[int], list[float]]
"""Steps and values."""

SMOOTHED_FROM = 60
"""Number of points from which on the training loss is also shown smoothed."""
BLUE, RED = "#1f5fa8", "#c0392b"
COLORS = (BLUE, "#e07a1f", "#2a9d5c", "#8e44ad", "#b8336a", "#0f8b8d", "#7a5c3e")
DOTTED: dict[str, Any] = {"marker": "o", "markersize": 4}


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
    drawn = _empty(4)
    titles = {"train/loss": "training loss (nats)", "eval/loss": "held-out loss (nats)"}
    for axis, (key, title) in zip(drawn.subplots(1, 2), titles.items(), strict=True):
        for number, (name, records) in enumerate(runs.items()):
            steps, values = series(records, key)
            shown = smoothed(values) if len(values) >= SMOOTHED_FROM else values
            if values:
                _plot(axis, (steps, shown), COLORS[number % len(COLORS)], _last(name, values))
        _finish(axis, title)
    return drawn


def figure(name: str, records: Sequence[Mapping[str, float]]) -> Any:
    """Return the figure of one run: losses, rewards or a divergence, learning rate and gradient norm."""
    drawn = _empty(7)
    rows: list[Any] = [["loss", "loss"], ["rate", "norm"]]
    names = {key.partition("/")[2] for record in records for key in record}
    shown = [key for key in PLOTTED if key in names][:2]
    if shown:
        rows.insert(1, [shown[0], shown[-1]])
    axes = drawn.subplot_mosaic(rows, height_ratios=[1.6, *[1.0] * (len(rows) - 1)])
    drawn.suptitle(_plain(name), fontsize=13, fontweight="bold")
    _losses(axes["loss"], records)
    for key in shown:
        for part, color, style in (("train", BLUE, {}), ("eval", COLORS[1], DOTTED)):
            points = series(records, f"{part}/{key}")
            _plot(axes[key], points, color, _last(part, points[1]), **style)
        _finish(axes[key], key)
    _plot(axes["rate"], series(records, "train/learning_rate"), BLUE)
    axes["rate"].set_ylim(bottom=0)
    _finish(axes["rate"], "learning rate")
    _norm(axes["norm"], records)
    return drawn


def _empty(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(10, height), layout="constrained")


def _plot(axis: Any, points: Points, color: str, label: str | None = None, **style: Any) -> None:
    single = {"marker": "o"} if len(points[0]) == 1 else {}
    if points[0]:
        axis.plot(*points, color=color, label=label, **{"linewidth": 1.5, **single, **style})


def _finish(axis: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("optimizer step")
    axis.grid(visible=True, color="#e3e5e8", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axis.margins(x=0.01)
    if len(axis.get_legend_handles_labels()[0]):
        axis.legend(frameon=False, fontsize=9)


def _losses(axis: Any, records: Sequence[Mapping[str, float]]) -> None:
    steps, values = series(records, "train/loss")
    if len(values) >= SMOOTHED_FROM:
        _plot(axis, (steps, values), BLUE, alpha=0.25, linewidth=0.9)
        _plot(axis, (steps, smoothed(values)), BLUE, _last("train", values), linewidth=1.8)
    else:
        _plot(axis, (steps, values), BLUE, _last("train", values))
    keys = {key for record in records for key in record if re.fullmatch(r"eval/(.+/)?loss", key)}
    for number, key in enumerate(sorted(keys, key=lambda key: (key.count("/"), key))):
        points = series(records, key)
        style = DOTTED | ({"linewidth": 1.6, "zorder": 3} if key == "eval/loss" else {"linestyle": "--"})
        color = COLORS[1 + number % (len(COLORS) - 1)]
        label = _last(key.removesuffix("/loss"), points[1])
        _plot(axis, points, color, label, **style)
    _finish(axis, "loss (nats)")


def _norm(axis: Any, records: Sequence[Mapping[str, float]]) -> None:
    points = series(records, "train/grad_norm")
    _plot(axis, points, BLUE)
    positive = [value for value in points[1] if value > 0]
    if positive and max(positive) > 10 * min(positive):
        axis.set_yscale("log")
    skipped = [r[STEP] for r in records if "train/grad_norm" in r and not math.isfinite(r["train/grad_norm"])]
    for step in skipped:
        axis.axvline(step, color=RED, alpha=0.5, linewidth=1)
    if skipped:
        axis.set_title(f"{len(skipped)} not applied", fontsize=9, loc="right", color=RED)
    _finish(axis, "gradient norm, before clipping")


def _plain(name: str) -> str:
    """Return the name as matplotlib shows it: as text, not as a formula between dollar signs."""
    return printable(name).replace("$", r"\$")


def _last(name: str, values: Sequence[float]) -> str:
    return f"{_plain(name)} {values[-1]:.4f}" if values else _plain(name)
