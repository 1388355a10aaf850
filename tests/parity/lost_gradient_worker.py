"""What test_lost_gradients.py launches on two ranks: first steps of engines that lose gradients.

    lost_gradient_worker.py OUTPUT.json

Rank 0 writes {fault: the message with which the first or second step ends, or null if none does}.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
import torch.distributed as dist

from dsft.dist.world import World
from dsft.engine import initialize, pipeline
from dsft.engine.build import build_engine
from dsft.engine.join import join
from dsft.engine.optimizer import build_optimizer
from dsft.errors import WorldError
from dsft.objective.next_token import next_token
from dsft.rank.environment import detect
from dsft.spec.layout import Layout
from tests.parity import plain
from tests.parity.cases import Case
from tests.parity.worker import RATES, SEED, VOCABULARY, make_spec, parts, share
from tests.process_groups import own_groups
from tests.swap_disk import why_no_swap

SWAPPED = Case("zero3_nvme", 2, "adamw", "four", shape="deepseek_v3_groups")
TIED = Case("pipeline_zero1_offload", 2, "adamw", "four", precision="bf16", stages=2, shape="llama_tied")
LOST = 3


def read_to_any_address() -> Any:
    return mock.patch.object(initialize, "align_gradients", lambda optimizer: None)


def leave_copies_alone() -> Any:
    return mock.patch.object(pipeline, "tie", lambda *given: None)


def optimizer_with(before: Callable[[Any], Any], after: Callable[[Any, Any], None]) -> Any:
    """Build optimizers that call `before` ahead of each step, and `after` with what it has returned."""

    def build(*given: Any, **named: Any) -> Any:
        optimizer, saved = build_optimizer(*given, **named), []
        optimizer.register_step_pre_hook(lambda *_: saved.append(before(optimizer)))
        optimizer.register_step_post_hook(lambda *_: after(optimizer, saved.pop()))
        return optimizer

    return mock.patch.object(initialize, "build_optimizer", build)


def keep_values_of_rank_1() -> Any:
    """Put the values back after the step, and leave the moments as they are."""

    def values(optimizer: Any) -> list[torch.Tensor]:
        return [p.data for group in optimizer.param_groups for p in group["params"]]

    def put_back(optimizer: Any, saved: list[torch.Tensor]) -> None:
        if dist.get_rank() == 1:
            for now, before in zip(values(optimizer), saved, strict=True):
                now.copy_(before)

    return optimizer_with(lambda optimizer: [value.clone() for value in values(optimizer)], put_back)


def lose_gradient() -> Any:
    """Of one parameter, on both ranks."""
    return optimizer_with(
        lambda optimizer: optimizer.param_groups[0]["params"][LOST].grad.zero_(), lambda *_: None
    )


FAULTS: dict[str, tuple[Case, Callable[[], Any]]] = {
    "sgd, lost gradient": (Case("zero0", 2, "sgd", "four", 0.1), lose_gradient),
    **{
        f"zero{n}, kept values": (Case(f"zero{n}", 2, "adamw", "four"), keep_values_of_rank_1) for n in (1, 3)
    },
    "zero2, kept values": (Case("zero2_offload", 2, "sgd", "four", precision="bf16"), keep_values_of_rank_1),
    "sgd": (Case("zero0", 2, "sgd", "four", 0.1), contextlib.nullcontext),
    "lora": (Case("zero2", 2, "adamw", "four", trains="lora_fresh"), contextlib.nullcontext),
    "tied copies": (TIED, leave_copies_alone),
}
ON_DISK: dict[str, tuple[Case, Callable[[], Any]]] = {
    "unaligned reads": (SWAPPED, read_to_any_address),
    "nvme, kept values": (SWAPPED, keep_values_of_rank_1),
    "nvme": (SWAPPED, contextlib.nullcontext),
}


def main(output: Path) -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    tempfile.tempdir = str(output.parent)
    world = join(detect(os.environ), Layout(2, 1))
    found = {}
    for name, (case, fault) in (FAULTS if why_no_swap() else FAULTS | ON_DISK).items():
        with own_groups(), fault():
            found[name] = first_steps(case, dataclasses.replace(world, layout=Layout(2, case.stages)))
    if world.rank == 0:
        output.write_text(json.dumps(found))
    world.close()


def first_steps(case: Case, world: World) -> str | None:
    spec = make_spec(case)
    policy, config = parts(case, spec, world)
    engine: Any = build_engine(policy, spec, config, world, next_token())
    steps = plain.make_steps(SEED, (4, 4), world.layout.data_parallel, VOCABULARY)
    try:
        for number, step in enumerate(steps):
            counts = {"tokens": plain.count(plain.rows_of(step)), "sequences": len(plain.rows_of(step))}
            engine.first_step(share(step, world, case), counts, RATES[case.optimizer], number)
    except WorldError as error:
        return str(error)
    finally:
        engine._engine.destroy()
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
