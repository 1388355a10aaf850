"""The commands that people type: one spec, several launchers, the same run; another world stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.runs import TRAIN, command, records, shows_traceback, trained, write_spec
from tests.launching import forked


def test_every_launcher_trains_the_same(tmp_path: Path) -> None:
    """Two processes by deepspeed, and one that is forked, have the same losses; the next test types python.
    tests/integration/test_stopped.py types torchrun too, and three processes are in tests/parity."""
    spec = write_spec(tmp_path)
    options = [str(spec), "train.max_steps=3", "checkpoint.every=null"]
    runs = {
        "one": forked(TRAIN, 1, [*options, "name=one"]),
        "deepspeed": command(
            ["deepspeed", "--num_gpus", "2", str(TRAIN), *options, "name=deepspeed"], cwd=tmp_path
        ),
    }
    for name, result in runs.items():
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = records(tmp_path / "runs" / "one", key)
        for name in runs:
            assert records(tmp_path / "runs" / name, key) == pytest.approx(expected, rel=1e-6), (name, key)
    left = list(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_29500_[01]"))  # its port
    assert not left, "DeepSpeed's shared memory outlives its processes"


def test_command_without_spec_runs_the_quickstart_from_any_folder(tmp_path: Path) -> None:
    done = command(["python", str(TRAIN), "train.max_steps=2", "wandb.mode=disabled"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "quickstart"
    left = {
        "spec.yaml",
        "deepspeed.json",
        "versions.json",
        "command.txt",
        "metrics.jsonl",
        "curves.png",
        "checkpoints",
        "export",
        "logs",
    }
    assert left <= {path.name for path in run.iterdir()}
    assert "train/loss went from" in done.stdout


RECORDING = """
import json, runpy, sys, deepspeed
initialize = deepspeed.initialize
def recorded(*, config, **rest):
    with open("given.json", "w") as file:
        json.dump(config, file)
    return initialize(config=config, **rest)
deepspeed.initialize = recorded
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program, and writes the configuration that it gives to DeepSpeed into given.json."""


def test_deepspeed_json_overrides_the_spec(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    chosen = tmp_path / "zero3.json"
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 5000}
    chosen.write_text(
        json.dumps({"zero_optimization": zero, "train_batch_size": 16, "gradient_clipping": "auto"})
    )
    options = ["train.max_steps=1", "--deepspeed_config", str(chosen)]
    result = command(["python", "-c", RECORDING, str(TRAIN), str(spec), *options], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "zero3.json: train_batch_size 16" in result.stdout
    assert "stage3_prefetch_bucket_size: the DeepSpeed JSON's 5,000 is used" in result.stdout
    config = json.loads((tmp_path / "runs" / "small" / "deepspeed.json").read_text())
    assert config == json.loads((tmp_path / "given.json").read_text())
    reasons = json.loads((tmp_path / "runs" / "small" / "deepspeed.reasons.json").read_text())
    assert "a quarter of the" in reasons["zero_optimization.reduce_bucket_size"]
    assert reasons["zero_optimization.stage3_prefetch_bucket_size"].startswith("zero3.json sets it; without")
    assert config["zero_optimization"]["stage"] == 3
    assert (config["train_batch_size"], config["gradient_clipping"]) == (12, 1.0)
    assert "zero_stage: 3" in (tmp_path / "runs" / "small" / "spec.yaml").read_text()

    strict = command(["python", str(TRAIN), str(spec), *options, "--strict"])
    assert (
        strict.returncode == 2 and "train_batch_size" in strict.stderr and not shows_traceback(strict.stderr)
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["python", TRAIN, "{spec}", "cluster.hosts={localhost: 2}"], 69,
         "expects 2 processes (localhost 2) but python started 1"),
        (["deepspeed", "--hostfile", "nowhere", TRAIN, "{spec}"], 1, "--hostfile nowhere does not exist"),
        pytest.param(  # as with a spec
            ["deepspeed", "--hostfile", "nowhere", TRAIN], 1, "--hostfile nowhere does not exist",
            marks=pytest.mark.long,
        ),
        pytest.param(  # as under python, in the words of tests/unit/rank/test_promise.py
            ["deepspeed", "--num_gpus", "2", TRAIN, "{spec}", "cluster.hosts={node1: 4}"], 1,
            "but deepspeed started 2: its --hostfile was left out", marks=pytest.mark.long,
        ),
        (["python", TRAIN, "nowhere.yaml"], 66, "the spec 'nowhere.yaml' does not exist"),
        (["python", TRAIN, "{spec}", "train.micro_batch_size=5"], 2,
         "12 is not a multiple of micro_batch_size 5"),
        (["python", TRAIN, "{spec}", "parallel.pipeline_stages=2"], 2,
         "2 does not divide the 1 processes"),
        (["python", TRAIN, "{spec}", "--deepspeed_config", "nowhere.json"], 66,
         "nowhere.json: there is no such file"),
    ],
)  # fmt: skip
def test_wrong_start_is_refused_before_training(
    tmp_path: Path, words: list[object], code: int, message: str
) -> None:
    spec = write_spec(tmp_path)
    result = command([str(word).replace("{spec}", str(spec)) for word in words], cwd=tmp_path)
    assert message in result.stdout + result.stderr
    # deepspeed ends with its rank's code, or with 1 where it is not the first to end
    assert result.returncode == code or (words[0] == "deepspeed" and result.returncode != 0)
    assert not shows_traceback(result.stderr)
    assert not (tmp_path / "runs").exists(), "nothing may have been trained"


def test_finished_run_says_so_and_resumes_with_more_steps(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    trained(spec, "train.max_steps=2")
    assert "small is finished at step 2" in trained(spec, "train.max_steps=2")
    assert "going on from step 2" in trained(spec, "train.max_steps=3")
    assert sorted(records(tmp_path / "runs" / "small", "train/loss")) == [1, 2, 3]
