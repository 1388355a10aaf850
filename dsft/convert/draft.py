"""Collect the values of a new spec, with the key of the other tool's config that each comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os.path import exists, isfile
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dsft.errors import Problem, SpecError
from dsft.spec.aliases import NEEDLESS, likely_key
from dsft.spec.document import SpecDumper, quote
from dsft.spec.not_offered import feature_of_key, feature_of_value, is_off
from dsft.spec.schema import Spec

T = TypeVar("T")
NO_EFFECT: dict[str, tuple[str, ...]] = {
    **NEEDLESS,
    "dsft never runs code that comes with a model": ("trust_remote_code",),
    "dsft fills in no placeholders; write the names into the rows": ("model_author", "model_name"),
    "dsft resumes from its own checkpoints by itself; to start from weights of the other tool, set "
    "model.name_or_path to their folder": ("resume_from_checkpoint", "auto_resume_from_checkpoints"),
    "model.kernels: auto, the default, uses Liger's kernels on a GPU": (
        *("plugins", "use_liger_kernel", "enable_liger_kernel", "use_liger"),
        *("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm"),
        *("liger_fused_linear_cross_entropy", "liger_rms_norm_gated", "liger_cross_entropy"),
    ),
}
"""Reason -> keys of other tools that are not carried over for it."""


_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow", ".gz", ".zst")


class NotOfferedError(Exception):
    """A value that the other tool takes and dsft has nothing for. The key is left out, with this reason."""


@dataclass
class Draft:
    """A spec that is filled in from the config of another tool.

    given     the config: its keys and values
    defaults  what the tool takes for a key that the config leaves out, where that decides the result
    folder    folder of the config file, for files that it names
    spec      values of the spec, in sections
    comments  dotted key of the spec -> the key that its value comes from, and a note
    left      key of the config -> why it is not in the spec
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    folder: Path
    spec: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, *names: str) -> Any:
        """Return the value of the first of the keys that is given, else the first that has a default, else
        None. All of them count as read."""
        return self._find(names)[1]

    def is_given(self, name: str) -> bool:
        return self.given.get(name) not in (None, "")

    def number(self, *names: str) -> float:
        """Return the number of a key, 0 if it is not given and has no default. Raise SpecError for another
        value."""
        return self._as(number, names) or 0.0

    def is_on(self, *names: str) -> bool:
        """Return whether a switch is on. Raise SpecError for a value that is no switch."""
        return self._as(flag, names) or False

    def names(self, *names: str) -> list[str]:
        """Return the names in a list, or in a text with commas."""
        return self._as(names_in, names) or []

    def _as(self, to: Callable[[Any], T], names: tuple[str, ...]) -> T | None:
        name, value = self._find(names)
        try:
            return to(value) if value is not None else None
        except (ValueError, TypeError) as error:
            raise mistake(name, f"{quote(value)}: {error}") from error

    def carry(self, key: str, *names: str, to: Callable[[Any], Any] | None = None, note: str = "") -> Any:
        """Set `key` of the spec to the value of the first of `names` that is given, or has a default, and
        return it; `to` converts it, into None if the key is to be left out. Raise SpecError if it cannot."""
        name, value = self._find(names)
        if value is None:
            return None
        try:
            value = to(value) if to is not None else value
        except NotOfferedError as error:
            self.leave(name, f"{quote(value)}: {error}")
            return None
        except (ValueError, TypeError) as error:
            raise mistake(name, f"{quote(value)}: {error}") from error
        if value is None:
            return None
        comment = name if self.is_given(name) else f"default of {name}"
        self.put(key, value, f"{comment}; {note}" if note else comment)
        return value

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key of the spec."""
        *sections, last = key.split(".")
        place = self.spec
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
        if comment:
            self.comments[key] = comment

    def leave(self, name: str, reason: str) -> None:
        """Record that a key of the config is not in the spec, and why."""
        self.read.add(name)
        if self.is_given(name):
            self.left.setdefault(name, reason)

    def find(self, name: str) -> Path | None:
        """Return a file that the config names: in the working folder, beside the config, or in a folder above
        it; None if it is in none of them."""
        here, folder = Path.cwd(), self.folder.resolve()
        for place in (here, folder, *folder.parents):
            path = place / name
            if isfile(path):
                return path.relative_to(here) if path.is_relative_to(here) else path
        return None

    def leave_rest(self) -> None:
        """Record the reason for every key that has a value and has not been read."""
        reasons = {name: reason for reason, names in NO_EFFECT.items() for name in names}
        for name, value in self.given.items():
            if name in self.read or value is None:
                continue
            if name in reasons:
                reason = reasons[name]
            elif is_off(value) or value in ([], {}):
                reason = "off, as here"
            else:
                reason = _no_key_for(name, value)
            self.left.setdefault(name, reason)

    def text(self, head: list[str]) -> str:
        """Return the spec as YAML, sections in the order of the schema, after the comment lines `head`."""
        lines = [f"# {_one_line(line)}".rstrip() for line in head]
        for key in Spec.model_fields:
            if key in self.spec:
                lines += ["", *self._lines(key, self.spec[key], 0)]
        return "\n".join(lines) + "\n"

    def _lines(self, path: str, value: Any, depth: int) -> list[str]:
        indent, name = "  " * depth, path.rpartition(".")[2]
        tail = self._tail(path)
        if isinstance(value, dict) and depth < 2 and value:
            below = [self._lines(f"{path}.{key}", inner, depth + 1) for key, inner in value.items()]
            return [f"{indent}{name}:{tail}", *(line for part in below for line in part)]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = [
                f"{indent}  - {_flow(item)}{self._tail(f'{path}.{number}')}"
                for number, item in enumerate(value)
            ]
            return [f"{indent}{name}:{tail}", *items]
        return [f"{indent}{name}: {_flow(value)}{tail}"]

    def _tail(self, path: str) -> str:
        return f"  # {_one_line(self.comments[path])}" if path in self.comments else ""

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        self.read.update(names)
        for name in names:
            if self.is_given(name):
                return name, self.given[name]
        for name in names:
            if self.defaults.get(name) is not None:
                return name, self.defaults[name]
        return names[0], None


def _no_key_for(name: str, value: Any) -> str:
    feature, ours = feature_of_key(name) or feature_of_value(name, value), likely_key("", name)
    if feature is not None:
        return feature.clause()
    return f"see {ours}" if ours is not None else "dsft has no key for it (docs/limits.md)"


def is_file_name(name: str) -> bool:
    """Return whether a data set is a file or a folder (maybe not on this machine), and no hub id."""
    return name.startswith((".", "/", "~")) or Path(name).suffix in _DATA_SUFFIXES or exists(name)


def _one_line(comment: str) -> str:
    """Return a comment that cannot end its line: keys and values of the config are quoted in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in comment)


def _flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    text: str = yaml.dump(
        value, Dumper=SpecDumper, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6
    )
    return text.removesuffix("\n").removesuffix("\n...")


def mistake(where: str, message: str) -> SpecError:
    """Return the error for a config that cannot be converted. where: a key of it, an option, or its file."""
    return SpecError("the config cannot be converted", [Problem(where, message)])


# --- values ----------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    """Return a number, also one that YAML 1.1 reads as a text (`1e-5`)."""
    if isinstance(value, bool):
        raise ValueError("a number is needed")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.inf
    if not math.isfinite(found):
        raise ValueError("a number is needed")
    return found


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
    if isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ValueError("true or false is needed")
        return value.lower() == "true"
    if not isinstance(value, (bool, int)):
        raise ValueError("true or false is needed")
    return bool(value)


def names_in(value: Any) -> list[str]:
    """Return a list of names, also one that is written as a text with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(part, (str, int, float)) for part in value):
        raise ValueError("a list of names is needed")
    return [str(part) for part in value]
