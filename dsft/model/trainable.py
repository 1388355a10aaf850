"""What is trained, by name: takes a model and patterns of parameter names, freezes the rest."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from dsft.errors import SpecError
from dsft.spec.patterns import matches, unmatched


def train_only(causal_lm: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze every parameter that no pattern fits; a tied one is trained where one of its names fits.

    Raises SpecError for a pattern that fits no parameter.
    """
    named = list(causal_lm.named_parameters(remove_duplicate=False))
    problems = list(unmatched("model.trainable.{}", patterns, [name for name, _ in named]))
    if problems:
        raise SpecError("The model cannot be trained so.", problems)
    causal_lm.requires_grad_(False)
    for name, parameter in named:
        if any(matches(name, pattern) for pattern in patterns):
            parameter.requires_grad_(True)
