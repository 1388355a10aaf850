"""Write files and replace folders atomically, or write only over files of dsft's own; cache small JSON
answers; explain why a disk refused a write. Without torch."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from dsft.errors import StorageError
from dsft.system.json_file import read_json

_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
}
TEMPORARY = ".tmp"
"""Suffix of a file that is being written. A killed process can leave one behind."""


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file beside `path`, flush it to the disk (fsync) and rename it when the block ends
    without an error; otherwise remove it. OSErrors pass through."""
    aside = path.with_name(path.name + TEMPORARY)
    try:
        with aside.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def is_own(path: Path, mark: bytes) -> bool:
    """Return whether a command may write to the path, through links too, without a loss to the user: nothing
    is there, or a device, or a file that is empty or begins with `mark`, as all that the command writes
    do."""
    if not path.is_file():
        return True
    try:
        with path.open("rb") as file:
            return file.read(len(mark)) in (b"", mark)
    except OSError:
        return False


@contextmanager
def temporary_folder(path: Path) -> Iterator[None]:
    """Make a folder that is removed when the block ends. Raises StorageError for an OSError of the block."""
    try:
        path.mkdir(parents=True)
        try:
            yield
        finally:
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise write_error(path, error) from None


def sync_folder(path: Path) -> None:
    """Flush a folder's names (new files, renames) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Return the folder of answers that are computed once per host: $XDG_CACHE_HOME/dsft or ~/.cache/dsft."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft"


def cached_json(path: Path) -> Any:
    """Return what `cache_json` wrote; None if it is absent, unreadable or not JSON."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def cache_json(path: Path, value: Any) -> None:
    """Write a small JSON file atomically; do nothing if it cannot be written, since a cache only saves
    time."""
    aside = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")  # several processes may write one answer
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(value), encoding="utf-8")
        os.replace(aside, path)


def write_error(path: Path, error: OSError, instead: str = "change output_dir") -> StorageError:
    """Return the error for a file that could not be written: a full disk, one without inodes, a folder that
    is gone or not writable. `instead`: what else the user can do."""
    if error.errno == errno.ENOENT and (gone := where_gone(path)):
        return StorageError(gone)
    inodes = no_inodes(path.parent) if error.errno == errno.ENOSPC else None
    remedy = "remove files there" if inodes else _REMEDIES.get(error.errno or 0, "check the disk")
    return StorageError(
        f"{path} cannot be written ({inodes or error.strerror or error}): {remedy}, or {instead}."
    )


def where_gone(path: Path) -> str | None:
    """Return a sentence for an error where the folder of a file no longer exists; None where it does."""
    if path.parent.exists():
        return None
    return (
        f"{path.parent} is gone: it was removed or moved while this run used it; put it back, and the same "
        "command continues."
    )


def no_inodes(folder: Path) -> str | None:
    """Return a sentence for an error where a disk has free bytes but no inodes, so that no file can be
    created: the system reports both as "No space left on device". None where it has inodes."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    if found.f_favail or not found.f_files or not found.f_bavail:  # btrfs has no such limit: 0 of 0
        return None
    free = found.f_bavail * found.f_frsize
    return f"the disk has no inodes left for another file, although {free:,} bytes are free"


def replace_folder(out: Path, aside: Path) -> Path:
    """Rename `aside` to `out`, and return where the older `out` is then. Where `out` exists, the two are
    exchanged in one step, so that there is one at every moment. A file system that cannot do that (NFS)
    needs two renames; where the second one fails, the older `out` is moved back."""
    older = aside
    if not out.exists():
        os.rename(aside, out)
    elif not _exchange(aside, out):
        older = aside.with_name(aside.name + "-old")
        os.rename(out, older)
        try:
            os.rename(aside, out)
        except OSError:
            os.rename(older, out)
            raise
    sync_folder(out.parent)
    return older


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders (renameat2 of Linux, glibc 2.28). Return whether it was done."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):
        return False
    paths = os.fsencode(one.absolute()), os.fsencode(other.absolute())
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(libc.renameat2(at_cwd, paths[0], at_cwd, paths[1], exchange) == 0)
