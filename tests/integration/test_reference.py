"""The stored reference, from its pass to a run: killed and gone on with, made by one of two jobs at once,
written by other ranks than it is read by, and its memory given back before the policy is built."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from dsft.plan.reference import reference_model
from dsft.reference.key import key_of
from dsft.reference.store import LOCK, Store, StoreContents
from dsft.setup.inputs import read_inputs
from dsft.spec.load import load_spec
from dsft.system.lock import lock_folder
from tests.integration.runs import records
from tests.launching import ROOT, end_group, forked, on_the_cpu
from tests.specs import llama
from tests.unit.reference.small import model, rows

WORKER = Path(__file__).parent / "reference_worker.py"
PAIRS, HELD_OUT = 60, 8
LARGER = llama(384, 1536, 6, 4, 4, max_position_embeddings=256)
MODEL_MB = 57  # of LARGER, in fp32


def write_spec(folder: Path, name: str, made_of: dict[str, object]) -> Path:
    given = {
        "name": name,
        "task": "dpo",
        "output_dir": str(folder / "runs"),
        "model": made_of,
        "data": {"train": [{"path": str(folder / "a.jsonl")}], "eval": [{"path": str(folder / "b.jsonl")}],
                 "max_length": 256},
        "train": {"micro_batch_size": 2, "accumulation_steps": 1, "max_steps": 2, "precision": "fp32",
                  "eval_every": 2, "log_every": 1},
        "optim": {"learning_rate": 1.0e-3},
        "wandb": {"mode": "disabled"},
        "dpo": {"beta": 0.1},
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model(tmp_path / "model")
    rows(tmp_path / "a.jsonl", PAIRS)
    rows(tmp_path / "b.jsonl", HELD_OUT, "held out")
    return tmp_path


def reference(spec: Path) -> subprocess.Popen[str]:
    """`dsft reference` on one rank."""
    return subprocess.Popen(
        [sys.executable, "-c", "from dsft.cli import main; main()", "reference", str(spec)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def interrupted(signal: str, ranks: str, spec: Path, *words: str) -> tuple[str, dict[int, int]]:
    """Return what two ranks have printed, of which some got a signal when each had written two shards, and
    their exit codes."""
    with on_the_cpu():
        shown = forked(WORKER, 2, [signal, ranks, str(spec), *words], supervised=False).stderr
    codes = re.findall(r"rank (\d) ended with exit code (-?\d+)", shown)
    return shown, {int(rank): int(code) for rank, code in codes}


def held(spec_path: Path) -> StoreContents:
    spec = load_spec(spec_path)
    inputs = read_inputs(spec, lambda text: None)
    key = key_of(spec, reference_model(spec), inputs)
    return Store.of(spec, key).read([(PAIRS, 2), (HELD_OUT, 2)], pytest.fail)


def test_after_a_killed_rank_one_of_two_jobs_continues(folder: Path) -> None:
    spec = write_spec(folder, "small", {"name_or_path": str(folder / "model")})
    said, codes = interrupted("SIGKILL", "1", spec, "--reference_only")
    assert "rank 0: rank 1 has ended too early, so this one ends too" in said
    assert codes == {0: 69, 1: -signal.SIGKILL}, said
    there = PAIRS + HELD_OUT - held(spec).num_missing
    assert 0 < there < PAIRS + HELD_OUT

    (store_of_it,) = (folder / "runs" / ".cache" / "reference").iterdir()
    both = [reference(spec) for _ in range(2)]
    try:
        with lock_folder(store_of_it, LOCK):
            logged = [until_it_waits(job) for job in both]
        shown = [before + job.communicate()[0] for before, job in zip(logged, both, strict=True)]
    finally:
        for job in both:
            end_group(job.pid)
    assert [job.returncode for job in both] == [0, 0], shown
    made = [text for text in shown if "pairs scored in" in text]
    assert len(made) == 1, shown
    assert f"{PAIRS + HELD_OUT - there} pairs scored in" in made[0]
    assert f"{there} pairs already stored" in made[0]
    assert "4 of these scored again, with the same result" in made[0]
    assert f"next: dsft launch {spec}" in made[0]
    check_values(spec, folder / "model", held(spec))


def until_it_waits(job: subprocess.Popen[str]) -> str:
    """What it says until it has found that another job holds the store."""
    assert job.stdout is not None
    shown = ""
    while "which is scoring the same rows" not in shown:
        line = job.stdout.readline()
        assert line, shown
        shown += line
    return shown


def check_values(spec_path: Path, where: Path, found: StoreContents) -> None:
    """Against transformers alone, pair by pair."""
    assert not found.num_missing
    plain = AutoModelForCausalLM.from_pretrained(where)
    data = read_inputs(load_spec(spec_path), lambda text: None).train
    for pair in (0, 7, PAIRS - 1):
        example = data[pair]
        border = example.segment_lengths[0]
        for answer, part in enumerate((slice(0, border), slice(border, None))):
            ids, trained = torch.from_numpy(example.input_ids[part]).long(), example.trained[part]
            with torch.no_grad():
                logps = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            expected = float(logps[torch.from_numpy(trained[1:])].double().sum())
            assert np.isclose(found.logps[0][pair, answer], expected, rtol=0, atol=1e-3)


@pytest.mark.long  # a rank is always killed in the pass, and a run always asked to stop in test_stopped.py
def test_a_run_is_stopped_in_the_pass(folder: Path) -> None:
    spec = write_spec(folder, "small", {"name_or_path": str(folder / "model")})
    said, codes = interrupted("SIGTERM", "01", spec)
    assert "stopped by SIGTERM before its first step; the same command starts it again" in said
    assert codes == {0: 75, 1: 75}, said
    assert 0 < held(spec).num_missing < PAIRS + HELD_OUT


def test_the_memory_of_the_reference_is_given_back_before_the_policy_is_built(folder: Path) -> None:
    spec = write_spec(folder, "larger", {"from_config": LARGER})
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text().splitlines()[0] + "\n")
    result = forked(WORKER, 2, ["train", str(spec), "data.train.0.max_rows=12"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "13 pairs scored in" in result.stdout
    logged = re.findall(r"rank (\d): built beside (\d+) models and (.*) MiB", result.stdout)
    assert sorted((rank, models) for rank, models, _ in logged) == [
        ("0", "0"),
        ("0", "0"),
        ("1", "0"),
        ("1", "0"),
    ]
    assert max(float(more) for *_, more in logged) < MODEL_MB / 2, "code that the pass has loaded stays"
    losses = records(folder / "runs" / "larger", "train/loss")
    assert abs(losses[1] - np.log(2)) < 1e-5 and losses[2] != losses[1]
    assert (folder / "runs" / "larger" / "reference.json").is_file()
