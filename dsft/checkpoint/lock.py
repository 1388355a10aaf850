"""A run's folder is used by one job at a time. Takes the folder; touches `.lock` in it.

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
def hold(run: Path) -> Iterator[None]:
    """Hold the folder, made where it is not there, until the block ends. By rank 0, for all ranks of its job.

    Raises LockedError naming the holder's process and host; StorageError where the disk cannot lock.
    """
    path = run / NAME
    lock = FileLock(path)
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise LockedError(
            f"{run} is used by {holder(run)}; wait until it ends, stop it, or choose another name."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"{path} cannot be locked ({error}); set an output_dir on a disk that can."
        ) from None
    try:
        with suppress(OSError):  # a full disk: then it is held without a name
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


def holder(run: Path) -> str:
    """Who says to hold the folder."""
    try:
        return (run / NAME).read_text().strip() or "another job"
    except OSError:
        return "another job"
