"""The log-probabilities that a reference gives to the answers of all pairs, on the disk, in shards.

Takes a folder and a Key. Gives arrays, and the numbers of the pairs that are not there yet. A folder holds

    key.json                      the components of its key, and their digest
    shard-<digest>.safetensors    pairs I64 (k,), their numbers in one dataset, and logps F64 (k, 2), of the
                                  chosen and of the rejected answer; its metadata name the key and the dataset

A shard is named by the sha256 of its bytes: what is not what was written is not read, and any number of ranks
write beside each other. Which rank wrote what means nothing; a store is whole when every pair has a value.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dsft.errors import CheckpointError, StorageError
from dsft.plan.reference import dpo_of
from dsft.reference.key import Components, Key, differences
from dsft.spec.schema import Spec
from dsft.system.files import TEMPORARY, atomic_write, sync_folder
from dsft.system.json_file import read_json

KEY = "key.json"
LOCK = ".store.lock"
"""Of who makes the store: not a run's, whose folder it may be."""
_SHARDS = "shard-*.safetensors"
_NAMED = 32  # hexadecimal digits of a shard's digest in its name

Say = Callable[[str], None]


@dataclass(frozen=True)
class Stored:
    """What a store holds. logps: of each dataset, (n, 2) float64, NaN where a pair is not there."""

    logps: tuple[NDArray[np.float64], ...]

    @property
    def missing(self) -> tuple[NDArray[np.int64], ...]:
        """Of each dataset the numbers of the pairs that are not there."""
        return tuple(np.flatnonzero(np.isnan(one).any(axis=1)) for one in self.logps)

    @property
    def num_missing(self) -> int:
        return sum(map(len, self.missing))


def store_folder(spec: Spec, key: Key) -> Path:
    """dpo.reference_store itself, or a folder named by the key below OUTPUT_DIR/.cache/reference."""
    given = dpo_of(spec).reference_store
    if given is not None:
        return Path(given)
    return Path(spec.output_dir, ".cache", "reference", key.digest[:32])


def check(folder: Path, key: Key, say: Say = lambda text: None) -> None:
    """That what the folder holds, if anything, is of this key. By anyone, at any time: nothing is written.
    `say` gets a line where key.json is damaged while the shards, which name their key too, are of this key.

    Raises CheckpointError where it holds what another key gave, naming what differs; StorageError where it
    cannot be read.
    """
    try:
        held = _components(folder / KEY)
        if held is None:
            _check_shards(folder, key)
            if (folder / KEY).exists():
                say(
                    f"warning: {folder / KEY} is damaged and is not used; what is stored still is, since "
                    "each shard names its key itself. Remove the file to be rid of this line."
                )
        else:
            _check(folder, held, key)
    except OSError as error:
        raise _not_read(folder, error) from None


def prepare(folder: Path, key: Key) -> None:
    """Make the folder ready to be written: with its key, without what killed writers left and damaged shards.
    By who alone makes the store. Raises as `check`, and StorageError where it cannot be written."""
    check(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"*{TEMPORARY}"):
            left.unlink(missing_ok=True)
        for path, shard in _shards(folder):
            if shard is None:
                path.unlink(missing_ok=True)
        if _components(folder / KEY) is None:
            with atomic_write(folder / KEY) as out:
                content = {"components": key.components, "digest": key.digest}
                out.write(json.dumps(content, indent=1, sort_keys=True).encode())
    except OSError as error:
        raise _not_written(folder, error) from None


def _components(path: Path) -> Components | None:
    """None where it is not there or damaged: `prepare` writes it again then, since every shard names its key
    itself. One that an earlier dsft wrote has no digest, and is taken as it is."""
    try:
        found = read_json(path)
        components, digest = found["components"], found.get("digest")
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(components, dict) or digest not in (None, Key(components).digest):
        return None
    return components


def _check(folder: Path, held: Components, key: Key) -> None:
    now = json.loads(json.dumps(key.components))
    if held != now:
        raise CheckpointError(
            f"{folder} holds log-probabilities of another reference or of other pairs: "
            f"{'; '.join(differences(held, now))}. Put these back, give dpo.reference_store another folder, "
            "or leave it out."
        )


def _check_shards(folder: Path, key: Key) -> None:
    """Where the folder does not say of what key it is."""
    if any(shard is not None and shard.key != key.digest for _, shard in _shards(folder)):
        raise CheckpointError(
            f"{folder} holds log-probabilities of another reference or of other pairs, and its {KEY} is gone "
            "or damaged, so what differs cannot be told; give dpo.reference_store another folder, or leave "
            "it out."
        )


def read(folder: Path, key: Key, sizes: Sequence[int], say: Say) -> Stored:
    """What the folder holds for datasets of so many pairs. A shard that is damaged is told and passed over,
    so its pairs are missing; one of another key is passed over. Raises StorageError where the folder cannot
    be read."""
    logps = tuple(np.full((size, 2), np.nan) for size in sizes)
    try:
        for path, shard in _shards(folder):
            if shard is None:
                say(f"warning: {path} is not what was written; its pairs are scored again")
            elif shard.key == key.digest:
                _take(shard, logps)
    except OSError as error:
        raise _not_read(folder, error) from None
    return Stored(logps)


def write(folder: Path, key: Key, dataset: int, pairs: NDArray[np.int64], logps: NDArray[np.float64]) -> None:
    """Add pairs (k,) of a dataset with their values (k, 2): there whole, or not at all. Raises
    StorageError."""
    metadata = {"key": key.digest, "dataset": str(dataset)}
    content = save({"pairs": pairs.astype(np.int64), "logps": logps.astype(np.float64)}, metadata)
    try:
        with atomic_write(folder / _name(content)) as out:
            out.write(content)
        sync_folder(folder)
    except OSError as error:
        raise _not_written(folder, error) from None


@dataclass(frozen=True)
class _Shard:
    key: str
    dataset: int
    pairs: NDArray[np.int64]
    logps: NDArray[np.float64]


def _shards(folder: Path) -> Iterator[tuple[Path, _Shard | None]]:
    """Those that are there; who makes the store may remove a damaged one meanwhile. Raises OSError."""
    for path in sorted(folder.glob(_SHARDS)):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        yield path, _shard(content, path.name)


def _shard(content: bytes, name: str) -> _Shard | None:
    """None where the bytes are not those that were written under this name, or not all values are finite."""
    if _name(content) != name:
        return None
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about: dict[str, Any] = header["__metadata__"]
        arrays = load(content)
        shard = _Shard(about["key"], int(about["dataset"]), arrays["pairs"], arrays["logps"])
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None
    return shard if np.isfinite(shard.logps).all() else None


def _take(shard: _Shard, logps: tuple[NDArray[np.float64], ...]) -> None:
    if shard.dataset < len(logps):
        logps[shard.dataset][shard.pairs] = shard.logps


def _name(content: bytes) -> str:
    return f"shard-{hashlib.sha256(content).hexdigest()[:_NAMED]}.safetensors"


def _not_read(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{error.filename or folder} cannot be read ({error.strerror}); put the store on a sound disk, "
        "remove it, to have it made anew, or set dpo.reference_store to another folder."
    )


def _not_written(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{error.filename or folder}: cannot be written ({os.strerror(error.errno or 0)}); free some space "
        "there, or set dpo.reference_store to a folder that can be written."
    )
