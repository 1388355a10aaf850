"""Match patterns of parameter names, as used in model.trainable and optim.groups.

A pattern is a shell pattern for the whole Hugging Face name (`fnmatch`): `*` matches any characters including
dots, `?` one character, `[ab]` one of several: `model.layers.3.*`, `*.bias`, `*norm.weight`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from dsft.errors import Problem
from dsft.spec.schema import Optim

SHOWN = 3
"""Number of similar names in a message."""


def matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern)


def group_of(name: str, optim: Optim) -> int | None:
    """Return the index of the first of optim.groups whose pattern matches; None if none does."""
    return next((i for i, group in enumerate(optim.groups) if matches(name, group.parameters)), None)


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is a matrix or an embedding: no vector, and no bias or norm that is stored
    as a matrix."""
    module, _, own = name.rpartition(".")
    return len(shape) > 1 and not own.endswith("bias") and not module.endswith("norm")


def is_layers_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is a matrix of a numbered layer, or the joined matrices of its experts: no
    embedding, output layer or convolution."""
    is_layers = any(part.isdecimal() for part in name.split("."))
    return is_layers and is_matrix(name, shape) and (len(shape) == 2 or ".experts." in name)


def is_orthogonalized(name: str, shape: Sequence[int], optim: Optim) -> bool:
    """Return whether the optimizer brings the singular values of a parameter near 1."""
    return optim.facts.matrices is not None and is_layers_matrix(name, shape)


def group_problems(optim: Optim, names: Collection[str]) -> list[Problem]:
    """Check that each of optim.groups has parameters that no earlier group has. names: all trained
    parameters."""
    patterns = [group.parameters for group in optim.groups]
    problems = list(unmatched("optim.groups.{}.parameters", patterns, names))
    groups_in_use = {group_of(name, optim) for name in names}
    reported = {problem.where for problem in problems}
    for index, pattern in enumerate(patterns):
        where = f"optim.groups.{index}.parameters"
        if index not in groups_in_use and where not in reported:
            message = f"{pattern!r} matches only parameters of earlier groups; move this group before them"
            problems.append(Problem(where, message))
    return problems


def unmatched(where: str, patterns: Sequence[str], names: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each pattern that matches none of `names`. where: key of a pattern, with {} for its
    index."""
    for index, pattern in enumerate(patterns):
        if not any(matches(name, pattern) for name in names):
            yield Problem(where.format(index), no_match(pattern, names))


def no_match(pattern: str, names: Collection[str]) -> str:
    """Return the message for a pattern, or a module's name, that matches none of `names`."""
    literal = pattern.strip("*.")
    near = [name for name in sorted(names) if literal and literal in name]
    near = near or get_close_matches(pattern, sorted(names), n=SHOWN, cutoff=0.4) or sorted(names)
    return f"{pattern!r} matches no name here; write one that matches, such as {', '.join(near[:SHOWN])}"
