"""The stored reference, from its processes to a run: killed and gone on with, made by one of two jobs at
once, written by other ranks than it is read by, and never in the process that trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from dsft.inputs import read_inputs
from dsft.plan.promised import load
from dsft.plan.reference import reference_model
from dsft.reference import store
from dsft.reference.key import key_of
from dsft.reference.store import Stored, store_folder
from dsft.system.lock import hold
from tests.integration.runs import records
from tests.launching import LATE, ROOT, end_group, torchrun
from tests.unit.reference.small import model, rows

WORKER = Path(__file__).parent / "reference_worker.py"
PAIRS, HELD_OUT = 60, 8
LARGER = {
    "model_type": "llama", "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
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


def started(spec: Path, ranks: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), "score", str(spec), str(ranks), *words],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def held(spec_path: Path) -> Stored:
    spec = load(spec_path)
    inputs = read_inputs(spec, lambda text: None)
    key = key_of(spec, reference_model(spec), inputs)
    return store.read(store_folder(spec, key), key, (PAIRS, HELD_OUT), pytest.fail)


def test_killed_and_gone_on_with_by_one_of_two_jobs(folder: Path) -> None:
    spec = write_spec(folder, "small", {"name_or_path": str(folder / "model")})
    first = started(spec, 2, "stall")
    try:
        shards = folder / "runs" / ".cache" / "reference"
        while len(list(shards.glob("*/shard-*.safetensors"))) < 4:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.01)
        children = psutil.Process(first.pid).children(recursive=True)
        assert len(children) == 2
        first.send_signal(signal.SIGKILL)
        first.communicate()
        assert not psutil.wait_procs(children, timeout=LATE)[1], "a child outlives its parent"
    finally:
        end_group(first.pid)
    there = PAIRS + HELD_OUT - held(spec).num_missing
    assert 0 < there < PAIRS + HELD_OUT

    (store_of_it,) = shards.iterdir()
    both = [started(spec, 1) for _ in range(2)]
    try:
        with hold(store_of_it, store.LOCK):
            told = [until_it_waits(job) for job in both]
        said = [before + job.communicate()[0] for before, job in zip(told, both, strict=True)]
    finally:
        for job in both:
            end_group(job.pid)
    assert [job.returncode for job in both] == [0, 0], said
    made = [text for text in said if "pairs scored in" in text]
    assert len(made) == 1, said
    assert f"{PAIRS + HELD_OUT - there} pairs scored in" in made[0] and f"{there} were there" in made[0]
    assert "4 of these scored again, with the same result" in made[0]
    check_values(spec, folder / "model", held(spec))


def until_it_waits(job: subprocess.Popen[str]) -> str:
    """What it says until it has found that another job holds the store."""
    assert job.stdout is not None
    said = ""
    while "scores the same pairs; waiting for it" not in said:
        line = job.stdout.readline()
        assert line, said
        said += line
    return said


def check_values(spec_path: Path, where: Path, found: Stored) -> None:
    """Against transformers alone, pair by pair."""
    assert not found.num_missing
    plain = AutoModelForCausalLM.from_pretrained(where)
    data = read_inputs(load(spec_path), lambda text: None).train
    for pair in (0, 7, PAIRS - 1):
        example = data[pair]
        border = example.segment_lengths[0]
        for answer, part in enumerate((slice(0, border), slice(border, None))):
            ids, trained = torch.from_numpy(example.input_ids[part]).long(), example.trained[part]
            with torch.no_grad():
                logps = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            expected = float(logps[torch.from_numpy(trained[1:])].double().sum())
            assert np.isclose(found.logps[0][pair, answer], expected, rtol=0, atol=1e-3)


def test_the_process_that_trains_never_has_the_reference(folder: Path) -> None:
    spec = write_spec(folder, "larger", {"from_config": LARGER})
    (folder / "b.jsonl").write_text((folder / "b.jsonl").read_text().splitlines()[0] + "\n")
    result = torchrun(WORKER, 2, ["train", str(spec), "data.train.0.max_rows=12"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "13 pairs scored in" in result.stdout
    told = re.findall(r"rank (\d): (\d+) models, peak raised by (.*) MB", result.stdout)
    assert sorted(rank for rank, _, _ in told) == ["0", "1"]
    for _, models, raised in told:
        assert models == "1" and float(raised) < MODEL_MB / 3
    losses = records(folder / "runs" / "larger", "train/loss")
    assert abs(losses[1] - np.log(2)) < 1e-5 and losses[2] != losses[1]
    assert (folder / "runs" / "larger" / "reference.json").is_file()
