"""KTO: whole runs in several divisions of the same steps, equal to a plain loop over the global batch."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dsft.data.sets.order import epoch_order
from tests.integration.runs import prompt_rows, train, trained, write_model, write_small_task
from tests.integration.runs import series as series_of
from tests.selected import tiered

ROWS, BATCH, STEPS, SEED = 10, 4, 6, 42
TRAINED = f"global_batch_size: {BATCH}, max_steps: {STEPS}, seed: {SEED}"
BETA, DESIRABLE, UNDESIRABLE, RATE = 0.3, 1.5, 0.7, 0.05
WORDS = "red fox jumps over a lazy dog and then it sleeps".split()
LINES: list[dict[str, Any]] = [
    {
        "prompt": " ".join(WORDS[: 1 + n % 4]),
        "completion": " " + " ".join(WORDS[n % 5 : n % 5 + 1 + 3 * n % 7]),
        "label": n % 3 > 0,
    }
    for n in range(ROWS)
]
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
LORA = "model.lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj]}"
Row = tuple[list[int], list[int]]  # the tokens of a prompt and of an answer


# --- the plain loop, one sequence at a time, in float64 ---------------------------------------------------


def rows_of(model: Path) -> list[Row]:
    return prompt_rows(model, LINES)


def log_probability(model: nn.Module, prompt: list[int], answer: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(answer)), answer].sum()


def divergence(model: nn.Module, reference: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Of prompts with the answer of the row before them."""
    pairs = [(prompt, rows[n - 1][1]) for n, (prompt, _) in enumerate(rows)]
    with torch.no_grad():
        ratios = [log_probability(model, *one) - log_probability(reference, *one) for one in pairs]
    return torch.stack(ratios).mean().clamp(min=0)


def figures(model: nn.Module, reference: nn.Module, rows: list[Row], ids: list[int], z: Tensor) -> Any:
    """The loss of a global batch, and its metrics."""
    policy = torch.stack([log_probability(model, *rows[n]) for n in ids])
    with torch.no_grad():
        known = torch.stack([log_probability(reference, *rows[n]) for n in ids])
    good = torch.tensor([bool(LINES[n]["label"]) for n in ids])
    ratio = policy - known
    losses = torch.where(
        good,
        DESIRABLE * (1 - torch.sigmoid(BETA * (ratio - z))),
        UNDESIRABLE * (1 - torch.sigmoid(BETA * (z - ratio))),
    )
    rewards, shown = BETA * ratio.detach(), policy.detach()
    means = [rewards[good].mean(), rewards[~good].mean(), shown[good].mean(), shown[~good].mean()]
    values = [*means[:2], means[0] - means[1], *means[2:], z]
    return losses.mean(), dict(zip(NAMES, map(float, values), strict=True))


def plain(model: Path, *, has_baseline: bool = True) -> tuple[list[dict[str, float]], dict[str, float], Any]:
    """The loss and the metrics of each step, those of the held-out rows at the end, and the weights."""
    policy: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager"
    )
    reference, rows = copy.deepcopy(policy).requires_grad_(False), rows_of(model)
    optimizer, found = torch.optim.SGD(policy.parameters(), RATE), []

    def z(ids: list[int]) -> Tensor:
        if not has_baseline:
            return torch.zeros((), dtype=torch.float64)
        return divergence(policy, reference, [rows[n] for n in ids])

    for step in range(STEPS):
        epoch, place = divmod(step, math.ceil(ROWS / BATCH))
        ids = epoch_order(ROWS, SEED, epoch)[place * BATCH : (place + 1) * BATCH].tolist()
        loss, metrics = figures(policy, reference, rows, ids, z(ids))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append({"loss": loss.item()} | metrics)
    every, shuffled = list(range(ROWS)), epoch_order(ROWS, 0, 0).tolist()
    loss, metrics = figures(policy, reference, rows, every, z(shuffled))
    return found, {"loss": loss.item()} | metrics, policy.state_dict()


# --- the runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("kto") / "model")


def write_spec(folder: Path, model: Path, name: str) -> Path:
    rows, spec = model.parent / "rows.jsonl", folder / f"{name}.yaml"
    rows.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    section = f"beta: {BETA}, desirable_weight: {DESIRABLE}, undesirable_weight: {UNDESIRABLE}"
    return write_small_task(spec, "kto", model, rows, section, TRAINED, RATE)


def series(folder: Path, part: str = "train") -> list[dict[str, float]]:
    return series_of(folder, NAMES, part)


def check(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        known = {name: value for name, value in theirs.items() if not math.isnan(value)}
        assert ours == pytest.approx(known, rel=1e-6, abs=2e-6), number


CASES = {
    "alone": (1, ()),
    "micro": (2, ("train.micro_batch_size=2", "parallel.zero_stage=1", "kto.reference=live")),
    "packed": (2, ("data.packing=true", "parallel.zero_stage=2", "kto.reference=live")),
    "sharded": (2, ("parallel.zero_stage=3", "train.micro_batch_size=2")),
    "live3": (2, ("parallel.zero_stage=3", "data.packing=true", "kto.reference=live")),
    "stages": (2, ("parallel.pipeline_stages=2", "data.packing=true", "train.micro_batch_size=2")),
    "livestages": (2, ("parallel.pipeline_stages=2", "kto.reference=live")),
    "split": (2, ("parallel.sequence_parallel=2", "data.packing=true", "parallel.zero_stage=1")),
    "apo": (2, ("kto.loss_type=apo_zero_unpaired", "train.micro_batch_size=2")),
}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[bool, Any]:
    return {has_baseline: plain(model, has_baseline=has_baseline) for has_baseline in (True, False)}


def test_plain_loop_has_a_divergence_that_depends_on_the_batch(model: Path, expected: Any) -> None:
    """Else the comparisons would show little: pairs of half a batch, as of a micro-batch of two, differ."""
    steps, evaluated, weights = expected[True]
    assert [step["kl"] > 0.05 for step in steps] == [False, *[True] * (STEPS - 1)] and evaluated["kl"] > 0.05
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    reference, rows = copy.deepcopy(policy), rows_of(model)
    policy.load_state_dict(weights)
    ids = epoch_order(ROWS, SEED, 0)[:BATCH].tolist()
    whole, *halves = (
        float(divergence(policy, reference, [rows[n] for n in part])) for part in (ids, ids[:2], ids[2:])
    )
    assert abs(whole - sum(halves) / 2) > 0.01


ALWAYS = ("alone", "sharded", "livestages", "split", "apo")
"""Rows are packed in split and under ZeRO 2 below, the reference is live in livestages, ZeRO 3 in sharded."""


@pytest.mark.parametrize("name", tiered(CASES, ALWAYS))
def test_every_division_equals_the_plain_loop(
    name: str, model: Path, expected: dict[bool, Any], tmp_path: Path
) -> None:
    ranks, overrides = CASES[name]
    trained(write_spec(tmp_path, model, name), *overrides, nproc=ranks)
    folder, has_baseline = tmp_path / "runs" / name, name != "apo"
    steps, evaluated, weights = expected[has_baseline]
    if not has_baseline:
        steps = [{key: value for key, value in step.items() if key != "kl"} for step in steps]
        evaluated = {key: value for key, value in evaluated.items() if key != "kl"}
    check(series(folder), steps)
    check(series(folder, "eval"), [evaluated])
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    for key, value in weights.items():
        apart, moved = after[key].double() - value, value - before[key].double()
        assert apart.abs().max() <= 1e-6 * value.abs().max() and apart.norm() < 0.01 * moved.norm(), key


def test_adapter_off_equals_the_other_references(model: Path, tmp_path: Path) -> None:
    """With AdamW, whose second moment shows what is scaled otherwise."""
    found = {}
    for name, *overrides in (  # tests/parity always has one in stages
        ("stored",),
        ("adapter2", "kto.reference=adapter", "parallel.zero_stage=2", "data.packing=true"),
        ("adapter3", "kto.reference=adapter", "parallel.zero_stage=3"),
    ):
        spec = write_spec(tmp_path, model, name)
        optimizer = ("optim.name=adamw", "optim.learning_rate=0.01", "optim.eps=1e-4")
        trained(spec, LORA, *optimizer, *overrides, nproc=1 if name == "stored" else 2)
        found[name] = series(tmp_path / "runs" / name), series(tmp_path / "runs" / name, "eval")
    steps, evaluated = found.pop("stored")
    assert steps[-1]["kl"] > 0.01 and steps[-1]["loss"] != pytest.approx(steps[0]["loss"], rel=1e-3)
    for ours, ours_evaluated in found.values():
        check(ours, steps)
        check(ours_evaluated, evaluated)


def test_a_run_that_goes_on_changes_no_bit_and_may_be_prolonged(model: Path, tmp_path: Path) -> None:
    spec, folder = write_spec(tmp_path, model, "whole"), tmp_path / "runs" / "whole"
    trained(spec, "train.max_steps=4", nproc=1)
    first = series(folder)
    assert "reference: 6 rows scored" in trained(spec, nproc=1), "the answers of the new steps alone"
    whole = series(folder)
    assert whole[:4] == first and len(whole) == STEPS
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS}")
    shutil.rmtree(folder / "export")
    assert "going on from step 4" in trained(spec, nproc=1)
    assert series(folder) == whole
    refused = train(spec, "train.max_steps=8", "train.seed=7", nproc=1)
    assert refused.returncode != 0 and "train.seed was 42, now 7" in refused.stdout + refused.stderr


def test_store_that_is_scored_ahead_has_the_pairs_of_the_run(model: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, model, "ahead")
    assert "rows scored" in trained(spec, "--reference_only", nproc=2)
    shown = trained(spec, "train.max_steps=3", nproc=1)
    assert "rows scored" not in shown and "rows already stored" not in shown, shown
    refused = train(
        spec, "--reference_only", "train.global_batch_size=null", "train.accumulation_steps=4", nproc=1
    )
    assert refused.returncode != 0 and "train.global_batch_size" in refused.stdout + refused.stderr


def test_pairs_are_split_and_wrong_rows_are_named(model: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": f" yes {n}", "rejected": f" no {n}"} for n in range(6)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    spec = write_spec(tmp_path, model, "pairs")
    shown = trained(spec, f"data.train=[{{path: {tmp_path}/pairs.jsonl}}]", "train.max_steps=3", nproc=1)
    assert "12 rows gave 12 examples" in shown and "duplicate" not in shown
    assert np.isfinite([step["rewards/margins"] for step in series(tmp_path / "runs" / "pairs")]).all()
    (tmp_path / "bad.jsonl").write_text(
        '{"prompt": "a", "completion": "b", "label": true}\n{"prompt": "a", "completion": "b", "label": 3}\n'
        '{"prompt": "a", "completion": "b"}\n'
    )
    bad = train(spec, f"data.train=[{{path: {tmp_path}/bad.jsonl}}]", "name=bad", nproc=1)
    output = bad.stdout + bad.stderr
    assert bad.returncode != 0 and "bad.jsonl:2" in output and "bad.jsonl:3" in output, output
    assert "label" in output and "Traceback" not in output
