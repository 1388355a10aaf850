"""Lock a folder (a run's, or a cache's) so that only one job uses it at a time.

The lock is flock(2), which the kernel releases however the process ends, so a killed process leaves no stale
lock. It works between hosts on NFS (Linux 2.6.12 and newer), and on Lustre and GPFS mounted with flock. On
disks without flock, filelock falls back to the existence of the file, which a killed job leaves behind.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dsft.errors import LockedError, StorageError
from dsft.system.files import where_gone
from dsft.system.run_folder import LOCK

_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class FolderLock:
    """A lock that this process has. device, inode: of its file, from stat(2)."""

    path: Path
    device: int
    inode: int

    def check(self) -> None:
        """Check that this process still has the lock. Call before writing to the folder.

        Raises LockedError if the file on the disk is no longer the locked one: it was removed or replaced,
        and another job may have locked the new one. Raises StorageError if the folder is gone or
        the file cannot be read.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            if gone := where_gone(self.path):
                raise StorageError(gone) from None
            raise self._lost("") from None
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read ({error.strerror}).") from None
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            raise self._lost(f" and now belongs to {holder(self.path.parent, self.path.name)}")

    def _lost(self, to: str) -> LockedError:
        return LockedError(
            f"This run has lost the lock of {self.path.parent}: {self.path.name} was removed or replaced "
            f"during training{to}. The run writes nothing more there; once no other job uses the folder, "
            "the same command continues from its newest checkpoint."
        )


@contextmanager
def lock_folder(
    folder: Path, name: str = LOCK, key: str = "output_dir", waiting: Callable[[str], None] | None = None
) -> Iterator[FolderLock]:
    """Lock the folder, created if missing, until the block ends; yield the lock. In a run, rank 0 calls it
    for all ranks. name: of the lock file; key: of the spec that sets the folder, for the message; waiting: if
    given, wait until the folder is free, and call it every _WAIT_SECONDS with the holder of the lock.

    Raises LockedError with the process and host that have the lock; StorageError if the folder cannot be
    created or the disk cannot lock.
    """
    path = folder / name
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while not lock.is_locked:
            try:
                lock.acquire(timeout=_WAIT_SECONDS, blocking=waiting is not None)
            except Timeout:
                other = holder(folder, name)
                if waiting is None:
                    raise LockedError(
                        f"{folder} is used by {other}; wait until it ends, stop it, or choose another name "
                        "for this run."
                    ) from None
                waiting(other)
        found = path.stat()
    except (OSError, NotImplementedError) as error:
        raise StorageError(
            f"{path} cannot be locked ({error}); set {key} to a folder that can be written, on a disk that "
            "can lock."
        ) from None
    try:
        with suppress(OSError):  # a full disk: then the lock file stays empty
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield FolderLock(path, found.st_dev, found.st_ino)
    finally:
        lock.release()


def holder(folder: Path, name: str = LOCK) -> str:
    """Return the process and host that the lock file names, else "another job"."""
    try:
        return (folder / name).read_text().strip() or "another job"
    except OSError:
        return "another job"
