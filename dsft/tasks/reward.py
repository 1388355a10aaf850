"""Reward models (reward): the score of the chosen answer of each pair is to be above that of the rejected
one."""

from __future__ import annotations

from dsft.objective.api import Objective
from dsft.objective.reward import reward
from dsft.spec.schema import Reward, Spec
from dsft.tasks.api import Task


class RewardModel(Task):
    def objective(self, spec: Spec) -> Objective:
        return reward(spec.reward or Reward())
