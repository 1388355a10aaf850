"""Classifiers: whole runs in several layouts, equal to a plain loop with transformers' own class on
right-padded rows; the export, what `dsft score` and `dsft eval` give with it, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dsft.checkpoint.export import export_checkpoint
from dsft.commands.evaluate import found as found_by_eval
from dsft.commands.score import score
from dsft.data.sets.order import epoch_order
from dsft.errors import MissingInputError
from dsft.model.config import read_config
from tests.integration.runs import series as series_of
from tests.integration.runs import train, trained, write_model, write_small_task
from tests.integration.test_reward import CASES as LAYOUTS
from tests.integration.test_reward import DYING, LORA, WORDS, write_rows, written
from tests.integration.test_reward import fresh_score as drawn_score
from tests.launching import forked
from tests.selected import selected, tiered

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, BATCH, STEPS, SEED, RATE = 10, 4, 6, 42, 0.1
LABELS = ("calm", "odd", "loud")
TRAINED = f"global_batch_size: {BATCH}, max_steps: {STEPS}, seed: {SEED}"
NUMBERS = [n * n % 3 if n % 4 else 2 for n in range(ROWS)]
"""The label of each row."""
TEXTS = [" ".join(WORDS[n % 5 : n % 5 + 1 + 3 * n % 7]) for n in range(ROWS)]
LINES = [
    {"text": text, "label": LABELS[number] if n % 2 else number}
    for n, (text, number) in enumerate(zip(TEXTS, NUMBERS, strict=True))
]
NAMES = ("accuracy",)
CASES = LAYOUTS | {
    "plain": (2, ("parallel.zero_stage=0", "train.micro_batch_size=2")),
    "split": (2, ("parallel.zero_stage=1", "parallel.sequence_parallel=2", "train.micro_batch_size=2")),
}
ALWAYS = ("alone", "packed", "sharded", "split")
"""Stages are always tried in tests/parity."""


# --- the plain loop, on right-padded rows -----------------------------------------------------------------


def opened(folder: Path) -> Any:
    """As transformers opens it for scores; new ones as dsft draws them, which the first checkpoint has."""
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(LABELS))


def padded(folder: Path) -> dict[str, Tensor]:
    """What transformers' classes take: all rows."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [[*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in TEXTS]
    longest = max(map(len, rows))
    ids = [[*row, *[tokenizer.pad_token_id] * (longest - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return {
        "input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(NUMBERS)
    }  # fmt: skip


def figures(model: Any, rows: dict[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The loss is transformers' own."""
    found = model(**rows)
    right = (found.logits.argmax(1) == rows["labels"]).double().mean()
    return found.loss, {"loss": found.loss.item(), "accuracy": float(right)}


def plain(folder: Path, start: Tensor) -> tuple[list[dict[str, float]], dict[str, float], dict[str, Tensor]]:
    """The figures of each step, those of all rows at the end, and the weights."""
    model, rows, each = opened(folder), padded(folder), math.ceil(ROWS / BATCH)
    model.score.weight.data.copy_(start)
    model.config.pad_token_id = AutoTokenizer.from_pretrained(folder).pad_token_id
    model.config.problem_type = "single_label_classification"
    optimizer, found = torch.optim.SGD(model.parameters(), RATE), []
    for step in range(STEPS):
        epoch, at = divmod(step, each)
        ids = epoch_order(ROWS, SEED, epoch)[at * BATCH : (at + 1) * BATCH].tolist()
        loss, record = figures(model, {name: values[ids] for name, values in rows.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(record)
    return found, figures(model, rows)[1], model.state_dict()


# --- the runs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("classify") / "model", initializer_range=0.1)


def write_spec(folder: Path, model: Path, name: str, lines: Sequence[dict[str, Any]] = LINES) -> Path:
    rows, spec = write_rows(folder / "rows.jsonl", lines), folder / f"{name}.yaml"
    return write_small_task(spec, "classify", model, rows, f"labels: [{', '.join(LABELS)}]", TRAINED, RATE)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of ALWAYS and of the other CASES that are selected."""
    folder = tmp_path_factory.mktemp("runs")
    for name in dict.fromkeys((*ALWAYS, *selected(request, "name"))):
        ranks, overrides = CASES[name]
        trained(write_spec(folder, model, name), *overrides, nproc=ranks)
    return folder / "runs"


@pytest.fixture(scope="module")
def expected(model: Path, runs: Path) -> Any:
    return plain(model, fresh_score(model))


def fresh_score(model: Path) -> Tensor:
    config = read_config(model)
    return drawn_score(config.hidden_size, config.initializer_range, len(LABELS))


def check(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6), number


@pytest.mark.parametrize("name", tiered(CASES, ALWAYS))
def test_every_layout_equals_the_plain_loop(name: str, model: Path, runs: Path, expected: Any) -> None:
    steps, evaluated, weights = expected
    check(series_of(runs / name, NAMES), steps)
    check(series_of(runs / name, NAMES, "eval"), [evaluated])
    assert 0 < evaluated["accuracy"] < 1 or steps[0]["accuracy"] < 1
    after = opened(runs / name / "export").state_dict()
    assert after.keys() == weights.keys() and weights["score.weight"].shape[0] == len(LABELS)
    for key, value in weights.items():
        assert (after[key] - value).abs().max() <= 2e-6 * value.abs().max(), key
    assert (weights["score.weight"] - fresh_score(model)).norm() > 1e-2


def test_run_killed_goes_on_with_the_same_bits(model: Path, runs: Path, tmp_path: Path) -> None:
    spec, overrides = write_spec(tmp_path, model, "sharded"), CASES["sharded"][1]
    assert forked(DYING, 2, ["step", "1", "4", str(spec), *overrides]).returncode != 0
    assert "going on from step 4: " in trained(spec, *overrides, nproc=2)
    found, whole = tmp_path / "runs" / "sharded", runs / "sharded"
    assert series_of(found, NAMES) == series_of(whole, NAMES)
    weights = "export/model.safetensors"
    assert (found / weights).read_bytes() == (whole / weights).read_bytes()


# --- the export -------------------------------------------------------------------------------------------


def test_export_is_a_classifier_of_transformers(runs: Path, tmp_path: Path) -> None:
    export, data = runs / "packed" / "export", write_rows(tmp_path / "rows.jsonl", LINES)
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {str(number): name for number, name in enumerate(LABELS)}
    assert config["label2id"] == {name: number for number, name in enumerate(LABELS)}
    assert config["problem_type"] == "single_label_classification"
    loaded, info = AutoModelForSequenceClassification.from_pretrained(export, output_loading_info=True)
    assert not any(info.values()) and loaded.config.num_labels == len(LABELS)
    spec = str(found_by_eval(str(export), ["rows.jsonl"]).spec)
    assert "task: classify" in spec and "- loud" in spec
    assert "name: packed-export\n" in spec, "its result replaces no other run's"
    with torch.no_grad():
        expected = loaded(**padded(export)).logits.softmax(1).double()
    evaluated = series_of(runs / "packed", NAMES, "eval")[-1]
    line = score(export, str(data), tmp_path / "out.jsonl", 3)
    assert f"{ROWS} of {ROWS} rows scored, accuracy {evaluated['accuracy']:.4g}, macro-F1 " in line
    found = written(tmp_path / "out.jsonl")
    assert [one["source"] for one in found] == [f"{data}:{n + 1}" for n in range(ROWS)]
    ours = torch.tensor([list(one["probabilities"].values()) for one in found], dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    assert [one["label"] for one in found] == [LABELS[n] for n in expected.argmax(1).tolist()]

    renamed = [{"review": one["text"], "stars": one["label"]} for one in LINES]
    other = json.dumps(
        {
            "path": str(write_rows(tmp_path / "renamed.jsonl", renamed)),
            "columns": {"text": "review", "label": "stars"},
        }
    )
    of_others = score(export, other, tmp_path / "renamed.out", 3)
    assert of_others.partition(": ")[2] == line.partition(": ")[2]
    columns = yaml.safe_load(str(found_by_eval(str(export), [other]).spec))["data"]["train"][0]["columns"]
    assert columns == {"text": "review", "label": "stars"}

    unlabeled = [{"text": text} for text in TEXTS] + [{"text": " word" * 300}]
    line = score(export, str(write_rows(tmp_path / "texts.jsonl", unlabeled)), tmp_path / "again.jsonl", 8)
    assert "not compared with labels" in line and 'texts.jsonl:1: "label" is missing' in line
    *again, last = written(tmp_path / "again.jsonl")
    assert [one["label"] for one in again] == [one["label"] for one in found]
    assert last["label"] is last["probabilities"] is None and "null for answers of 1 rows" in line


def test_adapter_has_the_scores(model: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, model, "adapter")
    trained(spec, LORA, "parallel.zero_stage=2", "data.packing=true", nproc=2)
    run, rows = tmp_path / "runs" / "adapter", padded(model)
    config = json.loads((run / "export" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    base = opened(model)
    base.config.pad_token_id = AutoTokenizer.from_pretrained(model).pad_token_id
    adapted: Any = PeftModel.from_pretrained(base, run / "export")
    export_checkpoint(run / "checkpoints" / f"step-{STEPS}", tmp_path / "merged", merged=True)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(**rows).logits, adapted(**rows).logits, rtol=1e-5, atol=1e-6)
        _, record = figures(merged, rows)
    (evaluated,) = series_of(run, NAMES, "eval")
    assert evaluated == pytest.approx(record, rel=1e-5, abs=1e-6)


def test_training_goes_on_with_a_classifier_of_the_same_labels(runs: Path, tmp_path: Path) -> None:
    export = runs / "alone" / "export"
    _, record = figures(AutoModelForSequenceClassification.from_pretrained(export), padded(export))
    spec = write_spec(tmp_path, export, "further")
    trained(spec, "train.max_steps=1", "train.eval_on_start=true", nproc=1)
    found = series_of(tmp_path / "runs" / "further", NAMES, "eval")
    assert found[0] == pytest.approx(record, rel=1e-6)
    refused = train(spec, "classify.labels=[odd, calm, loud]", "name=other", nproc=1)
    output = refused.stdout + refused.stderr
    assert refused.returncode != 0 and "it gives scores of ['calm', 'odd', 'loud'], and the task" in output


def test_wrong_rows_are_refused_by_their_place(model: Path, tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        LINES[0],
        {"text": "a", "label": "quiet"},
        {"text": "a", "label": 3},
        {"text": "a"},
    ]
    bad += [{"text": "a", "label": True}, {"label": "odd"}, {"messages": [], "label": 1}]
    bad += [{"text": None, "label": 1}]
    refused = train(write_spec(tmp_path, model, "bad", bad), nproc=1)
    output = refused.stdout + refused.stderr
    assert refused.returncode != 0 and "Traceback" not in output
    rule = 'it must be one of classify.labels: "calm", "odd", "loud"'
    for line, message in {
        2: f"\"label\" is 'quiet'; {rule}",
        3: f'"label" is 3; {rule}',
        4: f'"label" is missing; {rule}',
        5: f'"label" is true; {rule}',
        6: '"text" is missing; the row has "label"',
        7: '"messages" is an empty list; it must have messages',
        8: '"text" is null; it must be a string',
    }.items():
        assert f"rows.jsonl:{line}: {message}" in output, output
    with pytest.raises(MissingInputError, match="generates text and gives no scores"):
        score(model, "rows.jsonl", tmp_path / "out", 8)


CHAT = [{"role": "user", "content": "red fox"}, {"role": "assistant", "content": "jumps"}]


def test_rows_of_other_forms_and_names(model: Path, tmp_path: Path) -> None:
    """Without an assistant's turn, with renamed columns, in CSV, truncated."""
    other: list[dict[str, Any]] = [{"messages": CHAT[:1], "mood": 0}, {"messages": CHAT, "mood": "loud"}]
    talks = write_rows(tmp_path / "talks.jsonl", other)
    table = tmp_path / "table.csv"
    table.write_text("sentence,mood\n" + "red fox,1\n" + f"{'lazy dog ' * 40},calm\n")
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": CHAT[:1], "label": 2}])
    sources = (
        f"[{{path: {talks}, columns: {{label: mood}}}}, {{path: {prompts}}}, "
        f"{{path: {table}, format: classify, columns: {{text: sentence, label: mood}}}}]"
    )
    spec = write_spec(tmp_path, model, "forms")
    shown = trained(
        spec, f"data.train={sources}", "data.on_too_long=truncate", "data.max_length=128", nproc=1
    )
    assert "data.train: 2 calm, 1 odd, 2 loud" in shown
