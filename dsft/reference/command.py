"""The command `dsft reference`: scores the pairs of a spec by its reference, ahead of its runs, on this host.

Takes a spec's path. Writes the store, and prints what was decided, where it is and what to type next.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from dsft.inputs import read_inputs
from dsft.launch.environment import Launched, free_port
from dsft.plan.launch import environment
from dsft.plan.promised import load
from dsft.plan.reference import check_precomputed, reference_layout
from dsft.reference.passes import micro_batch_size
from dsft.reference.precomputed import Processes, precompute

say = partial(print, flush=True)


def score(spec_path: Path, overrides: Sequence[str], ranks: int | None) -> None:
    """`ranks` processes; by default one a GPU of this host, one where there is none.

    Raises SpecError where the spec has nothing to score, or its stages do not divide the processes; and what
    a run would raise at its start for the same data and reference.
    """
    spec = load(spec_path, overrides)
    check_precomputed(spec, "dsft reference")
    count = ranks or torch.cuda.device_count() or 1
    places = reference_layout(spec, count)
    os.environ.update(environment(spec.cluster))
    inputs = read_inputs(spec, say)
    say(f"reference: {count} {'process' if count == 1 else 'processes'} on this host")
    alone = Launched("dsft", 0, 1, 0, "127.0.0.1", free_port())
    size = micro_batch_size(spec, places.data_parallel)
    try:
        precompute(spec, size, inputs, Processes(None, alone, count), say, again=True)
    except KeyboardInterrupt:
        say("stopped: what is scored is kept, and the same command goes on from there")
        raise
    say(f"next: deepspeed dsft/train.py {shlex.join([str(spec_path), *overrides])}")
