"""`dsft plan` and `dsft generate` as commands."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.plan.census import Census, Parameter

QUICKSTART = str(Path(__file__).resolve().parents[3] / "specs" / "quickstart.yaml")
CENSUS = Census("LlamaForCausalLM", 4, 512, (Parameter("w", (1000, 1000), 0, False, ()),))


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: CENSUS)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_plan_shows_the_world_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # it would set the width
    code, out = run("plan", QUICKSTART, "train.micro_batch_size=4", "--processes", "3")
    assert code == 0
    assert "global_batch_size 12 = micro_batch_size 4 × accumulation_steps 1 × data-parallel ranks 3" in out


def test_plan_for_programs_is_json_alone_with_all_keys_of_a_given_world() -> None:
    plain, given = (run("plan", QUICKSTART, "--json", *words) for words in ((), ("--processes", "4")))
    assert plain[0] == 0 and json.loads(plain[1])["batch"]["global_batch_size"] == 8
    assert "train_batch_size" not in json.loads(plain[1])["deepspeed"]
    assert json.loads(given[1])["deepspeed"]["train_batch_size"] == 32


def test_plan_explains_keys_when_asked() -> None:
    assert "zero_allow_untested_optimizer" not in run("plan", QUICKSTART)[1]
    assert "zero_allow_untested_optimizer" in run("plan", QUICKSTART, "--explain")[1]


def test_generate_writes_and_checks(tmp_path: Path) -> None:
    code, out = run("generate", QUICKSTART, "--out", str(tmp_path), "--check")
    assert code == 1 and "+++ ds_configs/quickstart.json (from the spec)" in out
    code, out = run("generate", QUICKSTART, "--out", str(tmp_path))
    assert code == 0 and "no hostfile and no scripts for torchrun and Slurm, since" in out
    assert run("generate", QUICKSTART, "--out", str(tmp_path), "--check")[0] == 0
    assert run("generate", QUICKSTART, "parallel.zero_stage=3", "--out", str(tmp_path), "--check")[0] == 1
