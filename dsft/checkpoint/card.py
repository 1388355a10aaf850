"""Write the model card, README.md of an export, from the facts in a checkpoint.

The values come from a spec and from file names, so each is quoted: for YAML by the YAML library, for Markdown
by a backslash before every character that could be markup.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from dsft.spec.schema import SECTIONS
from dsft.spec.task import TASKS, Head

CARD = "README.md"
Form = Literal["model", "adapter", "merged", "dequantized"]

PIPELINES: dict[Head, str] = {"vocabulary": "text-generation", "score": "text-classification"}
_FORMS = {
    "model": "A model",
    "adapter": "An adapter",
    "merged": "A model, with its adapter merged,",
    "dequantized": "A model, with its adapter merged into the dequantized weights,",
}
_PACKAGES = ("dsft", "torch", "deepspeed", "transformers", "peft")
_HUB_ID = re.compile(r"[a-z0-9][\w.-]*(?:/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE)
_MARKUP = re.compile(r"[\\`*_{}\[\]<>()#!|~&$@:]|(?<=www)\.", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")
_QUANTIZED = "The following `bitsandbytes` quantization config was used during training:"  # peft's words
_LONGEST = 200  # characters of a value

Values = Mapping[str, Any]


def origin_of(
    name_or_path: str | None, files: Mapping[str, str] | None, reference: Values | None = None
) -> dict[str, Any]:
    """Return what a checkpoint must store for the card, beside the spec. files: the SHA-256
    of each weight file that training began from, by name, None for a fresh model; reference: from
    `dsft.plan.reference.reference_facts`."""
    listed = None if files is None else "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    return {
        "digest": listed and hashlib.sha256(listed.encode()).hexdigest(),  # of what sha256sum prints
        "is_folder": name_or_path is not None and Path(name_or_path).is_dir(),
        "reference": reference,
    }


def model_card(state: Values, form: Form, quantization: Values = MappingProxyType({})) -> str:
    """Return the text of the card. state: a `CheckpointState` as JSON; fields that an older dsft did not
    write are left out; quantization: of an adapter's base, listed as in peft's cards."""
    spec, origin = state["spec"], state.get("origin") or {}
    model, task = spec.get("model", {}), spec.get("task")
    name = model.get("name_or_path")
    is_folder = origin.get("is_folder", name is not None and Path(name).is_dir())
    head = {
        # the hub rejects a card that names a folder
        **({"base_model": name} if name and not is_folder and _HUB_ID.fullmatch(name) else {}),
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": PIPELINES[TASKS[task].head if task in TASKS else "vocabulary"],
        "tags": ["dsft", "deepspeed", *([task] if task else []), *([] if form == "model" else ["lora"])],
    }
    rows: dict[str, Iterable[str]] = {
        "trained from": _start(model, spec.get("train", {}), origin),
        "adapter": [] if form == "model" else _adapter(model),
        "objective": _objective(spec),
        "reference": _reference(origin.get("reference")),
        "data": _data(state),
        "steps": _steps(state),
        "precision": filter(None, [spec.get("train", {}).get("precision")]),
        "versions": filter(None, [_versions(state.get("versions", {}))]),
    }
    lines = {row: "<br>".join(map(_quoted, values)) for row, values in rows.items()}
    table = "\n".join(f"| {row} | {text} |" for row, text in lines.items() if text)
    listed = "\n".join(f"- {key}: `{value}`" for key, value in quantization.items())
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False, width=1000)}---\n\n"
        f"# {_quoted(spec.get('name', 'model'))}\n\n"
        f"{_FORMS[form]} that dsft trained.\n\n"
        f"| | |\n|---|---|\n{table}\n" + (f"\n{_QUANTIZED}\n\n{listed}\n" if quantization else "")
    )


def _start(model: Values, train: Values, origin: Values) -> Iterator[str]:
    if name := model.get("name_or_path"):
        yield Path(name).name if Path(name).is_absolute() else name
        if origin.get("digest"):
            yield f"digest of its weight files (sha256sum FILES | sha256sum): {origin['digest'][:32]}"
    elif model.get("from_config"):
        yield f"fresh weights of a {model['from_config'].get('model_type')} config, seed {train.get('seed')}"


def _adapter(model: Values) -> Iterator[str]:
    if lora := model.get("lora"):
        kind = "DoRA" if lora.get("use_dora") else "LoRA"
        yield f"{kind}, rank {lora.get('rank')}, alpha {lora.get('alpha')}"
        if model.get("quantize"):
            yield f"trained on weights in 4 bits ({model['quantize']}, double quantization, bitsandbytes)"
        if lora.get("path") is not None:
            yield f"continued from {Path(lora['path']).name}"


def _objective(spec: Values) -> Iterator[str]:
    facts = TASKS.get(spec.get("task", ""))
    if facts is not None:
        name = facts.section
        own = (spec.get(name) or SECTIONS[name]().model_dump()) if name is not None else {}
        options = [f"{words} {own[key]}" for key, words in facts.options.items() if own.get(key)]
        yield ", ".join([facts.objective, *options])


def _reference(reference: Values | None) -> Iterator[str]:
    if reference is not None:
        yield str(reference["which"])
        if reference.get("unchanged") is False:
            yield "changed during training, as an earlier version of dsft found"


def _data(state: Values) -> Iterator[str]:
    task = state["spec"].get("task")
    unit = f"{TASKS[task].unit}s" if task in TASKS else "rows"
    for name, facts in state.get("data", {}).items():
        yield f"{name}: {facts['rows']:,} {unit} of {facts['tokens']:,} tokens"


def _steps(state: Values) -> Iterator[str]:
    progress, batch = state.get("progress", {}), state.get("batch", {})
    of = TASKS[state["spec"]["task"]].examples if state["spec"].get("task") in TASKS else "examples"
    size = f" of {batch['global_batch_size']} {of}" if "global_batch_size" in batch else ""
    yield f"{progress['step']:,} steps{size}"
    if "epoch" in progress and "num_tokens" in progress:
        yield f"{progress['epoch']:.2f} epochs, {progress['num_tokens']:,} tokens"


def _versions(versions: Values) -> str:
    """Return the versions of the packages; if dsft is a checkout, its commit."""
    dsft = {"dsft": f"at commit {versions['commit'][:12]}"} if "commit" in versions else {}
    return ", ".join(f"{name} {text}" for name in _PACKAGES if (text := {**versions, **dsft}.get(name)))


def _quoted(value: str) -> str:
    """Return the value as one line that Markdown, with HTML in it, shows unchanged; user names and passwords
    in URLs are removed."""
    text = _USER_INFO.sub("", " ".join(str(value).split()))
    text = "".join(c if c.isprintable() else "?" for c in text)
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    return _MARKUP.sub(lambda found: f"\\{found[0]}", text)
