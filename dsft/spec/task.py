"""Define the properties of each task, which all other packages read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Training = Literal["fine-tuning", "pretraining", "preference training"]
"""What a task is like; it decides which learning rates are usual."""

Label = Literal["none", "answer", "class"]
"""How the loss reads the label of a row. none: not at all, and rows labeled undesirable are left out; answer:
whether the answer is desirable; class: the number of a class, whose name is in the key `labels` of the task's
section."""
LABELS = ("undesirable", "desirable")
"""The names of an answer's labels, 0 and 1."""

Head = Literal["vocabulary", "score"]
"""What a model's last layer gives for a token: the log-probability of the next one, or scores: one number, or
one for each label.
dsft.model.head builds both, and dsft.data.sets.dataset marks which tokens they are computed at."""


@dataclass(frozen=True)
class TaskFacts:
    """Properties of a task.

    unit        word for one record of data.train: "row" or "pair"
    formats     row formats that the task accepts
    objective   what it minimizes, for the model card
    training    see `Training`
    cut         how records become examples: a key of `dsft.data.sets.load.CUTS`
    rows        token sequences per record, each of at most data.max_length tokens
    if_named    formats that are accepted only if the spec names them -> what the task then does
    answers     True if a row is a prompt and an answer, which is never split; False if it is text, which may
                be
    label       see `Label`
    fields      fields of a row beside its label, by name, that the loss uses: of `dsft.data.rows.FIELDS`
    train_on    the value of data.train_on that the task needs; None: the spec's
    head        see `Head`. With a score, an answer has one target: its last token, at its own position
    section     the section of the spec that has the task's own keys. If it is a `schema.Reference`, the loss
                may compare the policy with a frozen reference
    options     keys of this section that the model card names if they are not 0 -> in words
    """

    unit: str
    formats: tuple[str, ...]
    objective: str
    training: Training
    cut: str = "rows"
    rows: int = 1
    if_named: Mapping[str, str] = field(default_factory=dict)
    answers: bool = True
    label: Label = "none"
    fields: tuple[str, ...] = ()
    train_on: Literal["all"] | None = None
    head: Head = "vocabulary"
    section: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> tuple[str, ...]:
        """The fields of rows that are cached: the label, by which rows may be left out, and its own."""
        return ("label", *self.fields)

    @property
    def whole(self) -> bool:
        """Whether the objective compares whole answers, of which an example has `rows`."""
        return self.cut != "rows"

    @property
    def of_prompts(self) -> bool:
        """Whether an example is a prompt with answers that are trained on."""
        return self.whole and self.train_on is None

    @property
    def example(self) -> str:
        """What an example is called: "pair", or "example" where it is cut from rows."""
        return self.unit if self.whole else "example"

    @property
    def examples(self) -> str:
        return f"{self.example}s"


_ON_ANSWERS = TaskFacts(
    "row",
    ("messages", "alpaca", "text", "sharegpt", "prompt_completion", "preference", "kto"),
    "next-token loss on answers", "fine-tuning",
    if_named={
        "preference": "trains on the chosen answers", "kto": "trains on the answers labeled true",
    },
)  # fmt: skip

TASKS: dict[str, TaskFacts] = {
    "sft": _ON_ANSWERS,
    "pretrain": TaskFacts("row", ("text",), "next-token loss on all tokens", "pretraining", answers=False),
    "dpo": TaskFacts(
        "pair", ("preference",), "DPO on preference pairs", "preference training",
        cut="answers", rows=2, section="dpo",
        options={
            "loss_type": "loss", "beta": "β", "label_smoothing": "label smoothing",
            "sft_weight": "weight of the SFT term",
        },
    ),
    "kto": TaskFacts(
        "row", ("kto", "preference"), "KTO on labeled answers", "preference training",
        cut="answers", label="answer", section="kto",
        options={
            "loss_type": "loss", "beta": "β", "desirable_weight": "weight of desirable answers",
            "undesirable_weight": "weight of undesirable answers",
        },
    ),
    "reward": TaskFacts(
        "pair", ("preference",), "Bradley-Terry loss of rewards on preference pairs", "fine-tuning",
        cut="answers", rows=2, fields=("margin",), head="score", section="reward",
        options={
            "center_rewards_coefficient": "weight of centering", "label_smoothing": "label smoothing",
        },
    ),
    "classify": TaskFacts(
        "row", ("classify",), "cross entropy of each row's label", "fine-tuning",
        cut="answers", label="class", train_on="all", head="score", section="classify",
    ),
    "distill": replace(
        _ON_ANSWERS, objective="distillation on answers", section="distill",
        options={
            "loss_type": "loss", "weight": "its weight beside the next-token loss",
            "top_k": "tokens per target", "temperature": "temperature",
        },
    ),
}  # fmt: skip
"""The facts of each task; `dsft.tasks.registry` has what it does."""


def task_of_export(config: Mapping[str, Any]) -> str:
    """Return which task exports a model with this config.json, or an adapter with this adapter_config.json:
    reward or classify for models that give scores, else sft."""
    classes = config.get("task_type") or config.get("architectures") or ""
    if classes != "SEQ_CLS" and "ForSequenceClassification" not in str(classes):
        return "sft"
    return "classify" if len(config.get("id2label") or ()) > 1 else "reward"


def task_names() -> str:
    """Return the names of all tasks as a phrase: "sft, pretrain, dpo, kto, reward, classify or distill"."""
    *most, last = TASKS
    return f"{', '.join(most)} or {last}"
