"""A spec's file and overrides to a checked `Spec`, and back.

Takes a path and `key=value` texts, gives `Spec`; reads the file, the model's config.json, and whether the
files that the spec names exist. Every mistake that can be seen is told at once, each with its line.
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
from dsft.spec.aliases import descriptions, meant
from dsft.spec.architecture import model_findings
from dsft.spec.combinations import combinations
from dsft.spec.document import Document, Finding, Path, Writer, read_document, shown
from dsft.spec.files import file_findings, model_config, source_findings
from dsft.spec.hosts import expand_hosts
from dsft.spec.overrides import apply_overrides
from dsft.spec.rules import refused
from dsft.spec.schema import Spec
from dsft.spec.wording import errors_of, key_of, path_in, worded

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
    """The checked spec. SpecError with all problems; MissingInputError where the file cannot be read.

    `more` is a check of the caller's, whose findings are told with the others.
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
    """Why a spec that has the right form would be refused, without a look at the files that it names."""
    return _findings(spec, False, more)


def dump_spec(spec: Spec) -> str:
    """The spec with every default written out, as YAML that `load_spec` reads back to an equal spec."""
    return yaml.dump(
        spec.model_dump(mode="json"), Dumper=Writer, sort_keys=False, allow_unicode=True, width=110
    )


def _read(path: FilePath) -> str:
    """The text of the file, at most `MAX_BYTES`."""
    name = shown(str(path))
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
    """The spec, or None; problems join the document's."""
    if not isinstance(document.data, dict):
        what = "the file is empty" if document.data is None else f"{shown(document.data)} stands alone"
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
        sentences = worded(told, document.data, descriptions())
        document.problems += [document.problem(path, message) for path, message in sentences]
        refused_keys = {key_of(path_in(document.data, e)) for e in errors if e["type"] != "extra_forbidden"}
        spec, broken = None, refused_keys | meant_keys
        stand_in = _stand_in(document.data)
    if stand_in is not None:
        stand_in, adapters = with_saved_adapter(stand_in)
        found = (*adapters, *_findings(stand_in, check_files, more))
        document.problems += [document.problem(f.path, f.message) for f in _trusted(found, broken)]
    return stand_in if spec is not None else None


def _findings(spec: Spec, check_files: bool, more: Check) -> list[Finding]:
    """What is wrong beyond single values: values together, on the disk, and what the caller knows."""
    config, unreadable = model_config(spec, check_files=check_files)
    found = [*combinations(spec), *refused(spec), *more(spec), *source_findings(spec), *unreadable]
    if config is not None:
        found += model_findings(spec, config)
    told = {finding.path for finding in found}
    if check_files:
        found += (finding for finding in file_findings(spec) if finding.path not in told)
    return found


def _trusted(findings: Iterable[Finding], broken: set[str]) -> Iterator[Finding]:
    """Those that follow from no key that is itself wrong."""
    for finding in findings:
        reads = finding.reads or (key_of(finding.path),)
        if not any(_overlap(read, key) for read in reads for key in broken):
            yield finding


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _meant_keys(errors: Sequence[ErrorDetails], data: Any) -> set[str]:
    """Our names for what unknown keys stand for: these are not also told to be missing."""
    unknown = [path_in(data, error) for error in errors if error["type"] == "extra_forbidden"]
    targets = [meant(key_of(path[:-1]), str(path[-1])) for path in unknown]
    return {word.strip("(),:") for target in targets if target is not None for word in target.split()}


def _stands_for(error: ErrorDetails, data: Any, meant_keys: set[str]) -> bool:
    return any(_overlap(key_of(path_in(data, error)), key) for key in meant_keys)


# What stands in for a required key that is missing or wrong, so that the rest can still be looked at.
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
    """A spec of all that is right; wrong values are left out or stood in for. None where that fails."""
    mended = copy.deepcopy(dict(data))
    for _ in range(4):  # sections, their keys, keys in lists; then it holds or never will
        try:
            return Spec.model_validate(mended)
        except ValidationError as error:
            for detail in errors_of(error):
                _mend(mended, path_in(mended, detail))
    return None


def _mend(data: dict[str, Any], path: Path) -> None:
    """Take out what stands at `path`, and put its stand-in there if it has one."""
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
    """In the order of the file's lines; what has no line stands last."""
    ordered = sorted(dict.fromkeys(problems), key=lambda p: p.line if p.line is not None else MAX_BYTES)
    count = f"{len(ordered)} problem{'' if len(ordered) == 1 else 's'}"
    return SpecError(f"{shown(str(path))[1:-1]}: {count}", ordered)
