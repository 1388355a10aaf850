"""Write checkpoints: every rank streams its share of the parameters to a safetensors file, then rank 0
commits them all with one rename.

    checkpoints/step-N.tmp-<nonce>/   rank-*.safetensors by all ranks, hashed while written, flushed to disk;
                                      model/, state.json and MANIFEST.json (sizes, digests) by rank 0
    checkpoints/step-N/               the same folder, after the rename
    checkpoints/latest                the name of that folder, written last
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from dsft.checkpoint.files import (
    CHUNK,
    FileDigest,
    TensorEntry,
    write_aside,
    write_files,
    write_json,
    write_tensors,
)
from dsft.checkpoint.read import FORMAT, MODEL, STATE, CheckpointReader, seal
from dsft.checkpoint.retain import retain
from dsft.engine.api import Fragment
from dsft.errors import CheckpointError, DsftError, StorageError
from dsft.spec.schema import Checkpoint
from dsft.system.files import sync_folder, write_error
from dsft.system.run_folder import LATEST, MANIFEST

T = TypeVar("T")
_INSTEAD = "lower checkpoint.keep_last, or change output_dir (older checkpoints are intact)"
METADATA = {"dsft": str(FORMAT)}
SPARE = 2**20
"""Bytes that a checkpoint needs beyond its tensors: headers, JSON, the file system's own."""


class Group(Protocol):
    """The ranks that save together: `dsft.dist.world.World`, or one rank in a test."""

    @property
    def rank(self) -> int: ...
    def gather(self, mine: T) -> list[T]: ...
    def broadcast(self, mine: T) -> T: ...
    def first(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True)
class CheckpointState:
    """The content of state.json beside the shapes and kinds of the tensors; all values are JSON.

    progress  where the run is: step, applied_steps, num_tokens, epoch, …
    spec      the resolved spec
    batch     the batch sizes that follow from it
    data      {a source of data.train or data.eval, or the part held out of one: {rows, tokens, fingerprint}};
              a loss is only compared with losses of the same held-out rows
    layout    ranks, stages and ZeRO stage that wrote it; no resume reads it, `dsft replay` takes its ranks
    versions  of dsft, torch, deepspeed, transformers
    base      where not all of a model's files is trained: the SHA-256 of each file, by name
    built_from  config, tokenizer and chat template, by `dsft.setup.identity.build_identity`
    software  versions, variables and kind of device, by `dsft.setup.identity.software_identity`
    new_rows  the new rows of the embeddings, as NewRows has them; None where there are none
    origin    what an export's card needs beside these: see `dsft.checkpoint.card.origin_of`
    reference  for preference pairs: the digest and components of the reference's key
    carried  what the task carries from step to step, by `dsft.tasks.api.Annotator.state`
    held_out_loss  eval/loss at this step; None where it was not evaluated, or the loss was not finite
    """

    progress: Mapping[str, Any]
    spec: Mapping[str, Any]
    batch: Mapping[str, Any]
    data: Mapping[str, Mapping[str, Any]]
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    held_out_loss: float | None = None
    base: Mapping[str, str] | None = None
    built_from: Mapping[str, Any] | None = None
    software: Mapping[str, Any] | None = None
    new_rows: Mapping[str, int] | None = None
    origin: Mapping[str, Any] | None = None
    reference: Mapping[str, Any] | None = None
    carried: Mapping[str, float] | None = None


@dataclass(frozen=True)
class RankFile:
    """The file that a rank wrote: its name; set of kinds -> the number of elements of which it has just these
    kinds; and its parameters' shapes; or why it could not be written."""

    name: str
    written: FileDigest | None
    elements: Mapping[frozenset[str], int]
    shapes: Mapping[str, tuple[int, ...]]
    failure: str | None = None


def save(
    run: Path,
    fragments: Iterable[Fragment],
    shapes: Mapping[str, tuple[int, ...]],
    facts: CheckpointState,
    group: Group,
    *,
    model_files: Mapping[str, bytes],
    retention: Checkpoint,
) -> str:
    """Commit `checkpoints/step-N`, N being facts.progress["step"]. Return a line for the user.

    A collective. `fragments` and `shapes` are this rank's. `model_files` (config, tokenizer, …), which only
    rank 0 needs, are written into the checkpoint's model folder, so that it can be exported by itself. If the
    step is committed already and whole, nothing is written.

    Raises StorageError on every rank where one could not write; earlier checkpoints are then untouched.
    """
    folder = run / "checkpoints"
    name = f"step-{facts.progress['step']}"
    if group.first(lambda: _committed(folder / name)):
        return f"{folder / name} is committed already"
    mine = list(fragments)  # views: the bytes are copied piece by piece below
    needed = sum(group.gather(sum(4 * fragment.size for fragment in mine)))
    aside = group.first(lambda: _begin(folder, name, needed))
    parts = group.gather(_write_part(aside, mine, shapes, group.rank))
    try:
        _check_parts(parts)
    except DsftError:
        group.first(lambda: shutil.rmtree(aside, ignore_errors=True))
        raise
    group.first(lambda: _commit(folder / name, aside, parts, facts, model_files))
    removed = group.first(lambda: _prune(run, int(facts.progress["step"]), retention))
    return f"{folder / name} is committed" + (f"; removed {', '.join(removed)}" if removed else "")


def _committed(path: Path) -> bool:
    """Return whether this step is committed and whole; a damaged one is written again."""
    if not path.exists():
        return False
    try:
        CheckpointReader.open(path).verify()
    except CheckpointError:
        return False
    return True


def _begin(folder: Path, name: str, needed: int) -> Path:
    """Remove leftovers of broken saves, check the free space, and create the temporary folder."""
    aside = folder / f"{name}.tmp-{secrets.token_hex(4)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("step-*.tmp-*"):  # under the run's lock no other job writes here
            shutil.rmtree(leftover)
        free = shutil.disk_usage(folder).free
        if free < needed + SPARE:
            raise StorageError(
                f"{folder} has {free:,} bytes free where this checkpoint needs {needed + SPARE:,}: free "
                f"space there, or {_INSTEAD}."
            )
        aside.mkdir()
    except OSError as error:
        raise _not_written(folder, error) from None
    return aside


def _write_part(
    aside: Path, mine: list[Fragment], shapes: Mapping[str, tuple[int, ...]], rank: int
) -> RankFile:
    name = file_of(rank)
    kinds: dict[tuple[str, int, int], list[str]] = {}
    for one in mine:
        kinds.setdefault((one.name, one.start, one.size), []).append(one.kind)
    elements: Counter[frozenset[str]] = Counter()
    for (parameter, _, size), each in kinds.items():
        elements[frozenset(each)] += size
        if len(set(each)) < len(each):
            return RankFile(name, None, {}, shapes, f"It has a part of {parameter} twice; nothing is saved.")
    try:
        written = write_tensors(aside / name, entries_of(mine), _chunks(mine), METADATA)
    except OSError as error:
        return RankFile(name, None, elements, shapes, str(_not_written(aside.parent, error)))
    return RankFile(name, written, elements, shapes)


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def entries_of(fragments: Iterable[Fragment]) -> list[TensorEntry]:
    return [TensorEntry(f"{one.name}|{one.kind}|{one.start}", (one.size,)) for one in fragments]


def _chunks(fragments: list[Fragment]) -> Iterator[Tensor]:
    """Yield the fragments in chunks, and release each fragment when done: pages mapped from a disk can then
    be dropped."""
    fragments.reverse()
    while fragments:
        yield from torch.split(fragments.pop().data, CHUNK)


def _check_parts(parts: list[RankFile]) -> None:
    """Check that all ranks have written, and that together they have every element once."""
    failures = [f"rank {rank}: {part.failure}" for rank, part in enumerate(parts) if part.failure]
    if failures:
        raise StorageError(" ".join(failures))
    total = sum(math.prod(shape) for shape in _shapes(parts).values())
    found = _elements(parts)
    values = sum(elements for kinds, elements in found.items() if "value" in kinds)
    if values != total:
        message = f"The ranks own {values} elements of value where the model has {total}; nothing is saved."
        raise DsftError(message)
    for kinds, elements in found.items():
        if lacking := {kind for other in found if kinds < other for kind in other - kinds}:
            what = f"{elements} elements have no {' and '.join(sorted(lacking))}, which others have"
            raise DsftError(f"{what}; nothing is saved.")


def _shapes(parts: Iterable[RankFile]) -> dict[str, tuple[int, ...]]:
    return {name: shape for part in parts for name, shape in part.shapes.items()}


def _elements(parts: Iterable[RankFile]) -> Counter[frozenset[str]]:
    return sum((Counter(part.elements) for part in parts), Counter())


def _commit(
    final: Path, aside: Path, parts: list[RankFile], facts: CheckpointState, model_files: Mapping[str, bytes]
) -> None:
    try:
        model = write_files(aside / MODEL, model_files)
        kinds = sorted({kind for kinds in _elements(parts) for kind in kinds})
        state = asdict(facts) | {"parameters": _shapes(parts), "kinds": kinds}
        files = {part.name: part.written for part in parts} | {STATE: write_json(aside / STATE, state)}
        files |= {f"{MODEL}/{name}": written for name, written in model.items()}
        listed = {name: asdict(written) for name, written in files.items() if written is not None}
        manifest = {"format": FORMAT, "step": facts.progress["step"], "files": listed}
        write_json(aside / MANIFEST, manifest | {"sha256": seal(manifest)})
        torn = aside.with_name(aside.name + "-torn")
        if final.exists():  # `_committed` found it damaged
            os.rename(final, torn)
        os.rename(aside, final)
        sync_folder(final.parent)
        write_aside(final.parent / LATEST, final.name.encode() + b"\n")
        shutil.rmtree(torn, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _not_written(final.parent, error) from None


def _prune(run: Path, step: int, retention: Checkpoint) -> list[str]:
    try:
        return retain(run, step, retention)
    except OSError as error:
        raise _not_written(run / "checkpoints", error) from None


def _not_written(folder: Path, error: OSError) -> StorageError:
    return write_error(Path(error.filename or folder), error, _INSTEAD)
