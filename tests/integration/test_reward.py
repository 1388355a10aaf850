"""Reward models: whole runs in several layouts, equal to a plain loop with transformers' own class on
right-padded rows, and to TRL's trainer; the export, and the rewards that `dsft score` gives with it."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dsft.checkpoint.export import export_checkpoint
from dsft.commands.chat import Sampling, load
from dsft.commands.evaluate import found as found_by_eval
from dsft.commands.score import score
from dsft.data.sets.order import epoch_order
from dsft.errors import DataError, MissingInputError
from tests.integration.runs import records, train, trained, write_model, write_small_task
from tests.integration.runs import series as series_of
from tests.launching import ROOT, forked
from tests.selected import selected, tiered

pytestmark = pytest.mark.filterwarnings("ignore")

DYING = ROOT / "tests" / "integration" / "dying.py"
ROWS, BATCH, STEPS, SEED, RATE, CENTERING, SMOOTHING = 10, 4, 6, 42, 0.05, 0.1, 0.2
TRAINED = f"global_batch_size: {BATCH}, max_steps: {STEPS}, seed: {SEED}"
WORDS = "red fox jumps over a lazy dog and then it sleeps".split()
LINES = [
    {
        "prompt": " ".join(WORDS[: 1 + n % 4]),
        "chosen": " " + " ".join(WORDS[n % 5 : n % 5 + 1 + 3 * n % 7]),
        "rejected": " " + " ".join(WORDS[n % 7 : n % 7 + 1 + 2 * n % 5]) + "!",
    }
    for n in range(ROWS)
]
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "mean_reward")
LORA = "model.lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj]}"


# --- the plain loop, on right-padded rows -----------------------------------------------------------------


def rows_of(model: Path, lines: Sequence[dict[str, str]] = LINES) -> list[tuple[list[int], list[int]]]:
    """The tokens of each pair's two rows."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(line: dict[str, str], name: str) -> list[int]:
        text = line["prompt"] + line[name]
        return [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]

    return [(ids(line, "chosen"), ids(line, "rejected")) for line in lines]


def fresh_score(hidden: int, std: float, labels: int = 1) -> Tensor:
    """As docs/reward.md describes it."""
    digest = hashlib.sha256(f"{SEED}/score".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.empty(labels, hidden).normal_(0.0, std, generator=generator)


def opened(folder: Path) -> Any:
    """A causal model, or one that gives scores, as transformers opens it for scores."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] == ["LlamaForCausalLM"]:
        model.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
        model.score.weight.data.copy_(fresh_score(config["hidden_size"], config["initializer_range"]))
    return model


def scores(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    length, pad = max(map(len, rows)), model.config.pad_token_id
    ids = torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def figures(model: Any, pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, dict[str, float]]:
    found = scores(model, [row for pair in pairs for row in pair]).double().view(-1, 2)
    chosen, rejected = found.unbind(1)
    margin = chosen - rejected
    loss = -(1 - SMOOTHING) * F.logsigmoid(margin) - SMOOTHING * F.logsigmoid(-margin)
    loss = loss + CENTERING * (chosen + rejected) ** 2
    values = chosen, rejected, margin, (margin > 0).double(), found
    return loss.mean(), {name: float(one.mean()) for name, one in zip(NAMES, values, strict=True)}


def batches() -> list[list[int]]:
    """The pairs of each step."""
    each = math.ceil(ROWS / BATCH)
    places = [divmod(step, each) for step in range(STEPS)]
    return [epoch_order(ROWS, SEED, epoch)[at * BATCH : (at + 1) * BATCH].tolist() for epoch, at in places]


def plain(folder: Path) -> tuple[list[dict[str, float]], dict[str, float], dict[str, Tensor]]:
    """The loss and the metrics of each step, those of the held-out rows at the end, and the weights."""
    model, pairs = opened(folder), rows_of(folder)
    optimizer, found = torch.optim.SGD(model.parameters(), RATE), []
    for ids in batches():
        loss, metrics = figures(model, [pairs[n] for n in ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append({"loss": loss.item()} | metrics)
    loss, metrics = figures(model, pairs)
    return found, {"loss": loss.item()} | metrics, model.state_dict()


# --- the runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("reward") / "model", initializer_range=0.1, num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def ends_with_padding(model: Path) -> Path:
    """The same model, whose tokenizer pads with the token that ends an answer."""
    folder = model.with_name("ends")
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, lines: Sequence[dict[str, Any]] = LINES) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_spec(folder: Path, model: Path, name: str) -> Path:
    rows, spec = write_rows(folder / "rows.jsonl"), folder / f"{name}.yaml"
    section = f"center_rewards_coefficient: {CENTERING}, label_smoothing: {SMOOTHING}"
    return write_small_task(spec, "reward", model, rows, section, TRAINED, RATE)


def series(folder: Path, part: str = "train") -> list[dict[str, float]]:
    return series_of(folder, NAMES, part)


def check(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6), number
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), number


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ("train.micro_batch_size=4",)),
    "packed": (2, ("data.packing=true", "parallel.zero_stage=2", "model.gradient_checkpointing=true")),
    "sharded": (2, ("parallel.zero_stage=3", "train.micro_batch_size=2")),
    "stages": (2, ("parallel.pipeline_stages=2", "data.packing=true", "train.micro_batch_size=2")),
}
ALWAYS = ("alone", "packed", "sharded")
"""Stages are always tried in tests/parity."""


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    return plain(model)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of ALWAYS and of the other CASES that are selected."""
    folder = tmp_path_factory.mktemp("runs")
    for name in dict.fromkeys((*ALWAYS, *selected(request, "name"))):
        ranks, overrides = CASES[name]
        trained(write_spec(folder, model, name), *overrides, nproc=ranks)
    return folder / "runs"


@pytest.mark.parametrize("name", tiered(CASES, ALWAYS))
def test_every_layout_equals_the_plain_loop(name: str, model: Path, runs: Path, expected: Any) -> None:
    steps, evaluated, weights = expected
    check(series(runs / name), steps)
    check(series(runs / name, "eval"), [evaluated])
    before = opened(model).state_dict()
    after = AutoModelForSequenceClassification.from_pretrained(runs / name / "export").state_dict()
    assert after.keys() == weights.keys()
    for key, value in weights.items():
        apart, moved = after[key] - value, value - before[key]
        assert apart.abs().max() <= 1e-6 * value.abs().max(), key
        assert moved.norm() == 0 or apart.norm() < 1e-3 * moved.norm(), key
    assert (weights["score.weight"] - before["score.weight"]).norm() > 1e-3


def test_padding_by_the_end_of_text_scores_the_token_before_it(
    ends_with_padding: Path, expected: Any, tmp_path: Path
) -> None:
    """As transformers and TRL do then."""
    found = trained(
        write_spec(tmp_path, ends_with_padding, "ends"), "data.packing=true", "train.max_steps=2", nproc=1
    )
    steps, _, _ = plain(ends_with_padding)
    assert abs(steps[0]["rewards/chosen"] - expected[0][0]["rewards/chosen"]) > 1e-3
    check(series(tmp_path / "runs" / "ends"), steps[:2])
    assert "pads with the token that ends answers" in found
    path = tmp_path / "runs" / "ends" / "export"
    assert AutoTokenizer.from_pretrained(path).pad_token_id == opened(path).config.pad_token_id


def test_trl_trainer_gives_the_same_first_step_with_margins(model: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl, an oracle of these tests alone")
    from datasets import Dataset

    margins = [n * 0.75 - 2 for n in range(ROWS)]
    own = write_spec(tmp_path, model, "ours")
    lines = [line | {"margin": one} for line, one in zip(LINES, margins, strict=True)]
    rows = write_rows(tmp_path / "margins.jsonl", lines)
    keys = ("reward.label_smoothing=0", "train.max_steps=1", "parallel.zero_stage=3")
    trained(own, *keys, f"data.train=[{{path: {rows}}}]", nproc=2)
    folder = tmp_path / "runs" / "ours"
    pairs = [rows_of(model)[n] for n in batches()[0]]
    settings = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, max_steps=1, learning_rate=RATE,
        per_device_train_batch_size=BATCH, max_grad_norm=0.0, optim="sgd", lr_scheduler_type="constant",
        logging_steps=1, report_to=[], center_rewards_coefficient=CENTERING, save_strategy="no",
        gradient_checkpointing=False, disable_dropout=False,
    )  # fmt: skip
    columns: dict[str, Any] = {name: [pair[i] for pair in pairs] for i, name in enumerate(IDS)}
    data = Dataset.from_dict(columns | {"margin": [margins[n] for n in batches()[0]]})
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = trl.RewardTrainer(
        model=opened(model), args=settings, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    theirs = next(one for one in trainer.state.log_history if "loss" in one)
    (ours,) = series(folder)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    assert records(folder, "train/grad_norm")[1] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    for name, of_trl in (("margins", "margin"), ("accuracies", "accuracy")):
        assert ours[f"rewards/{name}"] == pytest.approx(theirs[of_trl], rel=1e-5, abs=1e-7)
    assert ours["mean_reward"] == pytest.approx(theirs["mean_reward"], rel=1e-5)
    after = AutoModelForSequenceClassification.from_pretrained(folder / "export").state_dict()
    for key, value in trainer.model.state_dict().items():
        torch.testing.assert_close(after[key], value, rtol=1e-5, atol=1e-6)


IDS = ("chosen_ids", "rejected_ids")


def test_run_killed_goes_on_with_the_same_bits(model: Path, runs: Path, tmp_path: Path) -> None:
    spec, overrides = write_spec(tmp_path, model, "sharded"), CASES["sharded"][1]
    killed = forked(DYING, 2, ["step", "1", "4", str(spec), *overrides])
    assert killed.returncode != 0
    assert "going on from step 4: " in trained(spec, *overrides, nproc=2)
    found, whole = tmp_path / "runs" / "sharded", runs / "sharded"
    assert series(found) == series(whole) and series(found, "eval") == series(whole, "eval")
    weights = "export/model.safetensors"
    assert (found / weights).read_bytes() == (whole / weights).read_bytes()


# --- the export -------------------------------------------------------------------------------------------


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_export_gives_the_scores_of_transformers(runs: Path, tmp_path: Path) -> None:
    export, data = runs / "packed" / "export", write_rows(tmp_path / "rows.jsonl")
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "reward"} and config["label2id"] == {"reward": 0}
    loaded, info = AutoModelForSequenceClassification.from_pretrained(export, output_loading_info=True)
    assert not any(info.values()) and loaded.config.num_labels == 1
    assert not (export / "generation_config.json").exists()
    assert "task: reward" in str(found_by_eval(str(export), ["rows.jsonl"]).spec)
    with torch.no_grad():
        found = scores(loaded, [row for pair in rows_of(export) for row in pair]).double().view(-1, 2)
    line = score(export, str(data), tmp_path / "pairs.jsonl", 3)
    assert line.startswith(f"{tmp_path / 'pairs.jsonl'}: {ROWS} of {ROWS} pairs scored, mean chosen ")
    rewards = written(tmp_path / "pairs.jsonl")
    assert [one["source"] for one in rewards] == [f"{data}:{n + 1}" for n in range(ROWS)]
    ours = torch.tensor([[one["chosen"], one["rejected"]] for one in rewards], dtype=torch.float64)
    torch.testing.assert_close(ours, found, rtol=1e-6, atol=1e-6)
    evaluated = series(runs / "packed", "eval")[-1]
    assert float(ours[:, 0].mean()) == pytest.approx(evaluated["rewards/chosen"], rel=1e-6, abs=1e-6)

    alone = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in LINES]
    chat = [{"role": "user", "content": "Where?"}]
    asked = {"source": "a:1", "prompt": chat, "answer": "Here.", "reference": None}  # of dsft answer
    same = {"messages": [*chat, {"role": "assistant", "content": "Here."}]}
    found_alone = []
    for name, one in (("asked", asked), ("same", same)):
        score(export, str(write_rows(tmp_path / f"{name}.jsonl", [one])), tmp_path / name, 8)
        found_alone.append(written(tmp_path / name)[0]["reward"])
    assert found_alone[0] == found_alone[1]
    alone.append({"prompt": "a", "completion": " word" * 300})  # longer than the model's 256 positions
    line = score(export, str(write_rows(tmp_path / "alone.jsonl", alone)), tmp_path / "alone.out", 8)
    assert "10 of 11 rows scored" in line and "null for answers of 1 rows, longer than" in line
    *found_alone, last = [one["reward"] for one in written(tmp_path / "alone.out")]
    assert last is None
    again = torch.tensor(found_alone, dtype=torch.float64)
    torch.testing.assert_close(again, ours[:, 0], rtol=1e-6, atol=1e-6)


def test_training_starts_from_a_reward_model(runs: Path, tmp_path: Path) -> None:
    export = runs / "alone" / "export"
    loss, metrics = figures(opened(export), rows_of(export))
    spec = write_spec(tmp_path, export, "further")
    trained(spec, "train.max_steps=1", "train.eval_on_start=true", "train.seed=1", nproc=1)
    found = records(tmp_path / "runs" / "further", "eval/loss")
    assert found[0] == pytest.approx(loss.item(), rel=1e-6)
    rows = "data.train=[{path: builtin:quickstart}]"
    refused = train(
        spec, "task=sft", "reward=null", "name=sft", "data.eval=[]", rows, "data.max_length=256", nproc=1
    )
    assert refused.returncode != 0 and "score.weight is not a tensor" in refused.stdout + refused.stderr


def test_adapter_has_the_score(model: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, model, "adapter")
    shown = trained(spec, LORA, "parallel.zero_stage=2", "data.packing=true", nproc=2)
    assert "the whole model: dsft export" in shown and "dsft score OUT" in shown
    run = tmp_path / "runs" / "adapter"
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = opened(model)
    before = copy.deepcopy(base.score.weight)
    adapted: Any = PeftModel.from_pretrained(base, run / "export")
    export_checkpoint(run / "checkpoints" / f"step-{STEPS}", tmp_path / "merged", merged=True)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    rows = [row for pair in rows_of(model) for row in pair]
    with torch.no_grad():
        torch.testing.assert_close(scores(merged, rows), scores(adapted, rows), rtol=1e-5, atol=1e-6)
    assert (merged.score.weight - before).abs().max() > 1e-3
    evaluated = series(run, "eval")[-1]
    _, metrics = figures(merged, rows_of(model))
    assert evaluated["rewards/margins"] == pytest.approx(metrics["rewards/margins"], rel=1e-5, abs=1e-6)
    assert "task: reward" in str(found_by_eval(str(run / "export"), ["rows.jsonl"]).spec)
    with pytest.raises(MissingInputError, match="is an adapter; write the whole model with"):
        score(run / "export", "rows.jsonl", tmp_path / "out", 8)
    with pytest.raises(MissingInputError, match="gives scores and generates no text; see dsft score"):
        load(run / "export", Sampling())


def test_what_cannot_be_is_refused_by_name(model: Path, runs: Path, tmp_path: Path) -> None:
    bad = [LINES[0], {"prompt": "a", "chosen": " b"}, {"prompt": "a", "chosen": " b", "rejected": " b"}]
    path = write_rows(tmp_path / "bad.jsonl", bad)
    refused = train(write_spec(tmp_path, model, "bad"), f"data.train=[{{path: {path}}}]", nproc=1)
    output = refused.stdout + refused.stderr
    assert refused.returncode != 0 and "Traceback" not in output
    assert "bad.jsonl:2" in output and '"rejected" is missing' in output and "bad.jsonl:3" in output, output
    with pytest.raises(DataError, match="2 rows cannot be scored"):
        score(runs / "alone" / "export", str(path), tmp_path / "out", 8)
    with pytest.raises(MissingInputError, match="generates text and gives no scores"):
        score(model, str(path), tmp_path / "out", 8)
    with pytest.raises(MissingInputError, match="gives scores and generates no text"):
        load(runs / "alone" / "export", Sampling())
