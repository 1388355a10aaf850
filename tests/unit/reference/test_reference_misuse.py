"""What `dsft reference` starts, and what it and `--reference_only` say where there is nothing to score."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from dsft import cli
from dsft.errors import SpecError, WorldError
from dsft.plan.reference import check_precomputed
from dsft.rank.start import run_ranks
from dsft.reference.precomputed import micro_batch_size, scoring_batch
from dsft.setup.inputs import read_inputs
from dsft.spec.load import load_spec
from tests.launching import ROOT
from tests.unit.reference.small import TINY, model, rows, spec


@pytest.mark.parametrize("changed, shown", [
    ({"task": "sft"}, "task: task sft has no reference; start dsft/train.py"),
    ({"dpo": {"loss_type": "simpo"}}, "dpo.loss_type: simpo needs no reference"),
    ({"dpo": {"reference": "live"}}, "dpo.reference: live computes the reference while it trains"),
    ({"dpo": {"reference": "adapter"}}, "dpo.reference: adapter computes the reference while it trains"),
])  # fmt: skip
def test_nothing_to_score(changed: dict[str, Any], shown: str, tmp_path: Path) -> None:
    sections = {name: keys for name, keys in changed.items() if name != "task"}
    asked = spec(tmp_path, sections).model_copy(update={k: v for k, v in changed.items() if k == "task"})
    with pytest.raises(SpecError) as raised:
        check_precomputed(asked, "dsft reference")
    assert "nothing for dsft reference to score" in str(raised.value) and shown in str(raised.value)


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    """Its spec."""
    model(tmp_path / "model")
    rows(tmp_path / "a.jsonl", 2)
    rows(tmp_path / "b.jsonl", 1)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(spec(tmp_path).model_dump(mode="json", exclude_unset=True)))
    return path


def test_a_reference_whose_rows_cannot_be_split_as_the_policys(small_run: Path) -> None:
    other = small_run.parent / "other"
    config = LlamaConfig(**TINY | {"hidden_size": 18, "num_attention_heads": 3})
    LlamaForCausalLM(config).save_pretrained(other)
    changed = ["parallel.sequence_parallel=2", "train.global_batch_size=2", f"dpo.reference_model={other}"]
    with pytest.raises(SpecError, match="2 does not divide the model's 3 attention heads") as raised:
        read_inputs(load_spec(small_run, changed), lambda text: None)
    assert f"(the model is dpo.reference_model, {str(other)!r})" in str(raised.value)


def test_dsft_reference_starts_train_py_on_its_own_ranks(
    small_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_run
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    for name in ("RANK", "SLURM_PROCID", "NNODES", "KEPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("dsft.reference.start.run_ranks", lambda *given: started.append(given[:3]))
    with pytest.raises(typer.Exit):
        cli.reference(path, ["train.seed=1"], 1)
    for overrides, ranks in ((None, 3), (["parallel.sequence_parallel=2"], None)):
        with pytest.raises(typer.Exit):
            cli.reference(path, overrides, ranks)
    with pytest.raises(SpecError, match="nothing for dsft reference to score"):
        cli.reference(path, ["dpo.reference=live"], 1)
    (program, *one), (*several, count), (*_, fewest) = started
    assert program == sys.executable and count == 3 and fewest == 2  # without a GPU
    for argv, environ in (one, several):
        assert argv[:3] == [sys.executable, str(ROOT / "dsft" / "train.py"), str(path)]
        assert environ["KEPT"] == "1" and not {"RANK", "SLURM_PROCID", "NNODES"} & environ.keys()
    assert one[0][3:] == ["train.seed=1", "--reference_only", "--any_ranks"]
    assert several[0][3:] == ["--reference_only", "--any_ranks"]


@pytest.mark.parametrize("program, code", [
    ("sys.exit(0)", 0),
    ("rank == 1 and sys.exit(73); time.sleep(60)", 73),
])  # fmt: skip
def test_the_exit_code_is_that_of_the_first_rank_that_fails(
    program: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsft.rank.start.GRACE", 0.5)
    assert run_ranks(_rank(program), os.environ, 2, "that is all.") == code


def test_ranks_get_the_signals_of_the_command(tmp_path: Path) -> None:
    program = f"""
ready = {str(tmp_path / "ready")!r}
if rank:
    open(ready, "w").close()
else:
    while not os.path.exists(ready):
        time.sleep(0.1)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(60)"""
    assert run_ranks(_rank(program), os.environ, 2, "that is all.") == 75


def test_a_rank_killed_by_a_signal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.rank.start.GRACE", 0.5)
    program = "rank == 1 and os.kill(os.getpid(), signal.SIGKILL); time.sleep(60)"
    named = r"rank 1 was killed by signal 9 \(as the system does.*; that is all\.$"
    with pytest.raises(WorldError, match=named):
        run_ranks(_rank(program), os.environ, 2, "that is all.")


def _rank(program: str) -> list[str]:
    """A rank that ends with 75 when it is asked to stop."""
    words = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
    words += "rank = int(os.environ['RANK']); assert os.environ['WORLD_SIZE'] == '2'; "
    return [sys.executable, "-c", words + program]


def test_a_pass_has_the_runs_micro_batches_on_any_number_of_ranks(tmp_path: Path) -> None:
    asked = spec(tmp_path)
    check_precomputed(asked, "dsft reference")
    assert micro_batch_size(asked, 3) == 2
    by_total = spec(tmp_path, {"train": {"micro_batch_size": None, "global_batch_size": 12}})
    assert [micro_batch_size(by_total, ranks) for ranks in (1, 3, 5, 100)] == [12, 4, 2, 1]
    for ranks in (1, 3, 5):
        sizes = scoring_batch(by_total, 4, ranks)
        assert (sizes.micro_batch_size, sizes.accumulation_steps, sizes.data_parallel) == (4, 1, ranks)
    packed = spec(tmp_path, {"data": {"packing": True}})
    assert scoring_batch(packed, 4, 2).tokens_per_micro_batch == 4 * 2 * 256


def test_an_accelerator_that_deepspeed_does_not_know(small_run: Path) -> None:
    """DeepSpeed says so while it is imported."""
    argv = [sys.executable, str(ROOT / "dsft" / "train.py"), str(small_run), "--reference_only"]
    ran = subprocess.run(argv, env={**os.environ, "DS_ACCELERATOR": "foo"}, capture_output=True, text=True)
    assert ran.returncode == WorldError.exit_code
    assert "error: DS_ACCELERATOR must be one of" in ran.stderr and "Traceback" not in ran.stderr
