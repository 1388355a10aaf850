"""What a run says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsft.ending import outcome, refuse_changed_reference, what_next
from dsft.errors import CheckpointError
from dsft.spec.schema import Spec

EXPORT, CHECKPOINT = Path("runs/a/export"), Path("runs/a/checkpoints/step-9")


def spec(task: str, model: dict[str, object]) -> Spec:
    return Spec.model_validate(
        {
            "name": "a",
            "task": task,
            "model": model,
            "data": {"train": ({"path": "rows.jsonl"},)},
            "train": {"micro_batch_size": 1, "accumulation_steps": 1},
            "optim": {"learning_rate": 1.0},
        }
    )


@pytest.mark.parametrize(
    ("task", "model", "words", "talks"),
    [
        ("sft", {"name_or_path": "base"}, "model: runs/a/export", True),
        ("pretrain", {"name_or_path": "base"}, "model: runs/a/export", False),
        ("dpo", {"name_or_path": "base"}, "model: runs/a/export", True),
        ("sft", {"name_or_path": "base", "lora": {}}, "step-9 OUT --merged", True),
        ("sft", {"from_config": {"model_type": "llama"}, "lora": {}}, "which no folder holds", False),
    ],
)
def test_chat_is_named_where_the_export_can_be_talked_to(
    task: str, model: dict[str, object], words: str, talks: bool
) -> None:
    lines = what_next(spec(task, model), EXPORT, CHECKPOINT)
    assert words in lines[0]
    assert lines[1:] == (["talk to it: dsft chat runs/a/export"] if talks else [])


def test_a_reference_that_was_found_changed_stops_the_export_at_every_start() -> None:
    with pytest.raises(CheckpointError, match="nothing is exported"):
        refuse_changed_reference(CHECKPOINT, {"origin": {"reference": {"which": "x", "unchanged": False}}})
    for origin in (None, {}, {"reference": None}, {"reference": {"unchanged": None}}):
        refuse_changed_reference(CHECKPOINT, {"origin": origin})


def test_the_outcome_has_first_and_last_loss_and_each_set() -> None:
    step = "train/global_step"
    records: list[dict[str, float]] = [{step: n, "train/loss": 3.0 - n} for n in (1, 2)]
    assert outcome(records) == ["train/loss went from 2.0000 at step 1 to 1.0000 at step 2"]
    records.append({step: 2, "eval/loss": 1.5, "eval/perplexity": 4.48, "eval/b/loss": 2.0})
    assert outcome(records)[1] == "held-out loss 1.5000, perplexity 4.48, b 2.0000"
    assert outcome([]) == []
    pairs = {step: 2, "eval/loss": 0.5, "eval/rewards/accuracies": 0.75, "eval/rewards/margins": 1.25}
    assert outcome([pairs]) == ["held-out loss 0.5000, accuracy 0.750, margin 1.25"]
