"""A folder is used by one job at a time: a run's, or a store's. Takes the folder; touches the lock in it.

The lock is flock(2), which the kernel drops when its holder dies, however it dies: what a dead process left
is taken over without being asked. It holds between hosts on NFS (Linux 2.6.12 and newer), and on Lustre and
GPFS mounted with flock; where a disk has no flock at all, filelock falls back to the existence of the file,
which a killed job leaves behind.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dsft.errors import LockedError, StorageError

NAME = ".lock"


@contextmanager
def hold(folder: Path, name: str = NAME, key: str = "output_dir") -> Iterator[None]:
    """Hold the folder, made where it is not there, until the block ends. By rank 0, for all ranks of its job.
    name: of the lock; key: of the spec, that says where the folder is.

    Raises LockedError naming the holder's process and host; StorageError where the disk cannot lock.
    """
    path = folder / name
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise LockedError(
            f"{folder} is used by {holder(folder, name)}; wait until it ends, stop it, or choose another "
            "name."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"{path} cannot be locked ({error}); set {key} to a folder that can be written, on a disk that "
            "can lock."
        ) from None
    try:
        with suppress(OSError):  # a full disk: then it is held without a name
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


def holder(folder: Path, name: str = NAME) -> str:
    """Who says to hold the folder."""
    try:
        return (folder / name).read_text().strip() or "another job"
    except OSError:
        return "another job"
