"""Whole runs: supervised, then DPO from its export, then its own export; and DPO that stops and goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.data.tokenizer.load import byte_level_tokenizer, num_ids
from tests.architectures.wholes import WHOLES, small_whole
from tests.integration.runs import TRAIN, records, trained, write_spec
from tests.launching import alone

STEPS, MIDDLE = 6, 3
METRICS = (
    *("train/loss", "train/grad_norm", "train/rewards/chosen", "train/rewards/rejected"),
    *("train/rewards/margins", "train/rewards/accuracies", "train/logps/chosen", "train/logps/rejected"),
    *("eval/loss", "eval/rewards/margins", "eval/rewards/accuracies", "eval/logps/rejected"),
)
DPO = """
name: preferred
task: dpo
model: {{name_or_path: "{supervised}"}}
data:
  train: [{{path: "{supervised}/../pairs.jsonl"}}]
  eval_fraction: 0.15
  max_length: 128
train: {{global_batch_size: 8, micro_batch_size: 2, max_steps: {steps}, eval_every: 3, eval_on_start: true,
  precision: fp32}}
optim: {{learning_rate: 1.0e-3, weight_decay: 0.0, eps: 1.0e-4}}
checkpoint: {{every: {middle}, keep_last: null}}
wandb: {{mode: disabled}}
output_dir: "{folder}/runs"
"""


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a supervised run, with pairs beside it."""
    folder = tmp_path_factory.mktemp("supervised")
    trained(write_spec(folder), "train.max_steps=4")
    write_pairs(folder / "runs" / "small" / "pairs.jsonl")
    return folder / "runs" / "small" / "export"


def write_pairs(path: Path) -> None:
    sums = [(a, b) for a in range(2, 10) for b in range(2, 7)]
    pairs = [
        {
            "prompt": f"What is {a} plus {b}?" if a % 3 else f"{a} + {b} =",
            "chosen": f"{a} plus {b} is {a + b}.",
            "rejected": f"It is {a * b}." if b % 2 else f"I would rather not say what {a} plus {b} may be.",
        }
        for a, b in sums
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def write_dpo(folder: Path, supervised: Path) -> Path:
    path = folder / "preferred.yaml"
    path.write_text(DPO.format(supervised=supervised, folder=folder, steps=STEPS, middle=MIDDLE))
    return path


@pytest.fixture(scope="module")
def preferred(tmp_path_factory: pytest.TempPathFactory, supervised: Path) -> Path:
    """The run's folder: with a precomputed reference, packed, in which the answers share their prompt."""
    folder = tmp_path_factory.mktemp("preferred")
    trained(write_dpo(folder, supervised), "data.packing=true")
    return folder / "runs" / "preferred"


def test_dpo_learns_from_the_export_of_a_supervised_run(preferred: Path) -> None:
    losses = records(preferred, "train/loss")
    assert losses[1] == pytest.approx(0.6931471805599453, abs=1e-5), "the policy begins as the reference"
    margins = records(preferred, "eval/rewards/margins")
    assert margins[0] == pytest.approx(0.0, abs=1e-5)
    first = [
        records(preferred, f"{kind}/rewards/accuracies")[step] for kind, step in (("train", 1), ("eval", 0))
    ]
    assert first == [0.0, 0.0], "rounding wins no pair"
    assert losses[STEPS] < losses[1] and margins[STEPS] > 0.0, "what prefers is easily learned here"


def test_its_export_is_another_model_that_loads_with_a_card(preferred: Path, supervised: Path) -> None:
    export = preferred / "export"
    model = AutoModelForCausalLM.from_pretrained(export)
    before = AutoModelForCausalLM.from_pretrained(supervised).state_dict()
    moved = {name: not torch.equal(value, before[name]) for name, value in model.state_dict().items()}
    assert all(moved.values()), moved
    prompt = AutoTokenizer.from_pretrained(export)("What is 2 plus 2?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt.input_ids.shape[1]
    card = (export / "README.md").read_text()
    assert supervised.name in card and "loss sigmoid" in card and f"{STEPS} steps of 8 pairs" in card
    assert "the policy as it starts" in card


@pytest.mark.long  # test_quantize.py always does so on weights in 4 bits
def test_one_adapter_over_a_multimodal_model_is_supervised_and_then_preferred(tmp_path: Path) -> None:
    """The second run names the first one's export and nothing else of the adapter."""
    tokenizer = byte_level_tokenizer()
    keys = {"vocab_size": num_ids(tokenizer), "max_position_embeddings": 256}
    text = WHOLES["gemma3"]["text_config"] | keys
    small_whole("gemma3", text_config=text).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = f"model.name_or_path={tmp_path / 'base'}"
    export = tmp_path / "runs" / "small" / "export"
    for args in (
        [write_spec(tmp_path), "model.from_config=null", "model.lora={rank: 4}", "train.max_steps=2"],
        [write_dpo(tmp_path, export), f"model.lora={{path: {export}}}", "data.packing=true"],
    ):
        done = alone(TRAIN, [*map(str, args), base])
        assert done.returncode == 0, done.stdout + done.stderr
        write_pairs(export.parent / "pairs.jsonl")
    preferred = tmp_path / "runs" / "preferred"
    losses = records(preferred, "train/loss")
    assert losses[1] == pytest.approx(0.6931471805599453, abs=1e-5) and losses[STEPS] < losses[1]
    before, after = (load_file(out / "adapter_model.safetensors") for out in (export, preferred / "export"))
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in after)


def gone_on(preferred: Path, supervised: Path, folder: Path, *overrides: str) -> Path:
    """The folder of the run once it has gone on from the middle, with the store of the first run."""
    run = folder / "runs" / "preferred"
    shutil.copytree(preferred.parent, run.parent)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS}")
    shutil.rmtree(run / "export")
    shown = trained(write_dpo(folder, supervised), "data.packing=true", *overrides)
    assert f"going on from step {MIDDLE}" in shown
    return run


def test_going_on_in_the_middle_changes_no_bit(preferred: Path, supervised: Path, tmp_path: Path) -> None:
    run = gone_on(preferred, supervised, tmp_path)
    for key in METRICS:
        assert records(run, key) == records(preferred, key), key
    found, expected = (load_file(folder / "export" / "model.safetensors") for folder in (run, preferred))
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_rows_split_over_both_ranks_give_the_same_run(
    preferred: Path, supervised: Path, tmp_path: Path
) -> None:
    run = gone_on(preferred, supervised, tmp_path, "parallel.sequence_parallel=2")
    for key in METRICS:
        assert records(run, key) == pytest.approx(records(preferred, key), rel=1e-6, abs=1e-6), key
    found, expected = (margins(folder / "margins" / f"step-{STEPS}.jsonl") for folder in (run, preferred))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6) and len(found) == 2


def margins(path: Path) -> list[float]:
    return [json.loads(line)["margin"] for line in path.read_text().splitlines()]


def test_a_live_reference_gives_the_same_run_padded(
    preferred: Path, supervised: Path, tmp_path: Path
) -> None:
    trained(write_dpo(tmp_path, supervised), "dpo={reference: live}", "parallel.zero_stage=3")
    for key in METRICS:
        expected = records(preferred, key)
        assert set(expected) == ({0, 3, 6} if key.startswith("eval") else set(range(1, STEPS + 1))), key
        found = records(tmp_path / "runs" / "preferred", key)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6), key
