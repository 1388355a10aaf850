"""Read checkpoints: check that one is whole, find the one to resume from, and read any range of any tensor.

A checkpoint is a folder `step-N`. Nothing in it is a pickle, and any number of ranks can read it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsft.checkpoint.files import FileDigest, damage, damages
from dsft.checkpoint.state_schema import problem_of
from dsft.engine.api import StateKind
from dsft.errors import CheckpointError, LockedError
from dsft.system.json_file import read_json
from dsft.system.run_folder import CHECKPOINTS, MANIFEST, STEP, named_checkpoint, step_folders, step_of

FORMAT = 1
STATE = "state.json"
MODEL = "model"
READ = ("config.json", "tokenizer_config.json")
"""JSON files in the model folder that an export reads."""
LISTED = re.compile(rf"(?:{MODEL}/)?(?!\.\.?$)[^/]+")
"""Pattern of a file that a manifest may list: in the folder itself, or in its model folder."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one tensor, under `key` in `file`."""

    start: int
    stop: int
    file: str
    key: str


@dataclass(eq=False)
class CheckpointReader:
    """An opened checkpoint. `files`: those that the manifest lists; `state`: state.json, see
    `CheckpointState` in save.py; `digest`: that of the manifest, which lists all other files, so that it
    identifies the checkpoint."""

    path: Path
    files: Mapping[str, FileDigest]
    state: Mapping[str, Any]
    digest: str
    _open: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> CheckpointReader:
        """Read the manifest and state.json. Raises CheckpointError where one is missing, damaged or of
        another format, where the manifest lists a path outside the folder, where state.json has values of
        other types, and where its step is not that of the folder's name.

        `path`: as `named_checkpoint` takes it.
        """
        path = named_checkpoint(path)
        manifest = _json(path / MANIFEST)
        try:
            files = {
                name: FileDigest(int(f["size"]), str(f["sha256"])) for name, f in manifest["files"].items()
            }
            form, digest = manifest["format"], manifest.pop("sha256")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path / MANIFEST} is not a manifest ({error!r}).") from None
        if form != FORMAT:
            raise CheckpointError(f"{path} has format {form}; this dsft reads format {FORMAT}.")
        if digest != seal(manifest):
            raise CheckpointError(
                f"{path / MANIFEST} has changed since it was written; the checkpoint is damaged."
            )
        if STATE not in files:
            raise CheckpointError(f"{path / MANIFEST} does not list {STATE}.")
        outside = [name for name in files if not (LISTED.fullmatch(name) and name.isprintable())]
        if outside:
            raise CheckpointError(
                f"{path / MANIFEST} lists {outside[0]!r}, which is not a file of a checkpoint; it was not "
                "written by dsft."
            )
        if damaged := damage(path / STATE, files[STATE]):
            raise CheckpointError(f"{damaged}; the checkpoint is damaged.")
        state = _json(path / STATE)
        if problem := problem_of(state):
            raise CheckpointError(f"{path / STATE} is not a checkpoint's state ({problem}).")
        _check_step(path, int(state["progress"]["step"]))
        return cls(path, files, state, digest)

    @property
    def step(self) -> int:
        return int(self.state["progress"]["step"])

    @property
    def held_out_loss(self) -> float | None:
        """eval/loss at this step; None where it was not evaluated, or the loss was not finite."""
        loss = self.state.get("held_out_loss")
        return None if loss is None else float(loss)

    @property
    def nonfinite_in_a_row(self) -> int:
        """Number of steps in a row, up to this one, that were skipped since their gradients were not
        finite."""
        return int(self.state["progress"].get("nonfinite_in_a_row", 0))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> full shape of every parameter."""
        return {name: tuple(shape) for name, shape in self.state["parameters"].items()}

    @property
    def model_folder(self) -> Path:
        """Folder with config.json, tokenizer and generation config, as transformers saves them."""
        return self.path / MODEL

    def verify(self) -> None:
        """Check every listed file by size and SHA-256, that those of READ are mappings, and that the ranges
        of every parameter are complete. Reads all files.

        Raises CheckpointError naming the first file or parameter that is damaged.
        """
        for damaged in damages(self.path, self.files):
            raise CheckpointError(f"{damaged}; the checkpoint is damaged.")
        for name in sorted({f"{MODEL}/{name}" for name in READ} & self.files.keys()):
            if not isinstance(_json(self.path / name), dict):
                raise CheckpointError(f"{self.path / name} is no mapping; the checkpoint is damaged.")
        for name, shape in self.shapes.items():
            numel = torch.Size(shape).numel()
            for kind in self.kinds_of(name):
                self._pieces_of(name, kind, 0, numel)

    def kinds_of(self, name: str) -> list[StateKind]:
        """Return the kinds that must be stored of a parameter: the largest set of kinds of any parameter that
        contains its own, and kinds that no parameter has. With muon not all have the same."""
        own = self._stored_of(name)
        whole = max((kinds for kinds in self._stored if own <= kinds), key=len)
        missing = set(self.state["kinds"]).difference(*self._stored)
        return [kind for kind in self.state["kinds"] if kind in whole | missing]

    def _stored_of(self, name: str) -> frozenset[StateKind]:
        return frozenset(kind for kind in self.state["kinds"] if (name, kind) in self._index)

    @cached_property
    def _stored(self) -> set[frozenset[StateKind]]:
        return {self._stored_of(name) for name in self.shapes}

    def read(self, name: str, kind: StateKind, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of the flattened parameter, whichever ranks wrote them, as float32 on
        the CPU."""
        result = torch.empty(stop - start)
        for piece in self._pieces_of(name, kind, start, stop):
            low, high = max(start, piece.start), min(stop, piece.stop)
            values = self._file(piece.file).get_slice(piece.key)
            result[low - start : high - start] = values[low - piece.start : high - piece.start]
        return result

    def _pieces_of(self, name: str, kind: str, start: int, stop: int) -> list[Piece]:
        """Return the pieces that cover [start, stop), in order and without a gap."""
        found, reached = [], start
        for piece in self._index.get((name, kind), ()):
            if piece.stop > reached and piece.start < stop:
                if piece.start > reached:
                    break
                found.append(piece)
                reached = piece.stop
        if reached < stop:
            raise CheckpointError(f"{self.path} has no {kind} of {name} from element {reached} on.")
        return found

    @cached_property
    def _index(self) -> dict[tuple[str, str], list[Piece]]:
        """Pieces of each (name, kind), ordered by start."""
        index: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        for file in self.files:
            if not file.startswith("rank-"):
                continue
            for key in self._file(file).keys():  # noqa: SIM118  # safe_open is no mapping
                name, kind, start = key.rsplit("|", 2)
                size = self._file(file).get_slice(key).get_shape()[0]
                index[name, kind].append(Piece(int(start), int(start) + size, file, key))
        for pieces in index.values():
            pieces.sort(key=lambda piece: piece.start)
        return index

    def _file(self, name: str) -> Any:
        """Return a memory-mapped safetensors file, opened once."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.path / name, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.path / name} cannot be read ({error}).") from None
        return self._open[name]


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint to resume from (None: start at step 0), and notes on those that were skipped."""

    path: Path | None
    notes: tuple[str, ...] = ()


def find(run: Path, resume: str) -> ResumePoint:
    """Find the checkpoint to resume from. `resume`, as in the spec: 'auto' takes the newest that verifies,
    'never' none, and a path that checkpoint.

    `latest` is not used: the folders themselves are listed, so it may be lost or wrong. A run never starts
    again from step 0 by itself, so CheckpointError is raised where there are checkpoints and none is whole,
    or where the one given by path is not. Raises LockedError where 'never' is given and there are
    checkpoints, or where the run has others of the given one's step or later. Reads all files, so only rank 0
    calls it.
    """
    if (place := run / CHECKPOINTS).exists() and not place.is_dir():
        raise CheckpointError(f"{place} is a file where the folder of checkpoints should be; move it away.")
    folders = step_folders(run)
    if resume not in ("auto", "never"):
        named = CheckpointReader.open(Path(resume))
        named.verify()
        _check_nothing_later(named, run, folders)
        return ResumePoint(named.path)
    if not folders:
        return ResumePoint(None)
    if resume == "never":
        raise LockedError(
            f"checkpoint.resume is never, but {run / 'checkpoints'} has {folders[0].name}; choose another "
            "name, move that folder away, or set checkpoint.resume=auto to resume from it."
        )
    notes: list[str] = []
    for folder in folders:
        try:
            CheckpointReader.open(folder).verify()
            return ResumePoint(folder, tuple(notes))
        except CheckpointError as error:
            notes.append(f"{folder.name} is skipped: {error}")
    raise CheckpointError(
        f"None of the {len(folders)} checkpoints in {run / 'checkpoints'} is whole, and a run does not "
        "start again from step 0 by itself; move that folder away to start from step 0. " + " ".join(notes)
    )


def _check_nothing_later(named: CheckpointReader, run: Path, folders: list[Path]) -> None:
    """Raise LockedError where the run has other checkpoints of the same or a later step. Resuming from
    `named` may give another history (a run with more steps has another schedule), and later ones would be
    taken as part of it: kept in place of newly saved ones, and resumed from at the next start."""
    later = [path.name for path in folders if step_of(path) >= named.step and not path.samefile(named.path)]
    if later:
        raise LockedError(
            f"checkpoint.resume is {named.path}, but {run / 'checkpoints'} has {', '.join(later)}: set "
            "checkpoint.resume=auto to resume from the newest, or move those away to resume from this one."
        )


def _check_step(path: Path, step: int) -> None:
    """Check that the folder's name has the step of state.json. The newest checkpoint is found by the folder's
    name, so under a wrong name each start would resume from the wrong one."""
    if STEP.fullmatch(path.name) and path.name != f"step-{step}":
        raise CheckpointError(
            f"{path} is the checkpoint of step {step}; rename it to step-{step}, or move it elsewhere."
        )


def seal(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256, as hex, of a manifest's content; it is stored in the manifest as `sha256`."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _json(path: Path) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; the checkpoint was not committed.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); the checkpoint is damaged.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} {error}; the checkpoint is damaged.") from None


def verify(path: Path) -> str:
    """Carry out `dsft verify CHECKPOINT`: return a line for the user. Raises CheckpointError where it is not
    whole."""
    checkpoint = CheckpointReader.open(path)
    checkpoint.verify()
    size = sum(written.size for written in checkpoint.files.values())
    elements = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    kinds = ", ".join(checkpoint.state["kinds"])
    return (
        f"{checkpoint.path} is whole: step {checkpoint.step}, {len(checkpoint.files)} files, {size:,} bytes, "
        f"{len(checkpoint.shapes)} parameters of {elements:,} elements ({kinds})"
    )
