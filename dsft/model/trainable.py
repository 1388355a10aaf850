"""What is trained, by name: takes a model and patterns of parameter names, freezes the rest.

A pattern is a shell pattern over the whole Hugging Face name (`fnmatch`): `*` stands for any characters, dots
among them, `?` for one, `[ab]` for one of several: `model.layers.3.*`, `*.bias`, `*norm.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from dsft.errors import Problem, SpecError

SHOWN = 3
"""Near names in a message."""


def train_only(causal_lm: PreTrainedModel, patterns: Sequence[str]) -> None:
    """Freeze every parameter that no pattern matches; a tied one is trained where one of its names matches.

    Raises SpecError for a pattern that matches no parameter.
    """
    named = list(causal_lm.named_parameters(remove_duplicate=False))
    check_patterns("model.trainable.{}", patterns, [name for name, _ in named])
    causal_lm.requires_grad_(False)
    for name, parameter in named:
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(True)


def check_patterns(where: str, patterns: Sequence[str], names: Collection[str]) -> None:
    """SpecError for each pattern that matches none of `names`; `where`: its key, {} being its number."""
    problems = [
        Problem(where.format(index), no_match(pattern, names))
        for index, pattern in enumerate(patterns)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if problems:
        raise SpecError("What is trained cannot be told by these patterns.", problems)


def no_match(pattern: str, names: Collection[str]) -> str:
    """The sentence for a pattern, or a module's name, that fits none of `names`."""
    close = get_close_matches(pattern, sorted(names), n=SHOWN, cutoff=0.4)
    near = f"near it: {', '.join(close)}" if close else f"such as {', '.join(sorted(names)[:SHOWN])}"
    return f"{pattern!r} fits no name in the model; write one that does ({near})"
