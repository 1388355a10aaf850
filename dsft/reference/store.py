"""Store the reference's log-probabilities of all answers on disk, in shards. A store is a folder with

    key.json                      the components of its key, and their digest
    shard-<digest>.safetensors    pairs I64 (k,), their numbers in one dataset, and logps F64 (k, 2), of the
                                  chosen and of the rejected answer; its metadata name the key and the dataset

A shard is named by the SHA-256 of its bytes, so a damaged one is detected and ignored, and any number of
ranks can write at the same time. It does not matter which rank wrote a shard; a store is complete when every
pair has a value.
"""

from __future__ import annotations

import hashlib
import json
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
from dsft.system.files import TEMPORARY, atomic_write, sync_folder, write_error
from dsft.system.json_file import read_json

KEY = "key.json"
LOCK = ".store.lock"
"""Lock of the job that writes the store; distinct from a run's lock, since both may be in one folder."""
_SHARDS = "shard-*.safetensors"
_NAMED = 32  # hexadecimal digits of a shard's digest in its name

Log = Callable[[str], None]


@dataclass(frozen=True)
class StoreContents:
    """Values read from a store. logps: of each dataset, (n, 2) float64, NaN where a pair is missing."""

    logps: tuple[NDArray[np.float64], ...]

    @property
    def missing(self) -> tuple[NDArray[np.int64], ...]:
        """Numbers of the missing pairs, per dataset."""
        return tuple(np.flatnonzero(np.isnan(one).any(axis=1)) for one in self.logps)

    @property
    def num_missing(self) -> int:
        return sum(map(len, self.missing))


def store_folder(spec: Spec, key: Key) -> Path:
    """Return dpo.reference_store, or else a folder below OUTPUT_DIR/.cache/reference that is named by the
    key."""
    given = dpo_of(spec).reference_store
    if given is not None:
        return Path(given)
    return Path(spec.output_dir, ".cache", "reference", key.digest[:32])


def check(folder: Path, key: Key) -> None:
    """Check that the folder's key.json, if it has one, is of this key. Nothing is written, so any process may
    check at any time.

    Raises CheckpointError where it is of another key, naming what differs; StorageError where it cannot be
    read.
    """
    try:
        then = _components(folder / KEY)
    except OSError as error:
        raise _not_read(folder, error) from None
    now = json.loads(json.dumps(key.components))
    if then is not None and then != now:
        raise CheckpointError(
            f"{folder} has log-probabilities of another reference or of other pairs: "
            f"{'; '.join(differences(then, now))}. Change these back, set dpo.reference_store to another "
            "folder, or leave it out."
        )


def prepare(folder: Path, key: Key) -> None:
    """Prepare the folder for writing: write its key, and remove damaged shards and what killed writers left.
    Only for the process that has the lock. Raises as `check`, and StorageError where the folder cannot be
    written."""
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
                out.write(json.dumps(key.as_json(), indent=1, sort_keys=True).encode())
    except OSError as error:
        raise _not_written(folder, error) from None


def _components(path: Path) -> Components | None:
    """Return the components; None where the file is absent or damaged. Then `prepare` writes it again, and
    the shards, each of which names its key, are read as before. A file of an earlier dsft has no digest."""
    try:
        found = read_json(path)
        components, digest = found["components"], found.get("digest")
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(components, dict) or digest not in (None, Key(components).digest):
        return None
    return components


def read(folder: Path, key: Key, sizes: Sequence[int], log: Log) -> StoreContents:
    """Read the values of datasets with the given numbers of pairs. A damaged shard is reported and ignored,
    so its pairs are missing; a shard of another key is ignored. Raises StorageError where the folder cannot
    be read."""
    logps = tuple(np.full((size, 2), np.nan) for size in sizes)
    try:
        for path, shard in _shards(folder):
            if shard is None:
                log(f"warning: {path} is damaged and is ignored; its pairs are scored again")
            elif shard.key == key.digest:
                if shard.dataset < len(logps):
                    logps[shard.dataset][shard.pairs] = shard.logps
    except OSError as error:
        raise _not_read(folder, error) from None
    return StoreContents(logps)


def write(folder: Path, key: Key, dataset: int, pairs: NDArray[np.int64], logps: NDArray[np.float64]) -> None:
    """Add the values (k, 2) of pairs (k,) of a dataset as one shard, atomically. Raises StorageError."""
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
    """Yield the shards, None for a damaged one. The writer of the store may remove damaged ones meanwhile.
    Raises OSError."""
    for path in sorted(folder.glob(_SHARDS)):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        yield path, _shard(content, path.name)


def _shard(content: bytes, name: str) -> _Shard | None:
    """Return None where the bytes do not match the digest in the name, or a value is infinite or NaN."""
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


def _name(content: bytes) -> str:
    return f"shard-{hashlib.sha256(content).hexdigest()[:_NAMED]}.safetensors"


def _not_read(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{error.filename or folder} cannot be read ({error.strerror}); remove {folder} to score its pairs "
        "again, or set dpo.reference_store to another folder."
    )


def _not_written(folder: Path, error: OSError) -> StorageError:
    return write_error(Path(error.filename or folder), error, "set dpo.reference_store to another folder")
