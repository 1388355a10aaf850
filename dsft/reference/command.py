"""The pairs of a spec scored by its reference, ahead of its runs: on this host (`dsft reference`), or by any
launcher (`dsft/train.py --reference_only`).

Takes a spec. Writes the store, and prints what was decided, where it is and what to type next.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from dsft.engine.world import join
from dsft.identity import of_process
from dsft.inputs import read_inputs
from dsft.launch.environment import Launched
from dsft.plan.launch import environment
from dsft.plan.layout import Layout
from dsft.plan.promised import load
from dsft.plan.reference import check_precomputed, reference_layout
from dsft.reference.passes import micro_batch_size
from dsft.reference.precomputed import Processes, precompute
from dsft.spec.schema import Spec
from dsft.system.host import free_port

Say = Callable[[str], None]
say: Say = partial(print, flush=True)


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


def score_as_launched(spec: Spec, micro_batch_size: int, launched: Launched, places: Layout) -> None:
    """On one rank of a launched world, each of which starts a child. Raises as `score` does."""
    world = join(launched, places, identity=of_process(spec, {}), promised=spec.accelerator)
    tell: Say = say if world.rank == 0 else lambda text: None
    inputs = world.each(lambda: read_inputs(spec, tell, first=world.rank == 0))
    precompute(spec, micro_batch_size, inputs, Processes(world, launched), tell, again=True)
    tell("next: the same command without --reference_only trains")
    world.close()
