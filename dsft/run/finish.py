"""Finish a run on rank 0: write the export and the plot of its curves, and print its outcome, its files and
what to type next."""

from __future__ import annotations

from pathlib import Path

from dsft.checkpoint.export import NOT_FOR_PEFT, export_checkpoint
from dsft.checkpoint.merge import rows_of
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.retain import best_checkpoint
from dsft.report.console import facts
from dsft.report.curves import write_curves
from dsft.report.jsonl import read_metrics
from dsft.setup.run import Run
from dsft.spec.schema import Spec


def finish(run: Run, checkpoint: Path) -> None:
    """Export the last checkpoint, unless the export is of it already, and print the outcome of the run."""
    spec, folder, log = run.spec, run.folder, run.log
    export = folder / "export"
    exported = export_checkpoint(checkpoint, export)
    log(exported)
    records = read_metrics(folder / "metrics.jsonl")
    for line in outcome(records):
        log(line)
    best = best_checkpoint(folder)
    if best is not None:
        log(f"best checkpoint: {best.path}, held-out loss {best.held_out_loss:.4f}; also checkpoints/best")
    log(f"metrics: {folder / 'metrics.jsonl'}; memory: {folder / 'memory.json'}")
    log(write_curves(folder / "curves.png", spec.name, records))
    has_new_rows = rows_of(CheckpointReader.open(checkpoint)) is not None
    is_misread = NOT_FOR_PEFT in exported
    for line in what_next(spec, export, checkpoint, has_new_rows=has_new_rows, is_misread=is_misread):
        log(line)


def outcome(records: list[dict[str, float]]) -> list[str]:
    """Return lines for the user: the training loss at the first and the last recorded step, and the last
    held-out metrics. What has no record has no line."""
    lines = []
    losses = [record for record in records if "train/loss" in record]
    rewarded = [record for record in records if "train/rewards/accuracies" in record]
    held_out = [record for record in records if "eval/loss" in record]
    if losses:
        ends = [f"{one['train/loss']:.4f} at step {one['train/global_step']}" for one in losses]
        lines.append(f"train/loss {f'went from {ends[0]} to ' if len(ends) > 1 else 'was '}{ends[-1]}")
    if rewarded:
        last = rewarded[-1]
        accuracy, margin = last["train/rewards/accuracies"], last["train/rewards/margins"]
        lines.append(
            f"rewards at step {last['train/global_step']}: accuracy {accuracy:.3f} (share of pairs whose "
            f"chosen answer has the higher reward), margin {margin:.3g}"
        )
    if held_out:
        last = held_out[-1]
        lines.append(f"held-out {', '.join(facts(last, 'eval'))}")
    return lines


def what_next(
    spec: Spec, export: Path, checkpoint: Path, *, has_new_rows: bool = False, is_misread: bool = False
) -> list[str]:
    """Return how to load the export and, where it has learned to answer, how to talk to it. has_new_rows: its
    embeddings have more rows than the base's; is_misread: peft's own loader would misread it."""
    lora, base = spec.model.lora, spec.model.name_or_path
    if lora is None:
        lines = [f"model: {export}, for transformers' from_pretrained"]
    else:
        over = base or "the fresh model, which no folder holds"
        loader = "AutoPeftModelForCausalLM" if has_new_rows else "PeftModel"  # it adds the new rows
        readers = f"for peft's {loader}.from_pretrained over {over}"
        if is_misread:
            readers = f"of {over}, not for peft's own loader"
        lines = [f"adapter: {export}, {readers}; the whole model: dsft export {checkpoint} OUT --merged"]
    if spec.model.head == "score":
        lines.append(f"score rows: dsft score {export if lora is None else 'OUT'} --data FILE --out FILE")
    elif spec.task_kind.answers and (lora is None or base is not None):
        lines.append(f"talk to it: dsft chat {export}")
    return lines
