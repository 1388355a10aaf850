"""Store what the reference gives for all examples on disk, in shards. A store is a folder with

    key.json                      the components of its key, and their digest
    shard-<digest>.safetensors    pairs I64 (n,), the numbers of n examples in one dataset, and logps F64
                                  (n, k), the log-probabilities of the k answers of each, or for a teacher
                                  what `dsft.reference.target_rows` has; its metadata name key and dataset

A shard is named by the SHA-256 of its bytes, so a damaged one is detected and ignored, and any number of
ranks can write at the same time. It does not matter which rank wrote a shard; a store is complete when every
example has values.
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
from dsft.reference.key import Components, Key, differences
from dsft.reference.target_rows import TargetRows, is_whole, mapped
from dsft.spec.schema import Spec
from dsft.system.files import TEMPORARY, atomic_write, sync_folder, write_error
from dsft.system.json_file import read_json

KEY = "key.json"
LOCK = ".store.lock"
"""Lock of the job that writes the store; distinct from a run's lock, since both may be in one folder."""
_SHARDS = "shard-*.safetensors"
_NAMED = 32  # hexadecimal digits of a shard's digest in its name

Log = Callable[[str], None]
Values = NDArray[np.float64] | TargetRows
Shape = tuple[int | NDArray[np.int32], int]
"""Of the values of a dataset: its number of examples, or for a teacher that of each example's targets (n,);
and the columns."""


@dataclass(frozen=True)
class StoreContents:
    """Values read from a store. logps: of each dataset, (n, k) float64, NaN where an example is missing, or
    a teacher's."""

    logps: tuple[Values, ...]

    @property
    def missing(self) -> tuple[NDArray[np.int64], ...]:
        """Numbers of the missing examples, per dataset; none of one that has the values of an earlier one."""
        places = {id(one): number for number, one in reversed([*enumerate(self.logps)])}
        each = enumerate(self.logps)
        return tuple(np.flatnonzero(is_missing(one) & (places[id(one)] == number)) for number, one in each)

    def of(self, numbers: Sequence[int]) -> StoreContents:
        """Return the values of these datasets."""
        return StoreContents(tuple(self.logps[number] for number in numbers))

    @property
    def num_missing(self) -> int:
        return sum(map(len, self.missing))


def is_missing(values: Values) -> NDArray[np.bool_]:
    """Return which examples of a dataset have no values, (n,)."""
    return values.is_missing if isinstance(values, TargetRows) else np.asarray(np.isnan(values).any(axis=1))


@dataclass(frozen=True)
class Store:
    """The store of a key's values. setting: the spec's key that names its folder, for messages; of_targets:
    the values are a teacher's, of each target."""

    folder: Path
    key: Key
    setting: str
    of_targets: bool = False

    @classmethod
    def of(cls, spec: Spec, key: Key) -> Store:
        """Return the store in the folder that the spec names, or else in one below
        OUTPUT_DIR/.cache/reference that is named by the key."""
        own = spec.reference
        given = own and own.reference_store
        folder = given or Path(spec.output_dir, ".cache", "reference", key.digest[:32])
        return cls(Path(folder), key, spec.own_key("reference_store"), bool(own and own.teacher_keys))

    def check(self) -> None:
        """Check that the folder's key.json, if it has one, is of this key. Nothing is written, so any process
        may check at any time.

        Raises CheckpointError where it is of another key, naming what differs; StorageError where it cannot
        be read.
        """
        try:
            then = _components(self.folder / KEY)
        except OSError as error:
            raise self._not_read(error) from None
        now = json.loads(json.dumps(self.key.components))
        if then is not None and then != now:
            differ = "; ".join(differences(then, now, self.key.quantize))
            raise CheckpointError(
                f"{self.folder} has log-probabilities of another reference or of other rows: {differ}. "
                f"Change these back, set {self.setting} to another folder, or leave it out."
            )

    def prepare(self) -> None:
        """Prepare the folder for writing: write its key, and remove damaged shards and what killed writers
        left. Only for the process that has the lock. Raises as `check`, and StorageError where the folder
        cannot be written."""
        self.check()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"*{TEMPORARY}"):
                left.unlink(missing_ok=True)
            for path, shard in self._shards():
                if shard is None:
                    path.unlink(missing_ok=True)
            if _components(self.folder / KEY) is None:
                with atomic_write(self.folder / KEY) as out:
                    out.write(json.dumps(self.key.as_json(), indent=1, sort_keys=True).encode())
        except OSError as error:
            raise self._not_written(error) from None

    def read(self, shapes: Sequence[Shape], log: Log = lambda text: None) -> StoreContents:
        """Read the values of datasets. A damaged shard is reported and ignored, so its examples are missing;
        a shard of another key is ignored. Raises StorageError where the folder cannot be read."""
        logps = tuple(
            np.full((count, columns), np.nan) if isinstance(count, int) else TargetRows(count, columns)
            for count, columns in shapes
        )
        try:
            for path, shard in self._shards():
                if shard is None:
                    log(f"warning: {path} is damaged and is ignored; its rows are scored again")
                elif shard.key == self.key.digest and shard.dataset < len(logps):
                    values = logps[shard.dataset]
                    if isinstance(values, TargetRows):
                        values.add(path, shard.ids)
                    else:
                        within = shard.ids < len(values)  # mismatched answers of a shorter run
                        values[shard.ids[within]] = shard.logps[within]
        except OSError as error:
            raise self._not_read(error) from None
        return StoreContents(logps)

    def write(self, dataset: int, ids: NDArray[np.int64], logps: NDArray[Any]) -> None:
        """Add the values of the examples `ids` (n,) of a dataset as one shard, atomically: (n, k), or a
        teacher's (N, columns). Raises StorageError."""
        metadata = {"key": self.key.digest, "dataset": str(dataset)}
        name, dtype = ("rows", np.float32) if self.of_targets else ("logps", np.float64)
        content = save({"pairs": ids.astype(np.int64), name: logps.astype(dtype)}, metadata)
        try:
            with atomic_write(self.folder / _name(content)) as out:
                out.write(content)
            sync_folder(self.folder)
        except OSError as error:
            raise self._not_written(error) from None

    def _shards(self) -> Iterator[tuple[Path, _Shard | None]]:
        """Yield the shards, None for a damaged one. The writer of the store may remove damaged ones
        meanwhile. Raises OSError."""
        for path in sorted(self.folder.glob(_SHARDS)):
            try:
                shard = _shard_of_rows(path) if self.of_targets else _shard(path.read_bytes(), path.name)
            except FileNotFoundError:
                continue
            yield path, shard

    def _not_read(self, error: OSError) -> StorageError:
        return StorageError(
            f"{error.filename or self.folder} cannot be read ({error.strerror}); remove {self.folder} to "
            f"score its rows again, or set {self.setting} to another folder."
        )

    def _not_written(self, error: OSError) -> StorageError:
        way_out = f"set {self.setting} to another folder"
        return write_error(Path(error.filename or self.folder), error, way_out)


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


@dataclass(frozen=True)
class _Shard:
    key: str
    dataset: int
    ids: NDArray[np.int64]
    logps: NDArray[Any]


def _shard_of_rows(path: Path) -> _Shard | None:
    """As `_shard`, of a teacher's shard, whose rows stay in the file. Raises OSError."""
    if not is_whole(path):
        return None
    try:
        about, ids, rows = mapped(path)
        return _Shard(about["key"], int(about["dataset"]), ids, rows)
    except (ValueError, KeyError, TypeError):
        return None


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
