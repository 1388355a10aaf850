"""Classifiers (classify): the label of each row is to have the highest of the model's scores."""

from __future__ import annotations

from dsft.objective.api import Objective
from dsft.objective.classify import classification
from dsft.spec.schema import Spec
from dsft.tasks.api import Task


class Classifier(Task):
    def objective(self, spec: Spec) -> Objective:
        return classification()
