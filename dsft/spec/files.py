"""Check that the files and folders that a spec names exist, and read the model's config.json.

Rows are read later, by `dsft.data`. Hub ids are not looked up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from os.path import isdir, isfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dsft.errors import CheckpointError
from dsft.spec.architecture import too_many
from dsft.spec.document import KeyPath, quote
from dsft.spec.findings import Finding, finding, value_at, value_finding
from dsft.spec.listing import NoDataFileError, local_files
from dsft.spec.schema import Source, Spec
from dsft.spec.sources import BUILTIN, BUILTIN_PREFIX, hub_data
from dsft.system.json_file import read_json, reason_of, special_kind, unfit_file
from dsft.system.run_folder import named_checkpoint

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")

WRITTEN = (
    "output_dir", "data.cache_dir", "parallel.offload_optimizer.nvme_path",
    "parallel.offload_parameters.nvme_path",
)  # fmt: skip
"""Keys of folders that a run writes."""

_TOKENIZER = re.compile(r"(tokenizer|tekken|vocab|merges|spiece|sentencepiece).*|.*\.(model|tiktoken|spm)")

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")

NO_TOKENIZER = (
    "has no tokenizer files (such as tokenizer.json); copy them from the model that it was made from, or set "
    "model.tokenizer to that model"
)

CHAT_TEMPLATES = tuple(
    """
    chatml cohere deepseek gemma glm llama2 llama3 llama3_1 mistral phi3 qwen2_5 qwen3 zephyr
    """.split()
)
"""Names of dsft's own chat templates (dsft/data/render/templates/NAME.jinja)."""


def source_findings(spec: Spec) -> Iterator[Finding]:
    """Check the builtin names among the paths of data, without reading the disk."""
    for path, source in _sources(spec):
        name = source.path
        if name.startswith(BUILTIN_PREFIX) and name not in BUILTIN:
            *most, last = BUILTIN
            choices = f"{', '.join(most)} or {last}"
            yield Finding(path, f"{quote(name)} is not one of dsft's builtin sources; use {choices}")
        elif name in BUILTIN and BUILTIN[name] not in (taken := spec.task_kind.formats):
            fitting = [f"use {other}" for other, format in BUILTIN.items() if format in taken]
            found = f"has {BUILTIN[name]} rows, but task {spec.task} takes {', '.join(taken)}"
            yield Finding(path, f"{quote(name)} {found}; {(*fitting, 'give a file of such rows')[0]}")


def file_findings(spec: Spec) -> Iterator[Finding]:
    """Yield a finding for each file or folder that does not exist or is of the wrong kind."""
    for path, source in _sources(spec):
        if not source.path.startswith(BUILTIN_PREFIX):
            yield from _data(path, source.path)
    if spec.data.chat_template is not None:
        yield from _chat_template(spec.data.chat_template, spec)
    for key in WRITTEN if spec.cluster is None else ():  # else dsft doctor tries it on each host
        name = value_at(spec, key)
        if name is not None and (reason := _unwritable(Path(name))):
            yield value_finding(spec, key, f"{reason}; give another folder")
    for key, one_of in (("name_or_path", ("config.json",)), ("tokenizer", TOKENIZER_FILES)):
        value = getattr(spec.model, key)
        if value is not None:
            yield from _folder(("model", key), value, one_of)
    if spec.model.tokenizer is None and lacks_tokenizer(spec.model.name_or_path or ""):
        yield finding("model.name_or_path", f"{quote(spec.model.name_or_path)} {NO_TOKENIZER}")
    lora = spec.model.lora
    if lora is not None and lora.path is not None:
        yield from _folder(("model", "lora", "path"), lora.path, ("adapter_config.json",), hub=False)
    if spec.checkpoint.resume not in ("auto", "never"):
        try:
            named_checkpoint(spec.checkpoint.resume)
        except CheckpointError as error:
            yield finding("checkpoint.resume", str(error).rstrip("."))


def _unwritable(folder: Path) -> str | None:
    """Return why a folder, or the nearest one above it that exists, cannot be written; None if it can, which
    a folder that is created there and removed shows."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if isdir(there):
        try:  # os.access says yes to root, also in /proc
            with TemporaryDirectory(prefix=".dsft-", dir=there):
                return None
        except OSError as error:
            return f"cannot be written ({there}: {error.strerror})"
    return f"{'is' if there == folder else f'is in {there}, which is'} a file, but a folder is needed"


def model_config(spec: Spec, *, check_files: bool) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Return the model's config and findings, without network access: from_config, or config.json of a
    folder; None for a hub id."""
    if spec.model.from_config is not None:
        return spec.model.from_config, []
    if not check_files or spec.model.name_or_path is None:
        return None, []
    file = Path(spec.model.name_or_path) / "config.json"
    if not isfile(file):
        return None, []
    try:
        config = read_json(file)
    except (ValueError, OSError) as error:
        message = f"{quote(str(file))} {reason_of(error)}; repair the model's folder"
        return None, [finding("model.name_or_path", message)]
    if not isinstance(config, dict):
        message = f"{quote(str(file))} is not a JSON object; repair the model's folder"
        return None, [finding("model.name_or_path", message)]
    return config, []


def _sources(spec: Spec) -> Iterator[tuple[KeyPath, Source]]:
    for part, sources in (("train", spec.data.train), ("eval", spec.data.eval)):
        for index, source in enumerate(sources):
            yield ("data", part, index, "path"), source


def _data(path: KeyPath, name: str) -> Iterator[Finding]:
    """Check one path of data; a hub id is not looked up."""
    try:
        is_here = local_files(name) is not None
    except NoDataFileError as error:
        yield Finding(path, f"{quote(name)}: {error}")
        return
    if not is_here and (special := special_kind(Path(name))):
        yield Finding(path, f"{quote(name)} is {special}, not a file; give a file or a folder")
    elif not is_here and hub_data(name) is None:
        yield Finding(path, f"{quote(name)} does not exist{_searched(name)}; correct the path")


def _chat_template(name: str, spec: Spec) -> Iterator[Finding]:
    """Check the chat template: one of dsft's, a file, or one of several in the tokenizer's folder; those of a
    hub id are unknown here, so every name passes."""
    tokenizer = spec.model.tokenizer or spec.model.name_or_path
    is_word = re.fullmatch(r"[A-Za-z0-9_-]+", name) is not None
    if isdir(name):
        message = "is a folder, but a file is needed; give the Jinja file in it"
        yield value_finding(spec, "data.chat_template", message)
    elif name in CHAT_TEMPLATES or isfile(name):
        return
    elif special := special_kind(Path(name)):
        yield value_finding(spec, "data.chat_template", f"is {special}, not a file; give a file")
    elif not is_word or tokenizer is None or (isdir(tokenizer) and name not in _templates_in(tokenizer)):
        message = f"does not exist{_searched(name)}; correct the path, or give the name of one: "
        yield value_finding(spec, "data.chat_template", f"{message}{', '.join(CHAT_TEMPLATES)}")


def _templates_in(folder: str) -> set[str]:
    """Return the names of a tokenizer's templates if it has several: separate files, or a list in its
    config."""
    names = {file.stem for file in Path(folder, "additional_chat_templates").glob("*.jinja")}
    names |= {"default"} if names else set()  # chat_template.jinja, beside the others
    try:
        config = read_json(Path(folder, "tokenizer_config.json"))
        listed = config["chat_template"]
        names |= {str(one["name"]) for one in listed if isinstance(one, dict) and "name" in one}
    except (ValueError, OSError, KeyError, TypeError):
        pass  # reported when the tokenizer is loaded
    return names


def _folder(path: KeyPath, name: str, one_of: tuple[str, ...], *, hub: bool = True) -> Iterator[Finding]:
    folder = Path(name)
    if unfit := unfit_file(folder):  # a config of too many layers is reported with the model
        yield Finding(path, f"{unfit}; give a folder of files")
    elif isdir(folder):
        if not any(isfile(folder / file) for file in one_of):
            needed, way_out = " or ".join(one_of), "give the folder that contains it"
            if path == ("model", "name_or_path") and isfile(folder / "adapter_config.json"):
                way_out = "it has an adapter: give its base model here, and this folder in model.lora.path"
            yield Finding(path, f"{quote(name)} is a folder without {needed}; {way_out}")
    elif isfile(folder):
        if path != ("model", "tokenizer") or folder.suffix != ".model":  # sentencepiece's
            yield Finding(path, f"{quote(name)} is a file, but a folder is needed; give its folder")
    elif hub and isdir(folder.parent) and folder.parent != Path() and not is_in_hub_cache(name):
        beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
        near = get_close_matches(folder.name, beside, n=1, cutoff=0.5)
        meant = f"write {folder.parent / near[0]}" if near else "correct the path"
        message = f"{quote(name)} does not exist, although {folder.parent} is a folder here; {meant}, or, if "
        yield Finding(path, f"{message}the model is on the hub, download it first: hf download {name}")
    elif not (hub and _HUB_ID.fullmatch(name)):
        kind = "neither a folder nor a hub id such as owner/name" if hub else "not a folder"
        yield Finding(path, f"{quote(name)} is {kind}{_searched(name)}; correct the path")


def unfit_model(name: str | Path) -> str | None:
    """Return a clause on why a model's folder cannot be given to transformers, which would hang or run out of
    memory; None if it can, or is no folder."""
    if unfit := unfit_file(Path(name)):
        return unfit
    try:
        clause = too_many(read_json(Path(name, "config.json")))
    except (OSError, ValueError):  # there is none, or transformers says what is wrong with it
        return None
    return clause and f"in {Path(name, 'config.json')} {clause}"


def lacks_tokenizer(name: str) -> bool:
    """Return whether this is a folder with a model's config but no file of a tokenizer, for which
    transformers would make a tokenizer without tokens."""
    return isfile(Path(name, "config.json")) and not any(map(_TOKENIZER.fullmatch, os.listdir(name)))


def is_in_hub_cache(name: str) -> bool:
    """Return whether the hub's cache of this machine has a model, found as huggingface_hub finds its cache,
    whose import takes longer than the rest of a check."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or Path(home, "hub")
    return Path(cache, f"models--{name.replace('/', '--')}").expanduser().is_dir()


def _searched(name: str) -> str:
    return "" if Path(name).is_absolute() else " (relative to the current folder)"
