"""Parse YAML text to plain values, with limits to their number and depth.

`read_document` returns a `Document`: mappings, lists, texts, numbers, booleans, nulls, the line of every
entry, and the problems of the YAML itself. Tags, merge keys and duplicate keys are not allowed. Scalars
follow YAML 1.2 (`1e-5` is a number, `on` and `yes` are texts), https://yaml.org/spec/1.2.2/#103-core-schema.
`parse_yaml` reads the YAML 1.1 of other programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import yaml

from dsft.errors import Problem

KeyPath = tuple[str | int, ...]

MAX_VALUES = 20_000  # with aliases expanded, as protection against alias bombs
MAX_DEPTH = 40

_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float"))
_BARE_PART = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Location:
    """The place of a value: a line of the file, or the text of an override. Both are None if unknown."""

    line: int | None = None
    override: str | None = None


@dataclass
class Document:
    """The values of a YAML text. locations: place of every key and list item; problems: those of the YAML."""

    data: Any = None
    locations: dict[KeyPath, Location] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a Problem at `path`, or at its nearest parent that the file or an override has."""
        location = self._location(path)
        if location.override is None:
            return Problem(dotted(path) or "spec", message, location.line)
        return Problem(f"override {quote(location.override)}", f"{dotted(path)}: {message}")

    def _location(self, path: KeyPath) -> Location:
        for end in range(len(path), 0, -1):
            if path[:end] in self.locations:
                return self.locations[path[:end]]
        return Location()


def dotted(path: KeyPath) -> str:
    """Return a path in the syntax of overrides: `('cluster', 'hosts', '10.0.0.1')` gives
    `cluster.hosts."10.0.0.1"`."""
    parts = (str(part) for part in path)
    return ".".join(part if _BARE_PART.fullmatch(part) else f'"{repr(part)[1:-1]}"' for part in parts)


def quote(value: object, limit: int = 80) -> str:
    """Format a value for a message: null, true and false as in YAML, control characters escaped, at most
    `limit` characters."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


class _BoundedLoader(yaml.SafeLoader):
    """A YAML loader that composes a limited number of nodes."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.tags: list[tuple[str, int]] = []
        self.count = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _TooLarge(_TOO_MANY)
        event = self.peek_event()  # type: ignore[no-untyped-call]
        tag = getattr(event, "tag", None)
        if tag is not None:
            self.tags.append((tag, event.start_mark.line + 1))
        return super().compose_node(parent, index)

    def root(self) -> yaml.Node | None:
        """Return the root of the only document, None if it is empty. Raise _TooLarge where it has too many
        values, with aliases expanded, or too many levels."""
        root = self.get_single_node()
        level = [] if root is None else [root]
        count = depth = 0
        while level:
            count, depth = count + len(level), depth + 1
            if count > MAX_VALUES:
                raise _TooLarge(_TOO_MANY)
            if depth > MAX_DEPTH + 1:
                raise _TooLarge(_TOO_DEEP)
            level = list(islice(_below(level), MAX_VALUES + 1))
        return root


def _below(nodes: Iterable[yaml.Node]) -> Iterator[yaml.Node]:
    """Yield the items of lists and the keys and values of mappings."""
    for node in nodes:
        for entry in node.value if isinstance(node, yaml.CollectionNode) else ():
            yield from entry if isinstance(entry, tuple) else (entry,)


class _SpecLoader(_BoundedLoader):
    """A loader of which only the nodes are used; `_Builder` converts them to values."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class SpecDumper(yaml.SafeDumper):
    """A YAML dumper that quotes every text that the reader would not read back as a text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # PyYAML writes some line breaks (U+0085) raw and reads them back as spaces, except in double quotes.
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=None if data.isprintable() else '"')


SpecDumper.add_representer(str, SpecDumper.represent_str)


_SCALARS = (
    (_BOOL, r"true|True|TRUE|false|False|FALSE", "tTfF"),
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_INT, r"[-+]?[0-9]{1,40}|0o[0-7]{1,40}|0x[0-9a-fA-F]{1,40}", "-+0123456789"),
    (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
)
for _tag, _pattern, _first in _SCALARS:
    for _class in (_SpecLoader, SpecDumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read_document(text: str) -> Document:
    """Parse a YAML text. Never raises for invalid text: the mistakes are in `problems`."""
    try:
        reader = _SpecLoader(text)
        node = reader.root()
        builder = _Builder()
        builder.document.data = None if node is None else builder.value(node, ())
    except yaml.YAMLError as error:
        return Document(problems=[_syntax_problem(error)])
    except RecursionError:
        return Document(problems=[Problem("YAML", _TOO_DEEP)])
    except _TooLarge as error:
        return Document(problems=[Problem("YAML", str(error))])
    for tag, line in reader.tags:
        builder.document.problems.append(Problem("YAML", _tag_message(tag), line))
    return builder.document


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML 1.1 text without tags, as PyYAML's safe loader reads it (`1e-5` is a text,
    `on` is true). Raises ValueError with the reason why it cannot be read."""
    try:
        loader = _BoundedLoader(text)
        node = loader.root()
        if loader.tags:
            raise ValueError(f"line {loader.tags[0][1]}: {_tag_message(loader.tags[0][0])}")
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _tag_message(tag: str) -> str:
    return f"the tag {quote(tag)} is not allowed; write the plain value"


_TOO_MANY = f"there are more than {MAX_VALUES} values, counting those of aliases each time; write fewer"
_TOO_DEEP = f"values are nested more than {MAX_DEPTH} levels deep; write fewer levels"


class _TooLarge(ValueError):
    """Raised for more values or levels than a spec can need."""


class _Builder:
    """Converts nodes to values and collects lines and problems in `document`."""

    def __init__(self) -> None:
        self.document = Document()

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._entry(item, item, (*path, index)) for index, item in enumerate(node.value)]
        return _scalar(node)

    def _entry(self, place: yaml.Node, node: yaml.Node, path: KeyPath) -> Any:
        self.document.locations[path] = Location(line=place.start_mark.line + 1)
        return self.value(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            here = (*path, key)
            if key in values:
                self._refuse_duplicate(here, key_node)
                continue
            values[key] = self._entry(key_node, value_node, here)
        return values

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        line = node.start_mark.line + 1
        where = dotted(path) or "spec"
        if not isinstance(node, yaml.ScalarNode):
            self.document.problems.append(
                Problem(where, "a list or a mapping is used as a key; keys must be strings", line)
            )
            return None
        if not isinstance(_scalar(node), str):
            message = f"the key {node.value or '(empty)'} is not a string; put it in quotes"
            self.document.problems.append(Problem(where, message, line))
            return None
        return str(node.value)

    def _refuse_duplicate(self, path: KeyPath, node: yaml.Node) -> None:
        line = node.start_mark.line + 1
        first = self.document.locations[path].line
        message = f"this key is given twice, first on line {first}; keep one of them"
        self.document.problems.append(Problem(dotted(path), message, line))


def _scalar(node: Any) -> Any:
    text: str = node.value
    if node.tag == _NULL:
        return None
    if node.tag == _BOOL:
        return text.lower() == "true"
    try:
        if node.tag == _INT:
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        return float(text) if node.tag == _FLOAT else text
    except ValueError:  # a tag that was written, such as !!float x; it is refused as all tags are
        return text


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = None if mark is None else mark.line + 1
    if isinstance(error, yaml.reader.ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return Problem("YAML", f"the character U+{code:04X} is not allowed in YAML; remove it")
    reason = getattr(error, "problem", None) or "this cannot be read"
    if "'\\t'" in reason:
        return Problem("YAML", "YAML does not allow this tab; use spaces instead", line)
    if "expected a single document" in (getattr(error, "context", None) or ""):
        return Problem("YAML", "a second YAML document begins here; write everything into one document", line)
    way_out = "check indentation and quotes here (a string that contains ': ' or ' #' needs quotes)"
    return Problem("YAML", f"{reason}; {way_out}", line)
