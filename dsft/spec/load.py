"""Load a spec's file and overrides as a checked `Spec`, and dump a `Spec` as YAML.

All mistakes that can be found are reported at once, each with its line. Beside the file itself, this reads
the model's config.json and checks that the files that the spec names exist.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.spec.adapter import with_saved_adapter
from dsft.spec.aliases import fields, is_of_another_tool, likely_key
from dsft.spec.architecture import model_findings
from dsft.spec.cluster import cluster_findings
from dsft.spec.combinations import combinations
from dsft.spec.document import Document, SpecDumper, dotted, quote, read_document
from dsft.spec.files import file_findings, model_config, source_findings
from dsft.spec.findings import Finding
from dsft.spec.hosts import expand_hosts, with_ranks
from dsft.spec.messages import errors_of, key_of, path_in, sentences
from dsft.spec.model_types import model_type_findings
from dsft.spec.overrides import apply_overrides
from dsft.spec.rules import rule_findings
from dsft.spec.schema import Source, Spec

MAX_BYTES = 1_000_000


def load_spec(
    path: Path | str, overrides: Sequence[str] = (), *, check_files: bool = True, ranks: int | None = None
) -> Spec:
    """Load and check a spec. ranks: see `with_ranks`; None: the spec's own hosts. Raise SpecError with all
    problems, MissingInputError if the file cannot be read."""
    document = read_document(_read(Path(path)))
    if is_of_another_tool(document.data):
        message = "this is a config of another tool, such as LLaMA-Factory, Axolotl, TRL, ms-swift or "
        message += f"DeepSpeed; dsft convert {quote(str(path))[1:-1]} writes a spec from it"
        raise _all_problems(path, [Problem("file", message)])
    readable = not document.problems or document.data is not None
    apply_overrides(document, overrides)
    expand_hosts(document)
    spec = _validate(document, check_files, ranks) if readable else None
    if document.problems or spec is None:
        raise _all_problems(path, document.problems)
    return spec


_TRAIN = "data", "train", 0


def given_source(text: str) -> Source:
    """Return the rows that a user names by --data: a path, or as in data.train a mapping in braces, such as
    {path: a.csv, columns: {text: review}}. Raise SpecError with all problems."""
    document = read_document(text) if text.startswith("{") else None
    data = document.data if document else {"path": text}
    problems = [replace(one, where="--data", line=None) for one in (document.problems if document else ())]
    try:
        if not problems:
            return Source.model_validate(data)
    except ValidationError as error:
        errors = [{**one, "loc": (*_TRAIN, *one["loc"])} for one in errors_of(error)]  # as in a spec
        named = sentences(cast(list[ErrorDetails], errors), {"data": {"train": [data]}})
        problems = [Problem(f"--data: {dotted(path[len(_TRAIN) :])}", message) for path, message in named]
    raise SpecError("The command line cannot be used.", problems)


def dump_spec(spec: Spec) -> str:
    """Return the spec with all defaults as YAML; `load_spec` reads it back to an equal spec."""
    return yaml.dump(
        spec.model_dump(mode="json"), Dumper=SpecDumper, sort_keys=False, allow_unicode=True, width=110
    )


def _read(path: Path) -> str:
    """Return the text of the file. Raise SpecError if it is over `MAX_BYTES` or not UTF-8."""
    name = quote(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        reason = "does not exist" if isinstance(error, FileNotFoundError) else reason
        message = f"the spec {name} {reason}; give the path of a YAML file (dsft init writes one)"
        raise MissingInputError(message) from error
    if len(content) > MAX_BYTES:
        message = f"it has more than {MAX_BYTES} bytes, which is too long for a spec; give another file"
        raise _all_problems(path, [Problem("file", message)])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problem = Problem("file", "this is not UTF-8; save the file as UTF-8", line)
        raise _all_problems(path, [problem]) from error


def _validate(document: Document, check_files: bool, ranks: int | None) -> Spec | None:
    """Return the spec, or None if it is invalid; problems are added to the document's."""
    data = document.data
    if not isinstance(data, dict):
        what = "the file is empty" if data is None else f"{quote(data)} is not a mapping"
        rule = "a spec is a mapping of keys, which begins with name: and task:"
        document.problems.append(Problem("spec", f"{what}; {rule}"))
        return None
    wrong_keys: set[str] = set()
    errors: list[ErrorDetails] = []
    try:
        spec: Spec | None = Spec.model_validate(data)
    except ValidationError as error:
        errors = errors_of(error)
        meant_keys = _meant_keys(errors, data)
        for path, message in sentences([e for e in errors if not _is_meant(e, data, meant_keys)], data):
            document.problems.append(document.problem(path, message))
        spec, wrong_keys = _without(data, errors)
        wrong_keys |= meant_keys
    if spec is not None:
        spec, adapter_findings = with_saved_adapter(spec if ranks is None else with_ranks(spec, ranks))
        for found in (*adapter_findings, *refusals(spec, check_files)):
            reads = found.reads or (key_of(found.path),)
            if not any(_overlap(read, key) for read in reads for key in wrong_keys):
                document.problems.append(document.problem(found.path, found.message))
    return None if errors else spec


def refusals(spec: Spec, check_files: bool = False) -> list[Finding]:
    """Return why a valid instance of the schema is refused: findings on more than single values, such as
    combinations, the cluster, the model and, if `check_files`, the files that it names."""
    config, unreadable = model_config(spec, check_files=check_files)
    found = [
        *combinations(spec),
        *rule_findings(spec),
        *cluster_findings(spec),
        *source_findings(spec),
        *unreadable,
    ]
    if config is not None:
        found += (*model_type_findings(spec, config), *model_findings(spec, config))
    reported = {finding.path for finding in found}
    if check_files:
        found += (finding for finding in file_findings(spec) if finding.path not in reported)
    return found


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _meant_keys(errors: Sequence[ErrorDetails], data: Any) -> set[str]:
    """Return the spec's keys that unknown keys most likely mean; they are not also reported as missing."""
    unknown = [path_in(data, error) for error in errors if error["type"] == "extra_forbidden"]
    targets = [likely_key(key_of(path[:-1]), str(path[-1])) for path in unknown]
    return {word.strip("(),:") for target in targets if target is not None for word in target.split()}


def _is_meant(error: ErrorDetails, data: Any, meant_keys: set[str]) -> bool:
    key = key_of(path_in(data, error))
    return error["type"] == "missing" and any(_overlap(key, meant) for meant in meant_keys)


_REQUIRED: Mapping[str, Any] = {
    "name": "x",
    "task": "sft",
    "model": {"name_or_path": "x"},
    "data": {},
    "data.train": [{"path": "builtin:quickstart"}],
    "train": {},
    "optim": {},
    "optim.learning_rate": 1.0,
    "cluster.hosts": {"localhost": 1},
}
"""Required key -> a value for it, if it is missing or wrong, with which the other keys can be checked."""


def _without(data: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> tuple[Spec | None, set[str]]:
    """Return a spec without what is wrong, and the keys that were removed for it, apart from unknown ones; no
    spec if that is not enough."""
    rest, removed = copy.deepcopy(dict(data)), set[str]()
    for error in errors:
        path = path_in(data, error)
        field = fields().get(key_of(path))
        if field is not None and field.is_required() and key_of(path) not in _REQUIRED:
            path = path[:-1]  # a section without a required key
        while isinstance(path[-1], int):
            path = path[:-1]
        if error["type"] != "extra_forbidden":
            removed.add(key_of(path))
        container: Any = rest
        with suppress(KeyError, IndexError, TypeError):  # removed before, or missing
            for part in path[:-1]:
                container = container[part]
            del container[path[-1]]
    for dotted_key, value in _REQUIRED.items():
        section, _, key = dotted_key.partition(".")
        container = rest.get(section) if key else rest
        if isinstance(container, dict):
            container.setdefault(key or section, copy.deepcopy(value))
    try:
        return Spec.model_validate(rest), removed
    except ValidationError:
        return None, removed


def _all_problems(path: Path | str, problems: Sequence[Problem]) -> SpecError:
    """Return the error with all problems, sorted by line; those without a line come last."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: p.line if p.line is not None else MAX_BYTES)
    count = f"{len(ordered)} problem{'' if len(ordered) == 1 else 's'}"
    return SpecError(f"{quote(str(path))[1:-1]}: {count}", ordered)
