"""Describe a tool whose configs can be converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.convert.draft import Draft, mistake
from dsft.errors import SpecError
from dsft.spec.document import quote
from dsft.spec.not_offered import feature_of_value


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
    asked = feature_of_value("task", value)
    reason = asked.clause() if asked is not None else "the tasks of dsft are sft, pretrain and dpo"
    return mistake(name, f"{quote(value)}: {reason}")
