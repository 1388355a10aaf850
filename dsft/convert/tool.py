"""Describe a tool whose configs can be converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.convert.draft import Draft
from dsft.errors import Problem, SpecError
from dsft.spec.document import shown
from dsft.spec.not_offered import of_value


@dataclass(frozen=True)
class Tool:
    """A tool.

    marks     keys by which its configs are recognized
    defaults  its defaults of keys that decide the result
    convert   fills in a draft; takes the task (None: from the config) and the path of dataset_info.json
    """

    title: str
    marks: tuple[str, ...]
    defaults: Mapping[str, Any]
    convert: Callable[[Draft, str | None, Path | None], None]


def refuse(name: str, value: str) -> SpecError:
    """Return the error for a method of training that dsft does not have."""
    asked = of_value("task", value)
    reason = asked.clause() if asked is not None else "the tasks of dsft are sft, pretrain and dpo"
    return mistake(name, f"{shown(value)}: {reason}")


def mistake(where: str, message: str) -> SpecError:
    """Return the error for a config that cannot be converted. where: a key of it, an option, or its file."""
    return SpecError("the config cannot be converted", [Problem(where, message)])
