"""Export a checkpoint to a Hugging Face folder, a piece of a tensor at a time, without an engine or a GPU.

A folder that transformers loads is written under a temporary name, and replaces an older export only when it
is whole. This module also writes the model folder (config, tokenizer) that each checkpoint contains.
"""

from __future__ import annotations

import glob
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from dsft.checkpoint.around import PROCESSORS, TensorsAround, files_around, set_dtype
from dsft.checkpoint.card import CARD, Form, model_card
from dsft.checkpoint.files import (
    CHUNK,
    FileDigest,
    TensorEntry,
    damages,
    digest_of,
    read_files,
    write_files,
    write_json,
    write_tensors,
)
from dsft.checkpoint.merge import Adapter, WholeModel, is_partial, model_of, rows_of
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.tensors import BESIDE, NAMES, FileTensors, TensorSource, TensorsWithExtras, read_names
from dsft.data.tokenizer.load import AUTO_MAP, MODEL_FILE, is_unchanged, pieces_of
from dsft.errors import CheckpointError, LockedError, MissingInputError, StorageError, brief
from dsft.model.config import config_around, has_scores, on_meta, read_config
from dsft.model.lora import CONFIG, WEIGHTS
from dsft.model.weights import DTYPES
from dsft.model.whole import whole_of
from dsft.system.disk import size_text
from dsft.system.files import replace_folder
from dsft.system.json_file import read_json

SHARD = 4 * 2**30
"""Most bytes of one safetensors file."""

ORIGIN = "dsft_export.json"
QUANTIZATION = "quantization_config"  # its key in there, and in configs of transformers
"""File of an export that names its checkpoint, and lists the export's files with their sizes and SHA-256."""

TEMPLATE = "chat_template.jinja"

_GENERATION = "generation_config.json"
BY_HAND = (CARD, _GENERATION, TEMPLATE)
"""Files of an export that people edit; an edit does not make the export count as damaged."""

NOT_AN_ADAPTERS = ("config.json", BESIDE, NAMES)
"""Files for whole models only: a folder with one of them is taken for a whole model, not for an adapter.
generation_config.json is not listed, since it names the tokens that end an adapter's answers."""


NOT_FOR_PEFT = (
    ", for dsft chat and programs that go by its names; peft (0.21) would take its gate_proj, up_proj and "
    "down_proj for the model's experts: for peft and transformers export with --merged"
)
"""Note on an adapter that peft's own loader would misread."""


def write_model_folder(
    folder: Path,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    name_or_path: str | None = None,
    turn_end: int | None = None,
) -> list[int]:
    """Write what an export needs beside the tensors, as transformers saves it: config, tokenizer with its
    chat template, generation config (the pretrained model's if there is one, else from the config's special
    tokens), and sentencepiece's tokenizer.model, for llama.cpp. Each checkpoint carries a copy.

    turn_end: the token with which a trained answer ends. Where the generation config does not stop at it, it
    is added to eos_token_id, before the tokens that end a text. Return the new list; empty where nothing was
    changed.
    """
    generation_config = None if has_scores(config) else _generation_config(config, name_or_path)
    stops = []
    if generation_config is not None:
        stops = _with_turn_end(generation_config.eos_token_id, tokenizer.eos_token_id, turn_end)
        if stops:
            generation_config.eos_token_id = stops
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (BESIDE, NAMES, TEMPLATE, MODEL_FILE, *PROCESSORS):  # of an earlier start
            (folder / name).unlink(missing_ok=True)
        config.save_pretrained(folder)
        one_template = not isinstance(tokenizer.chat_template, dict)
        tokenizer.save_pretrained(folder, save_jinja_files=one_template)  # several: in tokenizer_config.json
        if (pieces := pieces_of(tokenizer)) is not None:  # transformers would leave it out
            (folder / MODEL_FILE).write_bytes(pieces)
        if generation_config is not None:
            generation_config.save_pretrained(folder)
        for name, content in files_around(name_or_path, config).items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror or error}).") from None
    return stops


def read_model_files(folder: Path) -> dict[str, bytes]:
    """Return the files that `write_model_folder` and `write_beside` have just written, for `save` to put into
    each checkpoint: some tens of MB, most of it the tokenizer. Raises StorageError."""
    try:
        return read_files(folder)
    except OSError as error:
        raise StorageError(f"{error.filename or folder} cannot be read ({error.strerror}).") from None


def export_checkpoint(path: Path, out: Path, *, merged: bool = False, dequantized: bool = False) -> str:
    """Carry out `dsft export CHECKPOINT OUT`: verify, then export. Return a line for the user.
    merged: write the whole model, not the adapter; dequantized: see `export`."""
    checkpoint = CheckpointReader.open(path)
    checkpoint.verify()
    merged = merged or dequantized
    if model_of(checkpoint).lora is not None and not merged:
        return export_adapter(checkpoint, out)
    if merged and model_of(checkpoint).lora is None:
        raise CheckpointError(
            f"{path} has no adapter to merge: the whole model was trained; leave out "
            f"{'--dequantized' if dequantized else '--merged'}."
        )
    return export(checkpoint, out, dequantized=dequantized)


def export_adapter(checkpoint: CheckpointReader, out: Path) -> str:
    """Write `out`: the adapter in peft's format, and the tokenizer. Return a line for the user; if `out` is
    this export already and whole, nothing is written. Raises as `export` does."""
    dtype = DTYPES[checkpoint.state["spec"]["train"]["precision"]]

    def write(aside: Path) -> dict[str, FileDigest]:
        folder = checkpoint.model_folder  # the base may be gone
        model, config = on_meta(read_config(folder)), config_around(folder)
        adapter = Adapter(checkpoint, model, dtype, whole_of(config, model) if config else None)
        notes.extend([NOT_FOR_PEFT] * adapter.is_misread)
        quantization.update(adapter.quantization or {})
        for name in NOT_AN_ADAPTERS:
            (aside / name).unlink(missing_ok=True)
        write_json(aside / CONFIG, adapter.config)
        entries = [TensorEntry(name, shape, dtype) for name, shape in adapter.shapes.items()]
        pieces = (piece for entry in entries for piece in _pieces(adapter, entry.name, entry))
        return {WEIGHTS: write_tensors(aside / WEIGHTS, entries, pieces, {"format": "pt"})}

    rows = rows_of(checkpoint)
    notes = [f", with all {max(rows.stop, rows.held):,} rows of the embeddings"] if rows else []
    quantization: dict[str, Any] = {}
    return _write_export(checkpoint, out, dtype, "adapter", write, notes, quantization)


def export(
    checkpoint: CheckpointReader,
    out: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = SHARD,
    *,
    dequantized: bool = False,
) -> str:
    """Write `out`: safetensors (with an index when more than one), config.json, tokenizer, generation config.
    Return a line for the user; if `out` is this export already and whole, nothing is written.

    `dtype`: of the weights, by default that of train.precision; dequantized: merge an adapter into the values
    of the 4 bits that training has, not into those of the files. Tied weights are written once. Names and
    shapes are those of the files that the model was read from; for a fresh model, those that transformers
    saves. Raises CheckpointError for parameters that are missing, unknown or of another shape; StorageError
    where the disk is full; LockedError where `out` is a folder that dsft did not write. An older export is
    then untouched.
    """
    trained = DTYPES[checkpoint.state["spec"]["train"]["precision"]]
    saved_as, of = dtype or trained, model_of(checkpoint)
    form: Form = "model" if of.lora is None else "dequantized" if of.quantize and dequantized else "merged"

    def write(aside: Path) -> dict[str, FileDigest]:
        model = on_meta(read_config(checkpoint.model_folder))
        tensors: Any = checkpoint
        if is_partial(checkpoint):
            tensors = WholeModel(checkpoint, model, trained, dequantize=form == "dequantized")
        _check_names(tensors, checkpoint.path, model)
        for name in (BESIDE, NAMES):
            (aside / name).unlink(missing_ok=True)
        _write_config(aside, model, saved_as)
        in_files: TensorsAround | FileTensors
        if config_around(aside) is not None:
            in_files = TensorsAround(tensors, checkpoint, model)
        else:
            whole = TensorsWithExtras(tensors, checkpoint.model_folder, saved_as)
            in_files = FileTensors(whole, model, read_names(checkpoint.model_folder))
        written = _write_weights(in_files, aside, saved_as, max_shard_bytes)
        if isinstance(in_files, TensorsAround) and in_files.not_finite:
            first, *others = sorted(in_files.not_finite)
            more = f" and {len(others)} other tensors are" if others else " is"
            notes.append(f"; warning: {first}{more} not finite, as in the files that training began from")
        return written

    notes: list[str] = []
    return _write_export(checkpoint, out, saved_as, form, write, notes)


def _write_export(
    checkpoint: CheckpointReader,
    out: Path,
    dtype: torch.dtype,
    form: Form,
    write: Callable[[Path], dict[str, FileDigest]],
    notes: Sequence[str] = (),
    quantization: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Write `out`: the checkpoint's model folder, the files of `write`, and the card. Return a line for the
    user, with `notes` after the size. `write` returns the digests of its large files, so that these are not
    read again, and may fill quantization: what an adapter's base is quantized with."""
    origin = {"step": checkpoint.step, "dtype": str(dtype), "manifest": checkpoint.digest}
    origin |= {"form": form} if form in {"adapter", "dequantized"} else {}
    title = f"{out}: the {'adapter' if form == 'adapter' else 'model'} after step {checkpoint.step}"
    replaces = _replaces(out, origin)
    if replaces is None:
        return f"{title}, exported before{''.join(read_json(out / ORIGIN).get('notes', ()))}"
    place = out.resolve()  # where a link leads: on that disk, and the link stays
    aside = place.with_name(f"{place.name}.tmp-{secrets.token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_files(aside, read_files(checkpoint.model_folder))
        large = write(aside)
        if is_unchanged(aside):
            notes = [*notes, f"; its {AUTO_MAP}"]
        (aside / CARD).write_text(model_card(checkpoint.state, form, quantization), encoding="utf-8")
        files = {file.name: large.get(file.name) or digest_of(file) for file in aside.iterdir()}
        found = {"from": origin, "files": {name: asdict(f) for name, f in files.items()}, "notes": [*notes]}
        found |= {QUANTIZATION: quantization} if quantization else {}
        write_json(aside / ORIGIN, found)
        others = _not_exported(place)
        older = replace_folder(place, aside)
        for name in others - files.keys():
            os.rename(older / name, place / name)
        for path in place.parent.glob(f"{glob.escape(place.name)}.tmp-*"):  # left by exports that were killed
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{out} cannot be written ({error.strerror or error}); an older export there is untouched."
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return f"{title}, {size_text(sum(file.size for file in files.values()))}{''.join(notes)}{replaces}"


def _generation_config(config: PreTrainedConfig, name_or_path: str | None) -> GenerationConfig:
    """Return the pretrained model's if it has one. Raises MissingInputError for one that cannot be read or
    that transformers would not save."""
    if name_or_path is not None:
        try:
            found: GenerationConfig = GenerationConfig.from_pretrained(name_or_path)
            found.validate(strict=True)
            ends = found.eos_token_id
            if not all(isinstance(end, int | None) for end in (ends if isinstance(ends, list) else [ends])):
                raise ValueError(f"eos_token_id {ends!r} is neither a token's id nor a list of them")
            return found
        except Exception as error:  # whatever the class does with odd values
            if not isinstance(error, OSError) or Path(name_or_path, _GENERATION).exists():
                raise MissingInputError(
                    f"{_GENERATION} of the model {name_or_path!r} cannot be used ({brief(error)}); correct "
                    "or remove it."
                ) from None
    return GenerationConfig.from_model_config(config)


def _with_turn_end(listed: int | list[int] | None, text_end: Any, turn_end: int | None) -> list[int]:
    """Return turn_end followed by `listed`, or by text_end where nothing is listed; empty where `listed` has
    turn_end already."""
    stops = listed if isinstance(listed, list) else [text_end if listed is None else listed]
    if turn_end is None or turn_end in stops and listed is not None:
        return []
    return list(dict.fromkeys([turn_end, *(stop for stop in stops if stop is not None)]))


def _replaces(out: Path, origin: Mapping[str, Any]) -> str | None:
    """Return None if `out` is the export of this origin and every file but those in BY_HAND is undamaged, so
    that it can stay; else what to tell the user about the export that is replaced. Reads all of `out`. Raises
    LockedError where `out` is not an export."""
    try:
        found = read_json(out / ORIGIN)
        if found["from"] != origin:
            return ""
        files = {name: FileDigest(**facts) for name, facts in found["files"].items() if name not in BY_HAND}
        damaged = next(damages(out, files), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if out.exists() and not (out / ORIGIN).exists() and not (out.is_dir() and not any(out.iterdir())):
            raise LockedError(f"{out} exists and was not written by dsft; give another path.") from None
        return ""
    return damaged and f"; it replaces a damaged export: {damaged}"


def _not_exported(out: Path) -> set[str]:
    """Return the names in an older export's folder that are not the export's: what others have put there."""
    try:
        return {path.name for path in out.iterdir()} - {ORIGIN, *read_json(out / ORIGIN)["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _check_names(values: TensorSource, where: Path, model: PreTrainedModel) -> None:
    """Check that the values are the model's parameters, by name and shape."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = values.shapes
    problems = [f"{name} is missing" for name in expected.keys() - shapes.keys()]
    problems += [f"{name} is not the model's" for name in shapes.keys() - expected.keys()]
    problems += [
        f"{name} has shape {shapes[name]} instead of {expected[name]}"
        for name in expected.keys() & shapes.keys()
        if shapes[name] != expected[name]
    ]
    if problems:
        raise CheckpointError(
            f"{where} does not match the model of its config.json: {'; '.join(sorted(problems))}."
        )


def _write_config(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    path = folder / "config.json"
    config, whole = read_json(path), config_around(folder)
    config.pop(QUANTIZATION, None)
    if whole is None:
        config |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    else:
        set_dtype(config, dtype, whole)
    write_json(path, config)


def _write_weights(
    values: FileTensors | TensorsAround, folder: Path, dtype: torch.dtype, max_shard_bytes: int
) -> dict[str, FileDigest]:
    """Write the weights, in `dtype` where they have no type of their own. Return the digest of each file."""
    all_entries = [
        TensorEntry(key, shape, values.dtypes.get(key, dtype)) for key, shape in values.shapes.items()
    ]
    shards = _shards(all_entries, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    written: dict[str, FileDigest] = {}
    for name, entries in zip(names, shards, strict=True):
        pieces = (piece for entry in entries for piece in _pieces(values, entry.name, entry))
        written[name] = write_tensors(folder / name, entries, pieces, {"format": "pt"})
    if len(shards) > 1:
        size = sum(entry.num_bytes for entries in shards for entry in entries)
        where = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": where}
        )
    return written


def _shards(all_entries: Iterable[TensorEntry], limit: int) -> list[list[TensorEntry]]:
    """Return the tensors in order, divided into files of at most `limit` bytes; a tensor larger than that has
    a file of its own."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in all_entries:
        if shards[-1] and size + entry.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _pieces(values: TensorSource, name: str, entry: TensorEntry) -> Iterator[Tensor]:
    numel = math.prod(entry.shape)
    for start in range(0, numel, CHUNK):
        yield values.read(name, "value", start, min(start + CHUNK, numel)).to(entry.dtype)
