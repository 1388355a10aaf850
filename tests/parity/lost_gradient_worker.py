"""What test_lost_gradients.py launches on two ranks: first steps of engines that lose gradients.

    lost_gradient_worker.py OUTPUT.json

Rank 0 writes {fault: the message of `first_step`, or null if it raises nothing}.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.utils import groups

from dsft.engine import initialize, pipeline
from dsft.engine.build import build_engine
from dsft.engine.world import World, join
from dsft.errors import WorldError
from dsft.objective.next_token import next_token
from dsft.rank.environment import detect
from dsft.spec.layout import Layout
from tests.parity import plain
from tests.parity.cases import Case
from tests.parity.worker import RATES, SEED, VOCABULARY, make_spec, parts, share
from tests.process_groups import own_groups

SWAPPED = Case("zero3_nvme", 2, "adamw", "four", shape="deepseek_v3_groups")
TIED = Case("pipeline_zero1_offload", 2, "adamw", "four", precision="bf16", stages=2, shape="llama_tied")


def read_to_any_address() -> Any:
    return mock.patch.object(initialize, "align_gradients", lambda optimizer: None)


def leave_copies_alone() -> Any:
    return mock.patch.object(pipeline, "tie", lambda *given: None)


FAULTS: dict[str, tuple[Case, Callable[[], Any]]] = {
    "unaligned reads": (SWAPPED, read_to_any_address),
    "tied copies": (TIED, leave_copies_alone),
    "none": (SWAPPED, contextlib.nullcontext),
}


def main(output: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tempfile.tempdir = str(output.parent)
    world = join(detect(os.environ), Layout(2, 1))
    found = {}
    for name, (case, fault) in FAULTS.items():
        with own_groups(), fault():
            found[name] = first_step(case, dataclasses.replace(world, layout=Layout(2, case.stages)))
        groups.mpu = None
        gc.collect()
    if world.rank == 0:
        output.write_text(json.dumps(found))
    world.close()


def first_step(case: Case, world: World) -> str | None:
    spec = make_spec(case)
    policy, config = parts(case, spec, world)
    engine: Any = build_engine(policy, spec, config, world, next_token())
    step = plain.make_steps(SEED, (4,), world.layout.data_parallel, VOCABULARY)[0]
    counts = {"tokens": plain.count(plain.rows_of(step)), "sequences": len(plain.rows_of(step))}
    try:
        engine.first_step(share(step, world, case), counts, RATES["adamw"])
    except WorldError as error:
        return str(error)
    finally:
        engine._engine.destroy()
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
