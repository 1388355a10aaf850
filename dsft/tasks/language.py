"""Supervised fine-tuning and pretraining: both minimize the next-token loss; only their data differ."""

from __future__ import annotations

from dsft.objective.api import with_perplexity
from dsft.setup.inputs import Inputs
from dsft.setup.run import Run
from dsft.tasks.api import Evaluation, Model, Task


class LanguageModeling(Task):
    def evaluation(self, run: Run, inputs: Inputs, model: Model) -> Evaluation:
        """Add the perplexity to each loss per token."""
        evaluate = super().evaluation(run, inputs, model)
        return lambda step: with_perplexity(evaluate(step))
