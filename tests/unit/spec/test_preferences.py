"""What of task dpo does not go together: each in one sentence at its own key, and nothing of what does."""

from typing import Any

import pytest
from pydantic import ValidationError

from dsft.errors import SpecError
from dsft.spec.combinations import combinations
from dsft.spec.layout import Layout, batch_on
from dsft.spec.schema import Spec
from tests.specs import minimal_spec, spec_values

GOOD = spec_values(
    "dpo", model={"name_or_path": "a/b"}, data={"train": [{"path": "pairs.jsonl"}]},
    train={"micro_batch_size": 2, "accumulation_steps": 2}, optim={"learning_rate": 5e-7},
)  # fmt: skip


OF_TASK: dict[str, Any] = {"classify": {"labels": ["a", "b"]}, "distill": {"reference_model": "teacher"}}


def problems_of(task: str, **changes: Any) -> dict[str, str]:
    """Dotted path -> its message."""
    valid = GOOD | ({task: OF_TASK[task]} if task in OF_TASK else {}) | {"task": task}
    merged = {
        key: valid[key] | new if isinstance(new, dict) and key in valid else new
        for key, new in changes.items()
    }
    spec = Spec.model_validate(valid | merged)
    return {".".join(map(str, finding.path)): finding.message for finding in combinations(spec)}


LORA = {"lora": {"rank": 4}}
ALONE = {"micro_batch_size": 1, "global_batch_size": 1, "accumulation_steps": None}


@pytest.mark.parametrize(("task", "key", "words", "changes"), [
    ("dpo", "train.neftune_alpha", "noise to the policy", {"train": {"neftune_alpha": 5.0}}),
    ("dpo", "train.label_smoothing", "use dpo.label_smoothing", {"train": {"label_smoothing": 0.1}}),
    ("dpo", "model.lora.dropout", "set it to 0", {"model": {"lora": {"dropout": 0.05}}}),
    ("dpo", "data.on_too_long", "a row of task dpo cannot be divided", {"data": {"on_too_long": "split"}}),
    ("dpo", "dpo.label_smoothing", "only with sigmoid",
     {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}),
    ("dpo", "dpo.simpo_gamma", "only with simpo", {"dpo": {"simpo_gamma": 1.0}}),
    ("dpo", "dpo.sft_weight", "already has this term", {"dpo": {"loss_type": "orpo", "sft_weight": 1.0}}),
    ("dpo", "dpo.reference", "needs no reference", {"dpo": {"loss_type": "simpo", "reference": "live"}}),
    ("dpo", "dpo.reference_model", "no reference", {"dpo": {"loss_type": "orpo", "reference_model": "a/c"}}),
    ("dpo", "dpo.recheck_rows", "needs no reference", {"dpo": {"loss_type": "orpo", "recheck_rows": 0}}),
    ("dpo", "dpo.reference", "needs model.lora", {"dpo": {"reference": "adapter"}}),
    ("dpo", "dpo.reference_model", "without its adapter",
     {"model": LORA, "dpo": {"reference": "adapter", "reference_model": "a/c"}}),
    ("dpo", "dpo.reference_zero_stage", "without its adapter",
     {"model": LORA, "dpo": {"reference": "adapter", "reference_zero_stage": 3}}),
    ("dpo", "dpo.reference_store", "stores nothing", {"dpo": {"reference": "live", "reference_store": "s"}}),
    ("dpo", "dpo.reference_zero_stage", "into the policy's stages",
     {"dpo": {"reference": "live", "reference_zero_stage": 3}, "parallel": {"pipeline_stages": 2}}),
    ("dpo", "dpo.reference_offload", "needs a sharded reference", {"dpo": {"reference_offload": "cpu"}}),
    ("dpo", "dpo.reference_offload", "needs a sharded reference",
     {"dpo": {"reference_offload": "cpu", "reference_zero_stage": 0}, "parallel": {"zero_stage": 3}}),
    ("dpo", "dpo.share_prompts", "needs data.packing true", {"dpo": {"share_prompts": True}}),
    ("dpo", "dpo.share_prompts",
     "needs model.attention auto or sdpa",
     {
         "dpo": {"share_prompts": True},
         "data": {"packing": True},
         "model": {"attention": "flash_attention_2"},
     }),
    ("dpo", "train.eval_on_start", "needs rows to evaluate", {"train": {"eval_on_start": True}}),
    ("kto", "train.global_batch_size", "no second row", {"train": ALONE}),
    ("kto", "kto.reference", "needs model.lora", {"kto": {"reference": "adapter"}}),
    ("kto", "data.train_on", "no part of the answer", {"data": {"train_on": "all"}}),
    ("kto", "train.label_smoothing", "leave it out", {"train": {"label_smoothing": 0.1}}),
    ("kto", "dpo", "set task: dpo", {"dpo": {"beta": 0.2}}),
    ("reward", "train.label_smoothing", "use reward.label_smoothing", {"train": {"label_smoothing": 0.1}}),
    ("reward", "reward.share_prompts", "needs data.packing true", {"reward": {"share_prompts": True}}),
    ("reward", "dpo", "set task: dpo, or leave it out", {"dpo": {"beta": 0.1}}),
    ("reward", "data.on_too_long", "task reward cannot be divided", {"data": {"on_too_long": "split"}}),
    ("classify", "classify.labels", "at least two different labels", {"classify": None}),
    ("classify", "classify.labels", "two different labels", {"classify": {"labels": ["a", "b", "a"]}}),
    ("classify", "data.train_on", "the label of a row; leave it out", {"data": {"train_on": "last"}}),
    ("classify", "train.label_smoothing", "leave it out", {"train": {"label_smoothing": 0.1}}),
    ("classify", "data.on_too_long", "task classify cannot be", {"data": {"on_too_long": "split"}}),
    ("distill", "distill.reference_model", "a teacher is needed", {"distill": {"reference_model": None}}),
    ("distill", "distill.beta", "only with jsd", {"distill": {"beta": 0.3}}),
    ("distill", "distill.recheck_rows", "stores nothing",
     {"distill": {"reference": "live", "recheck_rows": 1}}),
    ("distill", "dpo", "set task: dpo", {"dpo": {"beta": 0.2}}),
    ("sft", "dpo", "set task: dpo", {"dpo": {"beta": 0.1}}),
])  # fmt: skip
def test_is_refused(task: str, key: str, words: str, changes: dict[str, Any]) -> None:
    findings = problems_of(task, **changes)
    assert list(findings) == [key]
    assert words in findings[key]


@pytest.mark.parametrize(("task", "changes"), [
    ("dpo", {}),
    ("dpo", {"dpo": {"loss_type": "robust", "label_smoothing": 0.1}}),
    ("dpo", {"dpo": {"loss_type": "simpo", "simpo_gamma": 1.5, "sft_weight": 0.5}}),
    ("dpo", {"dpo": {"reference": "live", "reference_zero_stage": 3, "reference_offload": "cpu"}}),
    ("dpo", {"dpo": {"reference_offload": "cpu"}, "parallel": {"zero_stage": 3}}),
    ("dpo", {"dpo": {"reference_store": "store", "recheck_rows": 0, "reference_model": "a/c"}}),
    ("dpo", {"dpo": {"reference": "adapter"}, "model": LORA}),
    ("dpo", {"dpo": {"share_prompts": True}, "data": {"packing": True}}),
    ("kto", {"train": ALONE, "kto": {"loss_type": "apo_zero_unpaired"}}),
    ("reward", {"reward": {"center_rewards_coefficient": 0.01, "label_smoothing": 0.1},
                "model": {"lora": {"rank": 4, "dropout": 0.05}}, "train": {"neftune_alpha": 5.0}}),
    ("classify", {"train": {"neftune_alpha": 5.0}}),
    ("distill",  # a student does not have to start from what it is compared with
     {"distill": {"loss_type": "jsd", "beta": 0.1}, "model": {"lora": {"dropout": 0.1}},
      "train": {"neftune_alpha": 5.0, "label_smoothing": 0.1}}),
])  # fmt: skip
def test_goes_together(task: str, changes: dict[str, Any]) -> None:
    assert problems_of(task, **changes) == {}


def test_a_step_of_one_row_on_one_rank_has_no_mismatched_answer() -> None:
    spec = minimal_spec("kto", train={"micro_batch_size": 1})
    assert batch_on(spec, Layout(2, 1)).global_batch_size == 2
    with pytest.raises(SpecError, match="raise micro_batch_size or accumulation_steps"):
        batch_on(spec, Layout(1, 1))
    other = minimal_spec("kto", train={"micro_batch_size": 1}, kto={"loss_type": "apo_zero_unpaired"})
    assert batch_on(other, Layout(1, 1)).global_batch_size == 1


def test_a_reward_model_has_no_reference() -> None:
    with pytest.raises(ValidationError, match="reference_model"):
        problems_of("reward", reward={"reference_model": "a/b"})
