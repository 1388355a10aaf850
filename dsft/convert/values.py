"""Convert values of another tool's config to types of a spec. Each raises ValueError for an unfit value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args, get_origin

from dsft.spec.aliases import fields


class NotOfferedError(Exception):
    """A value that the other tool takes and dsft has nothing for. The key is left out, with this reason."""


def number(value: Any) -> float:
    """Return a number, also one that YAML 1.1 reads as a text (`1e-5`)."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ValueError("a number is needed")
    return found


def nonzero(value: Any) -> float | None:
    """Return a number, None if it is 0, which switches a key off there and is its default here."""
    return number(value) or None


def whole(value: Any) -> int:
    """Return a whole number."""
    if number(value) != int(number(value)):
        raise ValueError("a whole number is needed")
    return int(number(value))


def positive(value: Any) -> int | None:
    """Return a whole number, None if it is 0 or less, which other tools take for "not set"."""
    return whole(value) if whole(value) > 0 else None


def flag(value: Any) -> bool:
    """Return a switch, also one that is written as a text."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, int):
        raise ValueError("true or false is needed")
    return bool(value)


def names_in(value: Any) -> list[str]:
    """Return a list of names, also one that is written as a text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, (str, int, float)) for part in value):
        raise ValueError("a list of names is needed")
    return [str(part) for part in value]


def _steps(value: Any) -> int | None:
    if 0 < number(value) < 1:
        raise NotOfferedError("a fraction of all steps; here a number of steps is needed")
    return positive(value)


def _modules(value: Any) -> str | list[str]:
    names = names_in(value)
    if names in (["all"], ["all-linear"]):
        return "all-linear"
    if any("*" in name or "|" in name or "\\" in name for name in names):
        raise NotOfferedError("a pattern; model.lora.target_modules takes names of modules, or all-linear")
    return names


def _one_adapter(value: Any) -> str | None:
    names = names_in(value)
    if len(names) > 1:
        raise NotOfferedError("several adapters; merge them first, here one is trained")
    return names[0] if names else None


_HOW: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("train.max_steps", "checkpoint.keep_last", "model.mlp_chunks"), positive),
    **dict.fromkeys(("train.label_smoothing", "dpo.label_smoothing", "dpo.sft_weight"), nonzero),
    **dict.fromkeys(("train.eval_every", "train.log_every", "checkpoint.every"), _steps),
    "model.lora.target_modules": _modules,
    "model.lora.path": _one_adapter,
}
"""Key of the spec -> what converts a value, where its type does not decide it."""
_TYPES: dict[Any, Callable[[Any], Any]] = {
    bool: lambda value: flag(value) or None,
    tuple: lambda value: names_in(value) or None,
    int: whole,
    float: number,
}
"""Type of a key of the spec -> what converts a value; a switch that is off, as by default, and an empty list
are left out."""


def how(key: str) -> Callable[[Any], Any]:
    """Return what converts a value for a key of the spec, into None if the key is to be left out."""
    if key in _HOW:
        return _HOW[key]
    parts = [fields()[key].annotation]
    for part in parts:
        parts += get_args(part)
    return next((_TYPES[part] for part in (get_origin(p) or p for p in parts) if part in _TYPES), lambda v: v)
