"""Load a spec's file and overrides as a checked `Spec`, and dump a `Spec` as YAML.

All mistakes that can be found are reported at once, each with its line. Beside the file itself, this reads
the model's config.json and checks that the files that the spec names exist.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from dsft.errors import MissingInputError, Problem, SpecError
from dsft.spec.adapter import with_saved_adapter
from dsft.spec.aliases import descriptions, likely_key
from dsft.spec.architecture import model_findings
from dsft.spec.combinations import combinations
from dsft.spec.document import Document, Finding, Path, SpecDumper, quote, read_document
from dsft.spec.files import file_findings, model_config, source_findings
from dsft.spec.hosts import expand_hosts
from dsft.spec.messages import errors_of, key_of, path_in, sentences
from dsft.spec.overrides import apply_overrides
from dsft.spec.rules import rule_findings
from dsft.spec.schema import Spec

MAX_BYTES = 1_000_000
Check = Callable[[Spec], Iterable[Finding]]


def _no_more(spec: Spec) -> Iterable[Finding]:
    return ()


def load_spec(
    path: FilePath | str,
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
    more: Check = _no_more,
) -> Spec:
    """Load and check a spec. Raise SpecError with all problems, MissingInputError if the file cannot be read.

    more: an additional check by the caller, whose findings are reported with the others.
    """
    document = read_document(_read(FilePath(path)))
    readable = not document.problems or document.data is not None
    apply_overrides(document, overrides)
    expand_hosts(document)
    spec = _validate(document, check_files, more) if readable else None
    if document.problems or spec is None:
        raise _all_problems(path, document.problems)
    return spec


def refusals(spec: Spec, more: Check = _no_more) -> list[Finding]:
    """Return why a valid instance of the schema would be refused, without checking the files that it
    names."""
    return _findings(spec, False, more)


def dump_spec(spec: Spec) -> str:
    """Return the spec with all defaults as YAML; `load_spec` reads it back to an equal spec."""
    return yaml.dump(
        spec.model_dump(mode="json"), Dumper=SpecDumper, sort_keys=False, allow_unicode=True, width=110
    )


def _read(path: FilePath) -> str:
    """Return the text of the file. Raise SpecError if it is over `MAX_BYTES` or not UTF-8."""
    name = quote(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
        detail = (
            "" if isinstance(error, FileNotFoundError) else f" ({getattr(error, 'strerror', None) or error})"
        )
        message = f"the spec {name} {reason}{detail}; give the path of a YAML file (dsft init writes one)"
        raise MissingInputError(message) from error
    if len(content) > MAX_BYTES:
        raise SpecError(
            f"{name}: 1 problem", [Problem("file", f"over {MAX_BYTES} bytes; a spec is far smaller")]
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problem = Problem("file", "this is not UTF-8; save the file as UTF-8", line)
        raise SpecError(f"{name}: 1 problem", [problem]) from error


def _validate(document: Document, check_files: bool, more: Check) -> Spec | None:
    """Return the spec, or None if it is invalid; problems are added to the document's."""
    if not isinstance(document.data, dict):
        what = "the file is empty" if document.data is None else f"{quote(document.data)} stands alone"
        document.problems.append(
            Problem("spec", f"{what}; a spec is a mapping that begins with name: and task:")
        )
        return None
    try:
        spec: Spec | None = Spec.model_validate(document.data)
        stand_in, broken = spec, set[str]()
    except ValidationError as error:
        errors = errors_of(error)
        meant_keys = _meant_keys(errors, document.data)
        told = [
            e for e in errors if not (e["type"] == "missing" and _stands_for(e, document.data, meant_keys))
        ]
        typed = sentences(told, document.data, descriptions())
        document.problems += [document.problem(path, message) for path, message in typed]
        refused_keys = {key_of(path_in(document.data, e)) for e in errors if e["type"] != "extra_forbidden"}
        spec, broken = None, refused_keys | meant_keys
        stand_in = _stand_in(document.data)
    if stand_in is not None:
        stand_in, adapters = with_saved_adapter(stand_in)
        found = (*adapters, *_findings(stand_in, check_files, more))
        document.problems += [document.problem(f.path, f.message) for f in _trusted(found, broken)]
    return stand_in if spec is not None else None


def _findings(spec: Spec, check_files: bool, more: Check) -> list[Finding]:
    """Return findings on more than single values: combinations, files on the disk, the model, and the
    caller's check."""
    config, unreadable = model_config(spec, check_files=check_files)
    found = [*combinations(spec), *rule_findings(spec), *more(spec), *source_findings(spec), *unreadable]
    if config is not None:
        found += model_findings(spec, config)
    told = {finding.path for finding in found}
    if check_files:
        found += (finding for finding in file_findings(spec) if finding.path not in told)
    return found


def _trusted(findings: Iterable[Finding], broken: set[str]) -> Iterator[Finding]:
    """Yield the findings that do not depend on a key that is itself wrong."""
    for finding in findings:
        reads = finding.reads or (key_of(finding.path),)
        if not any(_overlap(read, key) for read in reads for key in broken):
            yield finding


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _meant_keys(errors: Sequence[ErrorDetails], data: Any) -> set[str]:
    """Return the spec's keys that unknown keys most likely mean; they are not also reported as missing."""
    unknown = [path_in(data, error) for error in errors if error["type"] == "extra_forbidden"]
    targets = [likely_key(key_of(path[:-1]), str(path[-1])) for path in unknown]
    return {word.strip("(),:") for target in targets if target is not None for word in target.split()}


def _stands_for(error: ErrorDetails, data: Any, meant_keys: set[str]) -> bool:
    return any(_overlap(key_of(path_in(data, error)), key) for key in meant_keys)


# Placeholders for required keys that are missing or wrong, so that the rest can still be checked.
_STAND_INS: Mapping[str, Any] = {
    "name": "x",
    "task": "sft",
    "model": {"name_or_path": "x"},
    "data": {},
    "data.train": [{"path": "builtin:quickstart"}],
    "data.train.path": "builtin:quickstart",
    "data.eval.path": "builtin:quickstart",
    "train": {},
    "optim": {},
    "optim.learning_rate": 1.0,
    "optim.groups.parameters": "x",
    "cluster.hosts": {"localhost": 1},
    "cluster.accelerator.name": "cpu",
}


def _stand_in(data: Mapping[str, Any]) -> Spec | None:
    """Return a spec of all valid values, without the wrong ones or with placeholders for them, to check the
    rest. None if that fails."""
    mended = copy.deepcopy(dict(data))
    for _ in range(4):  # sections, their keys, keys in lists; if it is still invalid then, it stays so
        try:
            return Spec.model_validate(mended)
        except ValidationError as error:
            for detail in errors_of(error):
                _mend(mended, path_in(mended, detail))
    return None


def _mend(data: dict[str, Any], path: Path) -> None:
    """Remove the value at `path`, or replace it by its placeholder if there is one."""
    key = key_of(path)
    while path and isinstance(path[-1], int):
        path = path[:-1]
    container: Any = data
    for part in path[:-1]:
        container = container[part] if part in container or isinstance(part, int) else {}
    if not isinstance(container, dict) or not path:
        return
    container.pop(path[-1], None)
    if key in _STAND_INS:
        container[path[-1]] = copy.deepcopy(_STAND_INS[key])


def _all_problems(path: FilePath | str, problems: Sequence[Problem]) -> SpecError:
    """Return the error with all problems, sorted by line; those without a line come last."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: p.line if p.line is not None else MAX_BYTES)
    count = f"{len(ordered)} problem{'' if len(ordered) == 1 else 's'}"
    return SpecError(f"{quote(str(path))[1:-1]}: {count}", ordered)
