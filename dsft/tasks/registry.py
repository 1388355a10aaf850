"""List the tasks. A task has an entry here and its facts in `dsft.spec.task`."""

from __future__ import annotations

from dsft.spec.schema import Spec
from dsft.tasks.api import Task
from dsft.tasks.classify import Classifier
from dsft.tasks.distill import Distillation
from dsft.tasks.kto import LabeledAnswers
from dsft.tasks.language import LanguageModeling
from dsft.tasks.preference import Preference
from dsft.tasks.reward import RewardModel

TASKS: dict[str, Task] = {
    "sft": LanguageModeling(), "pretrain": LanguageModeling(), "dpo": Preference(), "kto": LabeledAnswers(),
    "reward": RewardModel(), "classify": Classifier(), "distill": Distillation(),
}  # fmt: skip


def task_of(spec: Spec) -> Task:
    return TASKS[spec.task]
