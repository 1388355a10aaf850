"""Read the speed that a run measured, for the plan of another one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from dsft.errors import MissingInputError
from dsft.plan.duration import Measured
from dsft.report.jsonl import STEP, read_metrics
from dsft.spec.differences import json_differences
from dsft.spec.document import parse_yaml
from dsft.spec.schema import Spec
from dsft.system.json_file import read_text, reason_of
from dsft.system.run_folder import named_run

DECIDES = ("model.", "data.max_length", "data.packing", "data.max_tokens", "parallel.", "cluster.accelerator")
TRAIN = (
    "train.precision", "train.global_batch_size", "train.micro_batch_size", "train.accumulation_steps",
    "optim.name", "task",
)  # fmt: skip
"""Keys, or beginnings of keys, that change the speed of a run."""


TIMED = ("perf/step_time", "perf/tokens_per_second", "perf/tokens_per_second_per_gpu")


def measured_speed(name: str, spec: Spec) -> Measured:
    """Return the speed of a run on the devices that it has now, without that of its first record, which has
    what happens once. spec: of the run that is planned. Raises MissingInputError if there is no such run, or
    no step of it was measured."""
    run = named_run(name)
    tokens = seconds = before = 0.0
    try:
        records = read_metrics(run / "metrics.jsonl")
    except OSError as error:
        raise MissingInputError(
            f"{run / 'metrics.jsonl'} {reason_of(error)}; it has the run's speed"
        ) from None
    timed = [one for one in records if all(0 < one.get(key, 0) < math.inf for key in TIMED)]
    devices = _devices(timed[-1]) if timed else 0
    for number, record in enumerate(timed):
        steps, (taken, speed, _) = record[STEP] - before, (record[key] for key in TIMED)
        before = record[STEP]
        if (number or len(timed) == 1) and _devices(record) == devices:
            seconds += steps * taken
            tokens += steps * taken * speed
    if tokens <= 0:
        raise MissingInputError(f"{run} has no speed yet; name a run that has trained some steps.")
    return Measured(str(run), tokens / seconds, devices, _differing(run, spec))


def _devices(record: Mapping[str, float]) -> int:
    _, speed, of_device = (record[key] for key in TIMED)
    return max(1, round(speed / of_device))


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
