"""Collect the values of a new spec, with the key of the other tool's config that each comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os.path import exists, isfile
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dsft.convert.values import NotOfferedError, flag, how, names_in, number
from dsft.errors import Problem, SpecError
from dsft.spec.aliases import LEFT_OUT, OTHER_NAMES, keys, likely_key
from dsft.spec.document import SpecDumper, quote
from dsft.spec.not_offered import feature_of_key, feature_of_value, is_off
from dsft.spec.task import task_names
from dsft.system import json_file

T = TypeVar("T")
_DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".txt", ".arrow", ".gz", ".zst")


@dataclass
class Draft:
    """A spec that is filled in from the config of another tool.

    given     the config: its keys and values
    defaults  what the tool takes for a key that the config leaves out, where that decides the result
    path      the config file
    command   name of the training command or script that the config is from, such as "dpo"; "" for a file
    reasons   reason -> keys of the tool that are not carried over for it
    values    dotted key of the spec -> value
    comments  dotted key, or section, of the spec -> the key that its value comes from, and a note
    left      key of the config -> why it is not in the spec
    read      keys of the config that have been looked at

    `names` are keys of the config, separated by spaces; of several, the first that is given counts, else the
    first that has a default.
    """

    given: Mapping[str, Any]
    defaults: dict[str, Any]
    path: Path
    command: str = ""
    reasons: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def entry(self, names: str) -> tuple[str, Any]:
        """Return the key that counts and its value, None if there is none. All of them count as read."""
        each = names.split()
        self.read.update(each)
        for values in (self.given, self.defaults):
            for name in each:
                if values.get(name) not in (None, ""):
                    return name, values[name]
        return each[0], None

    def get(self, names: str) -> Any:
        """Return the value of the key that counts, None if there is none."""
        return self.entry(names)[1]

    def is_given(self, name: str) -> bool:
        return self.given.get(name) not in (None, "")

    def number(self, names: str) -> float:
        """Return a number, 0 if there is none. Raise SpecError for another value."""
        return self._as(number, names) or 0.0

    def is_on(self, names: str) -> bool:
        """Return whether a switch is on. Raise SpecError for a value that is no switch."""
        return self._as(flag, names) or False

    def names(self, names: str) -> list[str]:
        """Return the names in a list, or in a text with commas."""
        return self._as(names_in, names) or []

    def _as(self, to: Callable[[Any], T], names: str) -> T | None:
        name, value = self.entry(names)
        try:
            return to(value) if value is not None else None
        except NotOfferedError as error:
            self.leave(name, f"{quote(value)}: {error}")
            return None
        except (ValueError, TypeError) as error:
            raise mistake(name, f"{quote(value)}: {error}") from error

    def carry(self, key: str, names: str | None = None, note: str = "") -> Any:
        """Set `key` of the spec to the value of `names`, by default its names in other tools, and return it,
        None if the key is left out. Raise SpecError for a value that cannot be converted."""
        names = OTHER_NAMES[key] if names is None else names
        value = self._as(how(key), names)
        if value is not None:
            self.put(key, value, "; ".join(filter(None, (self.source(self.entry(names)[0]), note))))
        return value

    def carry_all(self, *keys: str) -> None:
        for key in keys:
            self.carry(key)

    def switch(self, key: str, value: Any, names: str | None = None, note: str = "") -> bool:
        """Set `key` of the spec to `value` if a switch of the config is on, and return whether it is. names:
        keys of the switch, by default the names of `key: value` in other tools."""
        names = OTHER_NAMES[f"{key}: {value}"] if names is None else names
        if on := self.is_on(names):
            self.put(key, value, "; ".join(filter(None, (self.entry(names)[0], note))))
        return on

    def put(self, key: str, value: Any, comment: str = "") -> None:
        """Set a dotted key of the spec."""
        self.values[key] = value
        if comment:
            self.comments[key] = comment

    def has(self, section: str) -> bool:
        return any(key.startswith(f"{section}.") for key in self.values)

    def source(self, name: str) -> str:
        """Return the comment for the value of a key."""
        return name if self.is_given(name) else f"default of {name}"

    def leave(self, names: str, reason: str) -> None:
        """Record why those of the keys that are given are not in the spec."""
        for name in names.split():
            self.read.add(name)
            if self.is_given(name):
                self.left.setdefault(name, reason)

    def find(self, name: str) -> Path | None:
        """Return a file that the config names: in the working folder, beside the config, or in a folder above
        it; None if it is in none of them."""
        here, folder = Path.cwd(), self.path.parent.resolve()
        for place in (here, folder, *folder.parents):
            path = place / name
            if isfile(path):
                return path.relative_to(here) if path.is_relative_to(here) else path
        return None

    def leave_rest(self) -> None:
        """Record the reason for every key that has a value and has not been read; `left` is then in the order
        of the config."""
        table = {**LEFT_OUT, **self.reasons}
        reasons = {name: reason for reason, names in table.items() for name in names.split()}
        for name, value in self.given.items():
            if name not in self.read and self.is_given(name):
                off = "off, as here" if is_off(value) or value in ([], {}) else None
                self.left.setdefault(name, reasons.get(name) or off or no_key_for(name, value))
        order = {name: position for position, name in enumerate(self.given)}
        self.left = dict(
            sorted(self.left.items(), key=lambda item: order.get(item[0].partition(".")[0], len(order)))
        )

    def text(self, head: list[str]) -> str:
        """Return the spec as YAML, keys in the order of the schema, after the comment lines `head`."""
        lines = [f"# {_one_line(line)}".rstrip() for line in head]
        for key in keys():
            if key in self.values or self.has(key):
                lines += [""] if "." not in key else []
                lines += self._lines(key)
        return "\n".join(lines) + "\n"

    def _lines(self, key: str) -> Iterator[str]:
        value, indent = self.values.get(key), "  " * key.count(".")
        flow = f" {_flow(value)}" if key in self.values else ""
        tail = f"  # {_one_line(self.comments[key])}" if key in self.comments else ""
        items = value if isinstance(value, list) and value and isinstance(value[0], dict) else []
        yield f"{indent}{key.rpartition('.')[2]}:{'' if items else flow}{tail}"
        yield from (f"{indent}  - {_flow(item)}" for item in items)


def no_key_for(name: str, value: Any) -> str:
    """Return why a key with this value is not in the spec, in the words of dsft validate."""
    feature, ours = feature_of_key(name) or feature_of_value(name, value), likely_key("", name)
    if feature is not None:
        return feature.clause()
    return f"see {ours}" if ours is not None else "dsft has no key for it (docs/limits.md)"


def is_file_name(name: str) -> bool:
    """Return whether a data set is a file or a folder (maybe not on this machine), and no hub id."""
    return name.startswith((".", "/", "~")) or Path(name).suffix in _DATA_SUFFIXES or exists(name)


def hub_path(*parts: Any) -> str:
    """Return the path of a hub data set: its id, subset and split, those that there are."""
    return ":".join(str(part) for part in parts if part)


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


def refuse(name: str, value: str) -> SpecError:
    """Return the error for a method of training that dsft does not have."""
    asked = feature_of_value("task", value)
    reason = asked.clause() if asked is not None else f"the tasks of dsft are {task_names()}"
    return mistake(name, f"{quote(value)}: {reason}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raise SpecError if there is none."""
    try:
        found = json_file.read_json(path)
    except (OSError, ValueError) as error:
        raise mistake(str(path), f"it {json_file.reason_of(error)}") from error
    if not isinstance(found, dict):
        raise mistake(str(path), "it is no mapping of keys to values")
    return found
