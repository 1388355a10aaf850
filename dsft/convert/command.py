"""Write the spec of `dsft convert`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.convert import axolotl, ds_json, llamafactory, swift, trl
from dsft.convert.arguments import Tool
from dsft.convert.draft import Draft, mistake, refuse
from dsft.errors import MissingInputError, SpecError, StorageError
from dsft.spec.aliases import VALUES
from dsft.spec.document import parse_yaml, quote
from dsft.spec.load import MAX_BYTES, load_spec
from dsft.spec.not_offered import feature_of_value
from dsft.spec.task import TASKS, task_names
from dsft.system.json_file import parse_json, read_text, reason_of

TOOLS: Mapping[str, Tool] = {
    "llamafactory": llamafactory.TOOL, "axolotl": axolotl.TOOL, "trl": trl.TOOL, "ms-swift": swift.TOOL,
    "deepspeed": ds_json.TOOL,
}  # fmt: skip
_VERSION_1 = {"peft_config", "dist_config", "kernel_config", "model_class"}
_COMMAND = re.compile(
    r"\b(?:(?:trl|swift|llamafactory-cli|axolotl)\s+(?P<name>\w+)|(?P<script>\w+)\.py)"
    r"(?=\s+(?:--\w|\S+\.(?:ya?ml|json)\b))(?P<rest>.*)"
)
_WAY_OUT = "or put the options into a YAML file (--learning_rate 1e-4 becomes learning_rate: 1e-4)"
_NEEDED = (("model.name_or_path", "--model"), ("data.train", "--data"))


@dataclass(frozen=True)
class Converted:
    """A converted config.

    path      file of the spec
    title     name of the tool
    carried   keys of the config that are in the spec
    left      key of the config -> why it is not
    mistakes  what `dsft validate` says of the spec, apart from files that are not here; None: it is valid
    """

    path: Path
    title: str
    carried: int
    left: Mapping[str, str]
    mistakes: str | None


def convert_file(
    source: Path | str,
    tool: str | None = None,
    task: str | None = None,
    model: str | None = None,
    data: list[str] | None = None,
    dataset_info: Path | None = None,
    out: Path | None = None,
) -> Converted:
    """Convert a config, or a command line given as a string, and write the spec. Raise MissingInputError and
    SpecError if it cannot be read or converted, StorageError if the spec cannot be written."""
    path = Path("the command") if isinstance(source, str) else source
    given, command = _options_of(path, source) if isinstance(source, str) else _read(path)
    if task is not None and task not in TASKS:
        raise mistake("--task", f"{quote(task)} is not offered; use {task_names()}")
    named = VALUES["task"].get(command, command)
    task = task or (named if named in TASKS else None)
    kind = tool or recognized(given)
    if kind not in TOOLS:
        raise mistake("--from", f"{quote(kind)} is not known; use one of {', '.join(TOOLS)}")
    title = TOOLS[kind].title
    draft = Draft(given, dict(TOOLS[kind].defaults), path, command, TOOLS[kind].reasons)
    try:
        TOOLS[kind].convert(draft, task, dataset_info)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise mistake(str(path), f"a value is not of the kind that {title} takes ({error!r})") from error
    _name(draft, path)
    if model is not None:
        draft.put("model.name_or_path", model, "--model")
    if data:
        draft.put("data.train", [{"path": name} for name in data], "--data")
    for key, option in _NEEDED:
        if key not in draft.values:
            raise mistake(str(path), f"it has nothing for {key}; give it with {option}")
    _name_sources(draft)
    _only_with_rows(draft)
    draft.leave_rest()
    head = [
        f"Converted from {path.name} of {title}. A comment names the key that a value comes from.",
        "Check it with dsft validate and dsft preview.",
    ]
    if draft.left:
        head += ["", "Not in this spec:", *(f"  {line}" for line in listed(draft.left))]
    target = out or Path("specs") / f"{draft.values['name']}.yaml"
    _write(target, draft.text(head))
    mistakes = None
    try:
        load_spec(target, check_files=False)
    except SpecError as error:
        mistakes = str(error)
    carried = len(given) - len(draft.left.keys() & given.keys())
    return Converted(target, title, carried, draft.left, mistakes)


def recognized(given: Mapping[str, Any]) -> str:
    """Return the tool whose keys the config has most of. Raise SpecError if it has none of any."""
    if any(mark in given for mark in ds_json.TOOL.marks):
        return "deepspeed"
    if _VERSION_1 & given.keys():
        raise mistake("file", "a config of LLaMA-Factory's version 1 (USE_V1) is not converted yet")
    counts = {name: sum(mark in given for mark in tool.marks) for name, tool in TOOLS.items()}
    best = max(counts, key=lambda name: counts[name])
    if counts[best] == 0:
        raise mistake(
            "file",
            "no key shows whether it is of LLaMA-Factory, Axolotl, TRL, transformers, ms-swift or DeepSpeed; "
            f"name the tool with --from: {', '.join(TOOLS)}",
        )
    return best


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the mapping in a YAML or JSON file and "", or the options in a shell script and the name of its
    command."""
    try:
        text = read_text(path, MAX_BYTES)
    except OSError as error:
        raise MissingInputError(f"{quote(str(path))} {reason_of(error)}") from error
    except ValueError as error:
        raise mistake(str(path), f"it {error}") from error
    if path.suffix == ".sh" or text.startswith("#!"):
        return _options_of(path, text)
    try:
        found = parse_json(text)
    except ValueError:
        try:
            found = parse_yaml(text)
        except ValueError as error:
            raise mistake(str(path), f"it is neither YAML nor JSON ({error})") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise mistake(str(path), "it is no mapping of keys to values")
    return found, ""


def _options_of(path: Path, text: str) -> tuple[dict[str, Any], str]:
    """Return the options of a script's one training command over those of the config file that it names, and
    the name of the command or Python file. Nothing is run and no variable is filled in. Raise SpecError
    for a script that has none or several, or needs a shell."""
    lines = re.sub(r"(?m)(^|\s)#.*$", "", text.replace("\\\n", " ")).splitlines()
    found = [match for line in lines if (match := _COMMAND.search(line))]
    if len(found) != 1:
        raise mistake(
            str(path), f"it needs one training command with options, and has {len(found)}; {_WAY_OUT}"
        )
    name = found[0]["name"] or found[0]["script"]
    if feature_of_value("task", name) is not None:
        raise refuse(str(path), name)
    try:
        words = shlex.split(re.split(r"\s(?:\d?>|[|&;<])", found[0]["rest"])[0])
    except ValueError as error:
        raise mistake(str(path), f"the command cannot be read ({error}); correct it, {_WAY_OUT}") from error
    values: dict[str, list[Any]] = {}
    key = "config"  # words before the first option: a file, then key=value as LLaMA-Factory reads them
    for word in words:
        if re.search(r"[$`]", word):
            raise mistake(str(path), f"{word} is filled in by the shell; write its value, {_WAY_OUT}")
        if word.startswith("--"):
            key, _, word = word[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = []
        elif key == "config" and "=" in word:
            other, _, word = word.partition("=")
            values[other] = [parse_yaml(word)]
            continue
        if word:
            values.setdefault(key, []).append({"true": True, "false": False}.get(word.lower(), word))
    given: dict[str, Any] = {}
    for file in values.pop("config", ()):
        given |= _read(Path(file))[0]
    for key, each in values.items():
        if each:
            given[key] = each if len(each) > 1 else each[0]
        else:  # a switch
            given[key.removeprefix("no_")] = not key.startswith("no_")
    return given, name


def _name_sources(draft: Draft) -> None:
    """Give sources of one path names that differ."""
    sources = draft.values["data.train"]
    paths = [source["path"] for source in sources]
    for position, source in enumerate(sources):
        if paths.count(source["path"]) > 1:
            source["name"] = f"source-{position + 1}"


def _only_with_rows(draft: Draft) -> None:
    """Remove the keys of evaluation where the config names no rows to evaluate: a list of TrainingArguments,
    whose rows come in by code, or split_dataset_ratio 0 of ms-swift, which then evaluates nothing."""
    if draft.values.keys() & {"data.eval", "data.eval_fraction", "data.eval_count"}:
        return
    for key in ("train.eval_every", "train.eval_on_start", "checkpoint.keep_best"):
        if draft.values.pop(key, None) is not None:
            ways = f"data.eval, data.eval_fraction or data.eval_count, and {key}"
            name = draft.comments.pop(key).partition(";")[0]
            draft.leave(name, f"no rows to evaluate are named; give {ways}")


def _name(draft: Draft, path: Path) -> None:
    """Set the run's name and output folder from output_dir: its last part and the folder above."""
    folder = draft.get("output_dir")
    parts = [part for part in Path(str(folder)).parts if part not in (".", "/", "..")] if folder else []
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", parts[-1] if parts else path.stem).strip("-._")[:100]
    draft.put("name", name or "run", "output_dir" if parts else "")
    if len(parts) > 1:
        draft.put(
            "output_dir", str(Path(str(folder)).parent), "output_dir; the run's folder is output_dir/name"
        )


def listed(left: Mapping[str, str]) -> list[str]:
    """Return a line for each reason, with the keys that share it."""
    names: dict[str, list[str]] = {}
    for name, reason in left.items():
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(keys)}: {reason}" for reason, keys in names.items()]


def _write(path: Path, text: str) -> None:
    if os.path.lexists(path):
        raise mistake("--out", f"{quote(str(path))} is there already and stays; choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"{quote(str(path))} cannot be written ({error.strerror}); choose another place"
        ) from error
