"""`dsft rehearse` against real runs of two and four ranks: the bytes of live tensors, and the
collectives, of each phase; and small models with the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import forked, on_the_cpu

pytest.importorskip("deepspeed")

from dsft.commands.rehearse import in_processes, setup_of
from dsft.plan.build import build_plan
from tests.integration.rehearse_worker import CASES, plan_of
from tests.integration.runs import dsft
from tests.specs import llama, minimal_spec

PHASES = ("first_step", "steady", "evaluation", "save")
CLOSE = 0.01
KTO: dict[str, Any] = {
    "model": {"from_config": llama(16, 32, 2, 2)},
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": 16},
}


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
        for found in in_processes(setup_of(plan), plan, range(plan.layout.pipeline_stages)):
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


def test_json_on_a_cpu_is_all_that_is_printed_and_nothing_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"hosts": {"here": 2}, "accelerator": {"name": "cpu"}}
    spec = minimal_spec("kto", **KTO, cluster=cluster, kto={"reference": "precomputed"})
    path, compiled = tmp_path / "spec.yaml", tmp_path / "extensions"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    compiled.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(compiled))
    with on_the_cpu():
        done = dsft("rehearse", str(path), "--ranks", "2", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["kinds"][0]["phases"].keys() == {"load", *PHASES}
    assert list(compiled.iterdir()) == []


def test_the_plan_of_a_small_model_has_the_workspace_too() -> None:
    own = {"reference": "precomputed", "loss_type": "apo_zero_unpaired"}
    plan = build_plan(minimal_spec("kto", **KTO, train={"precision": "bf16"}, kto=own), 2)
    (found,) = in_processes(setup_of(plan), plan, (0,))
    errors = {name: one["planned"] / one["peak"] - 1 for name, one in found["phases"].items()}
    assert all(abs(error) < 0.1 for error in errors.values()), errors
