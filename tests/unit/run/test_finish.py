"""The outcome that a run prints at its end, and the tokens that end an answer of its export."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dsft.commands.chat import Sampling, load
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.run.build import describe
from dsft.run.finish import outcome, what_next
from dsft.run.loop import Progress
from dsft.run.main import resume_warnings
from dsft.setup.inputs import read_inputs
from dsft.spec.schema import Spec
from tests.make import make_run
from tests.specs import minimal_spec

EXPORT, CHECKPOINT = Path("runs/a/export"), Path("runs/a/checkpoints/step-9")


def spec(task: str, model: dict[str, object]) -> Spec:
    data, optim = {"train": [{"path": "rows.jsonl"}]}, {"learning_rate": 1.0}
    return minimal_spec(task, name="a", model=model, data=data, optim=optim)


TEXT_END, TURN_END = 256, 258  # of the base: its tokens <|pad|> and <|im_end|>


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base model: its texts end with a token of their own, which no turn of ChatML ends with."""
    folder = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=259, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=TEXT_END,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(folder)
    return folder


def described(base: Path, rows: dict[str, Any], out: Path) -> tuple[list[str], Any]:
    """The lines that a run over the base prints, and eos_token_id of what an export of it will have."""
    (base.parent / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    made = spec("sft", {"name_or_path": str(base)}).model_copy(update={"output_dir": str(out)})
    run = make_run(made, None)
    lines = describe(run, read_inputs(made, lambda text: None), ())
    return lines, GenerationConfig.from_pretrained(run.model_folder).eos_token_id


@pytest.mark.parametrize("listed", [False, True])
def test_an_export_stops_at_the_end_of_a_turn_and_of_a_text(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    if listed:
        GenerationConfig(eos_token_id=[TEXT_END, TURN_END]).save_pretrained(base)
    lines, stops = described(base, talk, tmp_path / "runs")
    assert stops == ([TEXT_END, TURN_END] if listed else [TURN_END, TEXT_END])
    assert lines == (
        []
        if listed
        else [
            "export: answers end with '<|im_end|>', so generation_config.json stops at it too: eos_token_id "
            "'<|im_end|>' (258) and '<|pad|>' (256)"
        ]
    )
    assert load(base, Sampling())._settings(1).eos_token_id == [TEXT_END, TURN_END]


def test_an_export_of_plain_texts_stops_as_its_base_does(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert described(base, {"text": "a"}, tmp_path / "runs") == ([], TEXT_END)


@pytest.mark.parametrize(("task", "model", "text", "answers"), [
    ("sft", {"name_or_path": "base"}, "model: runs/a/export", True),
    ("pretrain", {"name_or_path": "base"}, "model: runs/a/export", False),
    ("dpo", {"name_or_path": "base"}, "model: runs/a/export", True),
    ("sft", {"name_or_path": "base", "lora": {}}, "step-9 OUT --merged", True),
    ("sft", {"from_config": {"model_type": "llama"}, "lora": {}}, "which no folder holds", False),
])  # fmt: skip
def test_chat_is_suggested_for_models_that_answer(
    task: str, model: dict[str, object], text: str, answers: bool
) -> None:
    lines = what_next(spec(task, model), EXPORT, CHECKPOINT)
    assert text in lines[0]
    assert lines[1:] == (["talk to it: dsft chat runs/a/export"] if answers else [])


def test_the_outcome_has_first_and_last_loss_and_each_set() -> None:
    step = "train/global_step"
    records: list[dict[str, float]] = [{step: n, "train/loss": 3.0 - n} for n in (1, 2)]
    assert outcome(records) == ["train/loss went from 2.0000 at step 1 to 1.0000 at step 2"]
    assert outcome(records[:1]) == ["train/loss was 2.0000 at step 1"]
    records.append({step: 2, "eval/loss": 1.5, "eval/perplexity": 4.48, "eval/b/loss": 2.0})
    assert outcome(records)[1] == "held-out loss 1.5000, perplexity 4.48, b 2.0000"
    assert outcome([]) == []
    rewards = {"train/rewards/accuracies": 0.875, "train/rewards/margins": 0.4212}
    assert outcome([{step: 9, "train/loss": 0.6} | rewards])[1] == (
        "rewards at step 9: accuracy 0.875 (share of pairs whose chosen answer has the higher reward), "
        "margin 0.421"
    )
    pairs = {step: 2, "eval/loss": 0.5, "eval/rewards/accuracies": 0.75, "eval/rewards/margins": 1.25}
    assert outcome([pairs]) == ["held-out loss 0.5000, accuracy 0.750, margin 1.25"]


def test_resume_warns_of_another_learning_rate_and_a_fresh_start_of_replaced_metrics(tmp_path: Path) -> None:
    given = spec("sft", {"from_config": {"model_type": "llama"}})
    given = given.model_copy(update={"train": given.train.model_copy(update={"max_steps": 60})})
    given = given.model_copy(update={"output_dir": str(tmp_path.parent), "name": tmp_path.name})
    saved: Any = SimpleNamespace(state={"spec": {"train": {"max_steps": 80, "num_train_epochs": 1.0}}})
    inputs: Any = SimpleNamespace(train=range(100), total_steps=60)

    def warnings(start: Any) -> list[str]:
        progress = Progress(step=20, applied_steps=20)
        return list(resume_warnings(make_run(given, None, start=start), inputs, progress))

    assert warnings(saved) == [
        "warning: the run now has 60 steps instead of 80, so the learning rate goes on at 0.667 instead of "
        "0.75"
    ]
    saved.state["spec"]["train"]["max_steps"] = 60
    assert warnings(saved) == warnings(None) == []
    (tmp_path / "metrics.jsonl").write_text('{"train/global_step": 3, "train/loss": 1.0}\n')
    assert "no checkpoint, so training starts again at step 0" in warnings(None)[0]
