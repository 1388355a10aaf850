"""List the tasks. A task has an entry here and its facts in `dsft.spec.task`."""

from __future__ import annotations

from dsft.objective.api import with_perplexity
from dsft.objective.classify import classification
from dsft.objective.distill import distillation
from dsft.objective.kto import kto
from dsft.objective.next_token import next_token
from dsft.objective.preference import preference
from dsft.objective.reward import reward
from dsft.spec.schema import Distill, Dpo, Kto, Reward, Spec
from dsft.tasks.api import Task, section
from dsft.tasks.distill import Distillation
from dsft.tasks.kto import LabeledAnswers
from dsft.tasks.preference import Preference

_LANGUAGE = Task(lambda spec: next_token(spec.train.label_smoothing), with_perplexity)
TASKS: dict[str, Task] = {
    "sft": _LANGUAGE,
    "pretrain": _LANGUAGE,
    "dpo": Preference(lambda spec: preference(section(spec, Dpo))),
    "kto": LabeledAnswers(lambda spec: kto(section(spec, Kto))),
    "reward": Task(lambda spec: reward(section(spec, Reward))),
    "classify": Task(lambda spec: classification()),
    "distill": Distillation(lambda spec: distillation(section(spec, Distill), spec.train.label_smoothing)),
}


def task_of(spec: Spec) -> Task:
    return TASKS[spec.task]
