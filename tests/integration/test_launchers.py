"""The commands that people type: one spec, several launchers, the same run; another world stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.runs import TRAIN, command, records, shows_traceback, trained, write_spec
from tests.launching import forked


def test_command_without_spec_runs_the_quickstart_from_any_folder(tmp_path: Path) -> None:
    done = command(["python", str(TRAIN), "train.max_steps=2", "wandb.mode=disabled"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "quickstart"
    left = {
        "spec.yaml", "deepspeed.json", "versions.json", "command.txt", "metrics.jsonl", "curves.png",
        "checkpoints", "export", "logs",
    }  # fmt: skip
    assert left <= {path.name for path in run.iterdir()}
    assert "train/loss went from" in done.stdout


RECORDING = f"""
import json, os, runpy, sys, deepspeed
initialize = deepspeed.initialize
def recorded(*, config, **rest):
    if os.environ["RANK"] == "0":
        with open({{folder!r}} + "/given.json", "w") as file:
            json.dump([config, os.environ["MASTER_PORT"]], file)
    return initialize(config=config, **rest)
deepspeed.initialize = recorded
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""
"""train.py, which writes the configuration that it gives to DeepSpeed, and its port, into given.json."""


def test_two_processes_train_the_same_with_a_json_that_overrides_the_spec(tmp_path: Path) -> None:
    """Two at the JSON's ZeRO 3, and one, have the same losses. tests/integration/test_stopped.py types
    deepspeed and torchrun, and three processes are in tests/parity."""
    spec, chosen, program = write_spec(tmp_path), tmp_path / "zero3.json", tmp_path / "recording.py"
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 5000}
    chosen.write_text(
        json.dumps({"zero_optimization": zero, "train_batch_size": 16, "gradient_clipping": "auto"})
    )
    program.write_text(RECORDING.format(folder=str(tmp_path)))
    words = [str(spec), "train.max_steps=3", "checkpoint.every=null"]
    options = ["--deepspeed_config", str(chosen)]
    one = forked(TRAIN, 1, [*words, "name=one"])
    two = forked(program, 2, [*words, *options])
    for result in (one, two):
        assert result.returncode == 0, result.stdout + result.stderr
    run = tmp_path / "runs" / "small"
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        expected = records(tmp_path / "runs" / "one", key)
        assert records(run, key) == pytest.approx(expected, rel=1e-6), key
    given, port = json.loads((tmp_path / "given.json").read_text())
    left = list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_[01]"))
    assert not left, "DeepSpeed's shared memory outlives its processes"

    assert "zero3.json: train_batch_size 16" in two.stdout
    assert "stage3_prefetch_bucket_size: the DeepSpeed JSON's 5,000 is used" in two.stdout
    config = json.loads((run / "deepspeed.json").read_text())
    assert config == given
    reasons = json.loads((run / "deepspeed.reasons.json").read_text())
    assert "a quarter of the" in reasons["zero_optimization.reduce_bucket_size"]
    assert reasons["zero_optimization.stage3_prefetch_bucket_size"].startswith("zero3.json sets it; without")
    assert config["zero_optimization"]["stage"] == 3
    assert (config["train_batch_size"], config["gradient_clipping"]) == (12, 1.0)
    assert "zero_stage: 3" in (run / "spec.yaml").read_text()

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
