"""A Hugging Face folder from a checkpoint, one piece of a tensor at a time; no engine, no device, no GPU.

Takes a committed checkpoint (or a model's config and tokenizer, to be put into checkpoints); writes a folder
that transformers loads. It is written aside, and replaces an older one only when it is whole.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from dsft.checkpoint.card import CARD, Form, model_card
from dsft.checkpoint.files import (
    CHUNK,
    Entry,
    Written,
    damages,
    digest_of,
    read_files,
    write_files,
    write_json,
    write_tensors,
)
from dsft.checkpoint.merge import Adapter, WholeModel, is_partial, model_of, rows_of
from dsft.checkpoint.read import Checkpoint
from dsft.engine.api import Kind
from dsft.errors import CheckpointError, LockedError, StorageError
from dsft.model.config import read_config
from dsft.model.lora import CONFIG, WEIGHTS
from dsft.model.names import file_names, has_file_names
from dsft.model.weights import DTYPES
from dsft.system.files import sync_folder
from dsft.system.json_file import read_json

SHARD = 4 * 2**30
"""Bytes of one safetensors file."""

ORIGIN = "dsft_export.json"
"""Says which checkpoint an export is of, and lists its files with their sizes and SHA-256."""

BESIDE = "beside.safetensors"
"""In a checkpoint's model folder: what a model's file holds beside the parameters. Most have nothing."""

BY_HAND = (CARD, "generation_config.json", "chat_template.jinja")
"""Files of an export that people edit. They do not make it a damaged one."""

NOT_AN_ADAPTERS = ("config.json", BESIDE)
"""Of the base alone: an adapter's folder that has them is taken for a model's. generation_config.json stays,
since it names the tokens that end an answer of the adapter's."""


class Values(Protocol):
    """Tensors by name, a range of one at a time: a checkpoint's, or those that follow from it."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, kind: Kind, start: int, stop: int) -> Tensor: ...


class WithBeside:
    """`values`, and what a model's file holds beside the parameters."""

    def __init__(self, values: Values, model_folder: Path) -> None:
        path = model_folder / BESIDE
        self._values = values
        self._beside = load_file(path) if path.exists() else {}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            **values.shapes,
            **{name: tuple(tensor.shape) for name, tensor in self._beside.items()},
        }

    def read(self, name: str, kind: Kind, start: int, stop: int) -> Tensor:
        if name in self._beside:
            return self._beside[name].flatten()[start:stop]
        return self._values.read(name, kind, start, stop)


def write_model_folder(
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    name_or_path: str | None = None,
    turn_end: int | None = None,
) -> list[int]:
    """What an export needs beside the tensors, as transformers saves it: config, tokenizer with its chat
    template, generation config (the pretrained model's where there is one, else from the config's special
    tokens). Each checkpoint carries a copy.

    turn_end: the token with which a trained answer ends. Where the generation config does not stop at it, it
    is listed there before the tokens that end a text. Returns that list, or none where nothing was changed.
    """
    generation_config = _generation_config(config, name_or_path)
    stops = _with_turn_end(generation_config.eos_token_id, tokenizer.eos_token_id, turn_end)
    if stops:
        generation_config.eos_token_id = stops
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        generation_config.save_pretrained(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror or error}).") from None
    return stops


def read_model_files(folder: Path) -> dict[str, bytes]:
    """What `write_model_folder` and `write_beside` have just written there, for `save` to put into each
    checkpoint. Some tens of MB, most of it the tokenizer. Raises StorageError."""
    try:
        return read_files(folder)
    except OSError as error:
        raise StorageError(f"{error.filename or folder} cannot be read ({error.strerror}).") from None


def write_beside(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """What a model's file holds beside the parameters (`kept_beside`), into the model folder."""
    if not tensors:
        return
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / BESIDE)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{folder / BESIDE} cannot be written ({error}).") from None


def export_checkpoint(path: Path, out: Path, *, merged: bool = False) -> str:
    """`dsft export CHECKPOINT OUT`: verify, then export; gives a line that says what was done."""
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    if model_of(checkpoint).lora is not None and not merged:
        return export_adapter(checkpoint, out)
    if merged and model_of(checkpoint).lora is None:
        raise CheckpointError(f"{path} has no adapter to merge, it is of a model; leave --merged out.")
    return export(checkpoint, out)


def export_adapter(checkpoint: Checkpoint, out: Path) -> str:
    """Write `out`: the adapter as peft saves one, and the tokenizer. Gives a line that says what was done;
    where `out` is this very export already, and whole, nothing is. Raises as `export` does."""
    dtype = DTYPES[checkpoint.state["spec"]["train"]["precision"]]
    origin = {"step": checkpoint.step, "dtype": str(dtype), "manifest": checkpoint.digest, "form": "adapter"}
    replaces = _replaces(out, origin)
    if replaces is None:
        return f"{out}: the adapter after step {checkpoint.step}, exported before"
    adapter = Adapter.of(checkpoint, _on_meta(checkpoint), dtype)

    def write(aside: Path) -> dict[str, Written]:
        for name in NOT_AN_ADAPTERS:
            (aside / name).unlink(missing_ok=True)
        write_json(aside / CONFIG, adapter.config)
        entries = [Entry(name, shape, dtype) for name, shape in adapter.shapes.items()]
        pieces = (piece for entry in entries for piece in _pieces(adapter, entry.name, entry))
        return {WEIGHTS: write_tensors(aside / WEIGHTS, entries, pieces, {"format": "pt"})}

    size = _write_folder(checkpoint, out, origin, write, "adapter")
    rows = rows_of(checkpoint)
    more = f", all {max(rows.stop, rows.held):,} embeddings among them" if rows else ""
    return f"{out}: the adapter after step {checkpoint.step}, {size:,} bytes{more}{replaces}"


def export(
    checkpoint: Checkpoint, out: Path, dtype: torch.dtype | None = None, max_shard_bytes: int = SHARD
) -> str:
    """Write `out`: safetensors (with an index when more than one), config.json, tokenizer, generation config.
    Gives a line that says what was done; where `out` is this very export already, and whole, nothing is.

    `dtype`: of the weights, by default that of train.precision. Tied weights stand once. Raises
    CheckpointError for a model whose files hold other tensors than its modules, for parameters that are
    missing, left over or of another shape; StorageError where the disk is full; LockedError where `out` is a
    folder of something else. An older export then stays as it was.
    """
    dtype = dtype or DTYPES[checkpoint.state["spec"]["train"]["precision"]]
    origin = {"step": checkpoint.step, "dtype": str(dtype), "manifest": checkpoint.digest}
    replaces = _replaces(out, origin)
    if replaces is None:
        return f"{out}: the model after step {checkpoint.step}, exported before"
    model = _on_meta(checkpoint)
    trained = DTYPES[checkpoint.state["spec"]["train"]["precision"]]
    values = WholeModel(checkpoint, model, trained) if is_partial(checkpoint) else checkpoint
    _check_names(values, checkpoint.path, model)
    whole = WithBeside(values, checkpoint.model_folder)

    def write(aside: Path) -> dict[str, Written]:
        (aside / BESIDE).unlink(missing_ok=True)
        _write_config(aside, model, dtype)
        return _write_weights(whole, aside, file_names(model, whole.shapes), dtype, max_shard_bytes)

    merged = checkpoint.state["spec"].get("model", {}).get("lora") is not None
    size = _write_folder(checkpoint, out, origin, write, "merged" if merged else "model")
    return f"{out}: the model after step {checkpoint.step}, {size:,} bytes{replaces}"


def _write_folder(
    checkpoint: Checkpoint,
    out: Path,
    origin: Mapping[str, Any],
    write: Callable[[Path], dict[str, Written]],
    form: Form,
) -> int:
    """`out` with the checkpoint's model folder, what `write` adds and its card; its size in bytes. `write`
    gives the checksums of its large files, so that these are not read again."""
    aside = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_files(aside, read_files(checkpoint.model_folder))
        large = write(aside)
        (aside / CARD).write_text(model_card(checkpoint.state, form), encoding="utf-8")
        files = {file.name: large.get(file.name) or digest_of(file) for file in aside.iterdir()}
        listed = {name: asdict(written) for name, written in files.items()}
        write_json(aside / ORIGIN, {"from": origin, "files": listed})
        _replace(out, aside)
        for path in out.parent.glob(f"{glob.escape(out.name)}.tmp-*"):  # of exports that were killed
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{out} cannot be written ({error.strerror or error}); what was there stays."
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return sum(written.size for written in files.values())


def _generation_config(config: PreTrainedConfig, name_or_path: str | None) -> GenerationConfig:
    if name_or_path is not None:
        with contextlib.suppress(OSError):  # a model without one
            return GenerationConfig.from_pretrained(name_or_path)
    return GenerationConfig.from_model_config(config)


def _with_turn_end(listed: int | list[int] | None, text_end: Any, turn_end: int | None) -> list[int]:
    """`listed` (or text_end, where nothing is) behind turn_end; empty where turn_end needs no place in it."""
    stops = listed if isinstance(listed, list) else [text_end if listed is None else listed]
    if turn_end is None or turn_end in stops and listed is not None:
        return []
    return list(dict.fromkeys([turn_end, *(stop for stop in stops if stop is not None)]))


def _replaces(out: Path, origin: Mapping[str, Any]) -> str | None:
    """None where `out` is the export of this origin and every file but those in BY_HAND is as it was written:
    it stays. Else what is to be said of what it replaces. Reads all of `out`. LockedError where `out` is no
    export at all."""
    try:
        found = read_json(out / ORIGIN)
        if found["from"] != origin:
            return ""
        if "files" not in found:  # of an earlier dsft, which listed sizes alone
            return "; it replaces one that has no checksums"
        files = {name: Written(**facts) for name, facts in found["files"].items() if name not in BY_HAND}
        if any(Path(name).name != name for name in files):
            raise ValueError(f"{ORIGIN} lists files of other folders")
        damaged = next(damages(out, files), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if out.exists() and not (out / ORIGIN).exists() and not (out.is_dir() and not any(out.iterdir())):
            raise LockedError(f"{out} is there and was not written by dsft; give another path.") from None
        return ""
    return damaged and f"; it replaces one in which {damaged}"


def _on_meta(checkpoint: Checkpoint) -> PreTrainedModel:
    config = read_config(checkpoint.model_folder)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    return model


def _check_names(values: Values, where: Path, model: PreTrainedModel) -> None:
    """The values are the model's parameters, by name and shape, and each is one tensor of a file."""
    if not has_file_names(model):
        raise CheckpointError(
            f"Models of type {model.config.model_type} have other tensors in files than in memory, "
            "and exporting them is not built yet; the checkpoint itself is whole."
        )
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = values.shapes
    problems = [f"{name} is missing" for name in wanted.keys() - held.keys()]
    problems += [f"{name} is not the model's" for name in held.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {held[name]} instead of {wanted[name]}"
        for name in wanted.keys() & held.keys()
        if held[name] != wanted[name]
    ]
    if problems:
        raise CheckpointError(f"{where} does not hold this model: {'; '.join(sorted(problems))}.")


def _write_config(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    write_json(path, config)


def _write_weights(
    values: Values, folder: Path, in_file: Mapping[str, str], dtype: torch.dtype, max_shard_bytes: int
) -> dict[str, Written]:
    """`in_file`: parameter's name -> its name in the file. Gives the checksum of each file of weights."""
    held = {in_file[name]: name for name in values.shapes}
    shapes = {in_file[name]: shape for name, shape in values.shapes.items()}
    shards = _shards(shapes, dtype, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    written: dict[str, Written] = {}
    for name, entries in zip(names, shards, strict=True):
        pieces = (piece for entry in entries for piece in _pieces(values, held[entry.name], entry))
        written[name] = write_tensors(folder / name, entries, pieces, {"format": "pt"})
    if len(shards) > 1:
        size = sum(entry.num_bytes for entries in shards for entry in entries)
        where = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where}
        )
    return written


def _shards(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> list[list[Entry]]:
    """The tensors in order, cut where a file would be over the limit; a tensor over it has its own file."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for name, shape in shapes.items():
        entry = Entry(name, shape, dtype)
        if shards[-1] and size + entry.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _pieces(values: Values, name: str, entry: Entry) -> Iterator[Tensor]:
    numel = math.prod(entry.shape)
    for start in range(0, numel, CHUNK):
        yield values.read(name, "value", start, min(start + CHUNK, numel)).to(entry.dtype)


def _replace(out: Path, aside: Path) -> None:
    """`aside` becomes `out`. Where there was one, it is there until the new one stands beside it."""
    old = aside.with_name(aside.name + "-old")
    if out.exists():
        os.rename(out, old)
    os.rename(aside, out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)
