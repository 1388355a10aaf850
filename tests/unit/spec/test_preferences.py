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


def problems_of(**changes: Any) -> dict[str, str]:
    """Dotted path -> its message."""
    values = {
        key: {**one, **changes[key]} if key in changes and isinstance(one, dict) else changes.get(key, one)
        for key, one in GOOD.items()
    }
    spec = Spec.model_validate({**changes, **values})
    return {".".join(map(str, finding.path)): finding.message for finding in combinations(spec)}


LORA = {"lora": {"rank": 4}}
ALONE = {"micro_batch_size": 1, "global_batch_size": 1, "accumulation_steps": None}


@pytest.mark.parametrize(("key", "words", "changes"), [
    ("train.neftune_alpha", "noise to the policy", {"train": {"neftune_alpha": 5.0}}),
    ("train.label_smoothing", "use dpo.label_smoothing", {"train": {"label_smoothing": 0.1}}),
    ("model.lora.dropout", "set it to 0", {"model": {"lora": {"dropout": 0.05}}}),
    ("data.on_too_long", "a row of task dpo cannot be divided", {"data": {"on_too_long": "split"}}),
    ("dpo.label_smoothing", "only with sigmoid", {"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}),
    ("dpo.simpo_gamma", "only with simpo", {"dpo": {"simpo_gamma": 1.0}}),
    ("dpo.sft_weight", "already has this term", {"dpo": {"loss_type": "orpo", "sft_weight": 1.0}}),
    ("dpo.reference", "needs no reference", {"dpo": {"loss_type": "simpo", "reference": "live"}}),
    ("dpo.reference_model", "no reference", {"dpo": {"loss_type": "orpo", "reference_model": "a/c"}}),
    ("dpo.recheck_rows", "needs no reference", {"dpo": {"loss_type": "orpo", "recheck_rows": 0}}),
    ("dpo.reference", "needs model.lora", {"dpo": {"reference": "adapter"}}),
    ("dpo.reference_model", "without its adapter",
     {"model": LORA, "dpo": {"reference": "adapter", "reference_model": "a/c"}}),
    ("dpo.reference_zero_stage", "without its adapter",
     {"model": LORA, "dpo": {"reference": "adapter", "reference_zero_stage": 3}}),
    ("dpo.reference_store", "stores nothing", {"dpo": {"reference": "live", "reference_store": "s"}}),
    ("dpo.reference_zero_stage", "into the policy's stages",
     {"dpo": {"reference": "live", "reference_zero_stage": 3}, "parallel": {"pipeline_stages": 2}}),
    ("dpo.reference_offload", "needs a sharded reference", {"dpo": {"reference_offload": "cpu"}}),
    ("dpo.reference_offload", "needs a sharded reference",
     {"dpo": {"reference_offload": "cpu", "reference_zero_stage": 0}, "parallel": {"zero_stage": 3}}),
    ("dpo.share_prompts", "needs data.packing true", {"dpo": {"share_prompts": True}}),
    ("dpo.share_prompts",
     "needs model.attention auto or sdpa",
     {
         "dpo": {"share_prompts": True},
         "data": {"packing": True},
         "model": {"attention": "flash_attention_2"},
     }),
    ("train.eval_on_start", "needs rows to evaluate", {"train": {"eval_on_start": True}}),
])  # fmt: skip
def test_is_refused(key: str, words: str, changes: dict[str, Any]) -> None:
    findings = problems_of(**changes)
    assert list(findings) == [key]
    assert words in findings[key]


@pytest.mark.parametrize("changes", [
    {},
    {"dpo": {"loss_type": "robust", "label_smoothing": 0.1}},
    {"dpo": {"loss_type": "simpo", "simpo_gamma": 1.5, "sft_weight": 0.5}},
    {"dpo": {"reference": "live", "reference_zero_stage": 3, "reference_offload": "cpu"}},
    {"dpo": {"reference_offload": "cpu"}, "parallel": {"zero_stage": 3}},
    {"dpo": {"reference_store": "store", "recheck_rows": 0, "reference_model": "a/c"}},
    {"dpo": {"reference": "adapter"}, "model": LORA},
    {"dpo": {"share_prompts": True}, "data": {"packing": True}},
])  # fmt: skip
def test_goes_together(changes: dict[str, Any]) -> None:
    assert problems_of(**changes) == {}


@pytest.mark.parametrize(("key", "words", "changes"), [
    ("train.global_batch_size", "no second row", {"train": ALONE}),
    ("kto.reference", "needs model.lora", {"kto": {"reference": "adapter"}}),
    ("data.train_on", "no part of the answer", {"data": {"train_on": "all"}}),
    ("train.label_smoothing", "leave it out", {"train": {"label_smoothing": 0.1}}),
    ("dpo", "set task: dpo", {"dpo": {"beta": 0.2}}),
])  # fmt: skip
def test_of_labeled_answers_is_refused(key: str, words: str, changes: dict[str, Any]) -> None:
    findings = problems_of(task="kto", **changes)
    assert list(findings) == [key] and words in findings[key]
    assert problems_of(task="kto", train=ALONE, kto={"loss_type": "apo_zero_unpaired"}) == {}


@pytest.mark.parametrize(("key", "words", "changes"), [
    ("train.label_smoothing", "use reward.label_smoothing", {"train": {"label_smoothing": 0.1}}),
    ("reward.share_prompts", "true needs data.packing true", {"reward": {"share_prompts": True}}),
    ("dpo", "set task: dpo, or leave it out", {"dpo": {"beta": 0.1}}),
    ("data.on_too_long", "a row of task reward cannot be divided", {"data": {"on_too_long": "split"}}),
])  # fmt: skip
def test_of_rewards_is_refused(key: str, words: str, changes: dict[str, Any]) -> None:
    findings = problems_of(task="reward", **changes)
    assert list(findings) == [key] and words in findings[key]
    own = {"center_rewards_coefficient": 0.01, "label_smoothing": 0.1}
    dropout = {"lora": {"rank": 4, "dropout": 0.05}}
    assert problems_of(task="reward", reward=own, model=dropout, train={"neftune_alpha": 5.0}) == {}
    with pytest.raises(ValidationError, match="reference_model"):
        problems_of(task="reward", reward={"reference_model": "a/b"})


@pytest.mark.parametrize(("key", "words", "changes"), [
    ("classify.labels", "at least two different labels", {"classify": None}),
    ("classify.labels", "at least two different labels", {"classify": {"labels": ["a", "b", "a"]}}),
    ("data.train_on", "trains on the label of a row; leave it out", {"data": {"train_on": "last"}}),
    ("train.label_smoothing", "leave it out", {"train": {"label_smoothing": 0.1}}),
    ("data.on_too_long", "a row of task classify cannot be", {"data": {"on_too_long": "split"}}),
])  # fmt: skip
def test_of_classifiers_is_refused(key: str, words: str, changes: dict[str, Any]) -> None:
    findings = problems_of(task="classify", **{"classify": {"labels": ["a", "b"]}, **changes})
    assert list(findings) == [key] and words in findings[key]
    assert problems_of(task="classify", classify={"labels": ["a", "b"]}, train={"neftune_alpha": 5.0}) == {}


def test_a_step_of_one_row_on_one_rank_has_no_mismatched_answer() -> None:
    spec = minimal_spec("kto", train={"micro_batch_size": 1})
    assert batch_on(spec, Layout(2, 1)).global_batch_size == 2
    with pytest.raises(SpecError, match="raise micro_batch_size or accumulation_steps"):
        batch_on(spec, Layout(1, 1))
    other = minimal_spec("kto", train={"micro_batch_size": 1}, kto={"loss_type": "apo_zero_unpaired"})
    assert batch_on(other, Layout(1, 1)).global_batch_size == 1


@pytest.mark.parametrize("key, words, changes", [
    ("distill.reference_model", "a teacher is needed", {"distill": {"reference_model": None}}),
    ("distill.beta", "only with jsd", {"distill": {"beta": 0.3}}),
    ("distill.recheck_rows", "stores nothing", {"distill": {"reference": "live", "recheck_rows": 1}}),
    ("dpo", "set task: dpo", {"dpo": {"beta": 0.2}}),
])  # fmt: skip
def test_of_distillation_is_refused(key: str, words: str, changes: dict[str, Any]) -> None:
    changes["distill"] = {"reference_model": "teacher"} | changes.get("distill", {})
    findings = problems_of(task="distill", **changes)
    assert list(findings) == [key] and words in findings[key]


def test_a_student_may_have_noise() -> None:
    """It does not have to start from what it is compared with."""
    assert (
        problems_of(
            task="distill",
            distill={"reference_model": "teacher", "loss_type": "jsd", "beta": 0.1},
            model={"lora": {"dropout": 0.1}},
            train={"neftune_alpha": 5.0, "label_smoothing": 0.1},
        )
        == {}
    )


def test_the_section_belongs_to_its_task() -> None:
    (finding,) = combinations(Spec.model_validate({**GOOD, "task": "sft", "dpo": {"beta": 0.1}}))
    assert finding.path == ("dpo",)
    assert "set task: dpo" in finding.message
