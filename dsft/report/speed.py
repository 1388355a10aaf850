"""Read the speed that a run measured, for the plan of another one."""

from __future__ import annotations

from pathlib import Path

from dsft.errors import MissingInputError
from dsft.plan.duration import Measured
from dsft.report.jsonl import STEP, read_metrics
from dsft.spec.differences import json_differences
from dsft.spec.document import parse_yaml
from dsft.spec.schema import Spec
from dsft.system.json_file import read_text
from dsft.system.run_folder import named_run

DECIDES = ("model.", "data.max_length", "data.packing", "data.max_tokens", "parallel.", "cluster.accelerator")
TRAIN = ("train.precision", "train.micro_batch_size", "train.accumulation_steps", "optim.name", "task")
"""Keys, or beginnings of keys, that change the speed of a run."""


def measured_speed(name: str, spec: Spec) -> Measured:
    """Return the speed of a run, without that of its first record, which has what happens once. spec: of the
    run that is planned. Raises MissingInputError if there is no such run, or no step of it was measured."""
    run = named_run(name)
    tokens = seconds = devices = before = 0.0
    timed = [one for one in read_metrics(run / "metrics.jsonl") if one.get("perf/step_time", 0) > 0]
    for number, record in enumerate(timed):
        speed, steps = record["perf/tokens_per_second"], record[STEP] - before
        before = record[STEP]
        if number or len(timed) == 1:
            seconds += steps * record["perf/step_time"]
            tokens += steps * record["perf/step_time"] * speed
            devices = speed / record["perf/tokens_per_second_per_gpu"]
    if not tokens:
        raise MissingInputError(f"{run} has no speed yet; name a run that has trained some steps.")
    return Measured(str(run), tokens / seconds, round(devices), _differing(run, spec))


def _differing(run: Path, spec: Spec) -> tuple[str, ...]:
    """Return the keys that change the speed and have other values in the run's spec."""
    try:
        theirs = parse_yaml(read_text(run / "spec.yaml"))
    except (OSError, ValueError):
        return ("spec.yaml, which cannot be read",)
    found = json_differences(theirs, spec.model_dump(mode="json"))
    return tuple(
        one.key for one in found if one.key.startswith((*DECIDES, *TRAIN)) and not one.is_of_empty_values
    )
