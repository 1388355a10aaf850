"""`dsft rehearse` against real runs of two and four ranks: the bytes of live tensors, and the
collectives, of each phase."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu

pytest.importorskip("deepspeed")

from dsft.commands.rehearse import rehearse_rank, setup_of
from tests.integration.rehearse_worker import CASES, plan_of

PHASES = ("first_step", "steady", "evaluation", "save")
CLOSE = 0.01


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_rehearsal_allocates_and_sends_what_a_run_does(ranks: int) -> None:
    with on_the_cpu():
        done = forked(Path(__file__).with_name("rehearse_worker.py"), ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(runs) == ranks * len(CASES)
    wrong: dict[str, Any] = {}
    for name in CASES:
        plan = plan_of(name, ranks)
        stages = range(plan.layout.pipeline_stages)
        asked = [(setup_of(plan), plan, stage) for stage in stages]
        with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
            rehearsed = pool.starmap(rehearse_rank, asked, chunksize=1)
        for found in rehearsed:
            run = next(one for one in runs if (one["case"], one["rank"]) == (name, found["rank"]))
            for phase in PHASES:
                ours, theirs = found["phases"][phase], run["phases"][phase]
                if abs(ours["peak"] / theirs["peak"] - 1) > CLOSE:
                    wrong[f"{name}, stage {found['stage']}, {phase}"] = ours["peak"], theirs["peak"]
                if ours["collectives"] != sorted(theirs["collectives"]):
                    wrong[f"{name}, stage {found['stage']}, {phase}, sent"] = (
                        ours["collectives"],
                        theirs["collectives"],
                    )
    assert wrong == {}
