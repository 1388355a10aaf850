"""`dsft replay RUN STEP`: compute a step of a run again, and show what it did: its rows with their losses
before and after it, the gradient norm of each layer, and the difference to what the run has recorded.

The run's folder is only read. The ranks train from the nearest checkpoint before the step, or from the run's
start, to the step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import RenderableType

from dsft.checkpoint.compare import check_same_run
from dsft.checkpoint.read import CheckpointReader
from dsft.commands.on_ranks import CHANGED, on_ranks, spec_of
from dsft.errors import MissingInputError, Problem, SpecError, printable
from dsft.plan.tables import printed, table
from dsft.rank.places import RANKS
from dsft.report.jsonl import STEP, read_metrics
from dsft.spec.layout import batch_on, layout_of
from dsft.system.json_file import read_text, reason_of
from dsft.system.run_folder import MANIFEST, named_run, step_folders, step_of

SHOWN = 40
"""Rows and layers of a table."""
FIGURES = ("loss", "grad_norm")
ROWS = ("row", "tokens", "targets", "loss before", "after", "after, without", "share above the median")
LAYERS = ("layer", "gradient norm", "share of its square")


def replay(
    name: str, step: int, overrides: Sequence[str], without: Sequence[str], processes: int | None,
    *, blame: bool, as_json: bool,
) -> int:  # fmt: skip
    """Start the ranks, print what the step did and return the exit code. processes: by default as many as the
    run had, but no more than there are GPUs. Raises DsftError.

    The result is written to OUTPUT_DIR/NAME-step-STEP.json."""
    run, title = named_run(name).resolve(), f"Step {step} of {name} cannot be replayed."
    metrics = run / "metrics.jsonl"
    try:
        records = {int(one[STEP]): one for one in read_metrics(metrics) if "train/loss" in one}
    except OSError as error:
        raise MissingInputError(f"{metrics} {reason_of(error)}; it has the run's figures.") from None
    saved = [folder for folder in step_folders(run) if (folder / MANIFEST).exists()]
    last = max([*records, *map(step_of, saved)], default=0)
    if not 1 <= step <= last:
        steps = f"steps 1 to {last}" if last else "no step yet"
        raise SpecError(title, [Problem("STEP", f"{step}, but {run} has {steps}")])
    checkpoint = next((folder for folder in saved if step_of(folder) < step), None)
    compared = next((folder for folder in reversed(saved) if step_of(folder) >= step), checkpoint)
    text, own = _made_by(run, compared)
    words = [*CHANGED, f"output_dir={json.dumps(str(run.parent))}"]
    spec = spec_of(text, words, title)
    batch = batch_on(spec, layout_of(spec.parallel, own["world_size"]))
    sizes = ("global_batch_size", "micro_batch_size", "accumulation_steps")
    given = (batch.global_batch_size, batch.micro_batch_size, "null")
    words += [f"train.{size}={value}" for size, value in zip(sizes, given, strict=True)]
    length = spec.train.max_steps, spec.train.num_train_epochs
    spec = spec_of(text, [*words, *overrides], title)
    if (spec.train.max_steps, spec.train.num_train_epochs) != length:
        what = "the number of steps decides the learning rates; leave max_steps and num_train_epochs out"
        raise SpecError(title, [Problem("train", what)])
    ranks = processes or min(own["world_size"], torch.cuda.device_count() or own["world_size"])
    batch = batch_on(spec, layout_of(spec.parallel, ranks))
    if compared is not None:
        check_same_run(CheckpointReader.open(compared), spec, batch, None, "replay")
    end = min((one for one in records if one >= step), default=step)
    since = max((one for one in records if one < end), default=0)
    start = step_of(checkpoint) if checkpoint else 0
    known = {one: found.get("train/learning_rate") for one, found in records.items() if start < one <= end}
    rates = [[one, rate] for one, rate in known.items() if rate is not None]
    asked = {
        "rates": rates,
        "action": "replay", "run": str(run), "step": step, "own_layout": own, "since": since, "end": end,
        "checkpoint": checkpoint and str(checkpoint), "compared": compared and str(compared),
        "without": list(without),
        "recorded": {key: records[end].get(f"train/{key}") for key in FIGURES} if end in records else None,
    }  # fmt: skip
    result = Path(spec.output_dir, f"{run.name}-step-{step}.json")
    code, found = on_ranks(asked, spec, ranks, result, quiet=as_json)
    if code == 0:
        print(json.dumps(found, indent=1) if as_json else report(found, result, blame), flush=True)
    return code


def _made_by(run: Path, checkpoint: Path | None) -> tuple[str, dict[str, int]]:
    """Return the spec of the start that wrote the checkpoint, and its layout, as `CheckpointState` has it;
    where none is kept those of the run's last start. Raises MissingInputError."""
    if checkpoint is not None:
        state = CheckpointReader.open(checkpoint).state
        return yaml.safe_dump(dict(state["spec"])), {"world_size": 1, **state["layout"]}
    path = run / RANKS
    try:
        ranks, path = read_text(path).count('"rank"'), run / "spec.yaml"
        return read_text(path), {"world_size": max(1, ranks)}
    except (OSError, ValueError) as error:
        why = f"{path} {reason_of(error)}, and {run} has no checkpoint that says how it was made."
        raise MissingInputError(why) from None


def report(found: Mapping[str, Any], path: Path, blame: bool) -> str:
    """Return the result as text: figures of the step, then tables of its rows and layers. blame: those by
    their share, the largest first."""
    layout, own, start = found["layout"], found["own_layout"], found["checkpoint"] or "the start of the run"
    text = f"step {found['step']} of {found['run']}, from {start}, on {_words(layout)}"
    if any(layout.get(key) != value for key, value in own.items()):
        text += f"; the run had {_words(own)}, so roundings differ"
    if (other := found["other_rate"]) is not None:
        at, then, rate = other["step"], other["recorded"], other["here"]
        text += (
            f"\nwarning: this is not the step that the run made: in step {at} the run's learning rate was "
            f"{then:.6g}, here it is {rate:.6g}; for example, the run had another number of "
            "steps when it made this one, and its checkpoints from then are deleted "
            "(checkpoint.keep_last: null keeps all)."
        )
    if not found["applied"]:
        text += "\nThe gradient was not finite, so the step was skipped."
    found_rows, found_layers = (
        sorted(found[name], key=lambda one: -one["share"] if blame else 0) for name in ("rows", "layers")
    )
    rows = [
        [" ".join(filter(None, (one["row"], one["part"]))), f"{one['tokens']:,}", f"{one['targets']:,}"]
        + [_figure(one[key]) if key in one else "" for key in ("before", "after", "without")]
        + [f"{one['share']:.1%}"]
        for one in found_rows
    ]
    layers = [[one["layer"], _figure(one["grad_norm"]), f"{one['share']:.1%}"] for one in found_layers]
    parts: list[RenderableType] = [table(["", "loss", "gradient norm"], list(_compared(found)))]
    for head, lines in ((ROWS, rows), (LAYERS, layers)):
        parts.append(table(head, lines[:SHOWN]))
        if len(lines) > SHOWN:
            parts.append(f"and {len(lines) - SHOWN:,} more in {path}")
    return printable(f"{text}\n{printed(parts)}result: {path}")


def _compared(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the lines of a table with loss and gradient norm: recorded, replayed, their difference; those of
    the step, where the record has the mean of several; those without some rows."""
    since, end, recorded, record = (found[key] for key in ("since", "end", "recorded", "record"))
    of = "" if end == since + 1 else f", steps {since + 1} to {end}"
    if recorded:
        yield [f"recorded{of}", *(_figure(recorded[key]) for key in FIGURES)]
    yield [f"replayed{of}", *(_figure(record[key]) for key in FIGURES)]
    if recorded:
        differences = (
            0.0 if record[k] == recorded[k] else float(record[k]) - float(recorded[k]) for k in FIGURES
        )
        yield ["difference", *map(_figure, differences)]
    if of:
        yield [f"step {found['step']}", *(_figure(found[key]) for key in FIGURES)]
    if found.get("other"):
        yield [f"without {', '.join(found['without'])}", *(_figure(found["other"][key]) for key in FIGURES)]


def _figure(value: float | str) -> str:
    return f"{float(value):.6g}"


def _words(layout: Mapping[str, int]) -> str:
    """Return a layout as in `CheckpointState`, in words."""
    parts = [f"{layout['world_size']} process{'es' * (layout['world_size'] > 1)}"]
    parts += [f"{key} {value}" for key, value in layout.items() if key != "world_size" and value != 1]
    return ", ".join(parts)
