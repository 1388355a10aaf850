"""One process at a time builds an operation: takes the folder that it is built in, waits for its turn.

Two locks guard it. dsft's own is flock(2), which the kernel drops when its holder dies, however it dies.
torch's is the mere existence of a file (torch/utils/file_baton.py): a build that was killed leaves it behind,
and every later start waits for it without a word and without end. Who has dsft's lock looks whether anyone
still holds torch's, which torch keeps open while it builds, and removes it where nobody does.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dsft.system.disk import ON_THE_NETWORK, file_system

Say = Callable[[str], None]

OURS, TORCHS = ".dsft_lock", "lock"
POLL = 0.5
"""Seconds between two looks at a lock."""
QUIET = 30 * 60.0
"""Seconds in which nothing of a build has changed, after which a lock counts as left behind where its holder
cannot be seen: the longest silence of a compile seen here was 9 minutes, on a machine with a load of 30."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def turn(folder: Path, say: Say) -> Iterator[None]:
    """Alone in `folder` until the block ends. `say` is told once whom it waits for, and what it removed.

    Raises OSError where the folder cannot be written.
    """
    with (folder / OURS).open("a+", encoding="utf-8") as file:
        _wait_for_ours(file, folder, say)
        _wait_for_torchs(folder / TORCHS, say)
        yield


def _wait_for_ours(file: TextIO, folder: Path, say: Say) -> None:
    told = False
    while not _locked(file):
        if not told:
            file.seek(0)
            holder = file.read().strip() or "another process"
            say(f"waiting for {holder}, which builds {folder.name} in {folder}")
            told = True
        time.sleep(POLL)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()


def _locked(file: TextIO) -> bool:
    """Whether this process has the lock; on a disk that knows none it goes on with torch's alone."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in NO_LOCKS
    return True


def _wait_for_torchs(lock: Path, say: Say) -> None:
    """Until nobody holds it; what a dead process left is removed."""
    told, left = False, None
    while (found := look(lock)) is not None:
        if found.holders or not found.is_over:
            left = None
            if not told:
                say(found.wait_for(lock))
                told = True
        elif left == found.inode:  # as at the look before: its holder was not just about to remove it
            with suppress(FileNotFoundError):
                lock.unlink()
                say(f"removed {lock}, which a build that was killed left behind")
            return
        else:
            left = found.inode
        time.sleep(POLL)


def clear(folder: Path) -> bool:
    """Whether torch's lock was removed, which a build that was killed left in `folder`. One that is held, and
    one of whose holder nothing is known yet, stays. Raises OSError where the folder cannot be written."""
    with (folder / OURS).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # dsft builds there
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        first = look(folder / TORCHS)
        time.sleep(POLL)
        second = look(folder / TORCHS)
        if first is None or second is None or first.inode != second.inode:
            return False
        if first.holders or second.holders or not second.is_over:
            return False
        (folder / TORCHS).unlink(missing_ok=True)
        return True


@dataclass(frozen=True)
class Found:
    """torch's lock as it stands. holders: builders on this host; is_over: without one, nothing is built;
    changed: when it was made, in seconds since 1970."""

    inode: int
    holders: list[int]
    is_over: bool
    changed: float

    def wait_for(self, lock: Path) -> str:
        who = f"process {self.holders[0]}" if self.holders else "a process that cannot be seen from here"
        hint = "" if self.holders else f"; remove {lock} if nothing builds there"
        return f"waiting for {who}, which builds {lock.parent.name} in {lock.parent}{hint}"


def look(lock: Path) -> Found | None:
    """torch's lock; None where there is none."""
    try:
        status = lock.stat()
    except FileNotFoundError:
        return None
    is_local = file_system(lock.parent) not in (None, *ON_THE_NETWORK)
    is_visible = is_local and status.st_uid == os.geteuid()  # a holder would be seen
    is_over = is_visible or _quiet(lock.parent) > QUIET
    return Found(status.st_ino, builders(lock), is_over, status.st_mtime)


def builders(lock: Path) -> list[int]:
    """Processes of this host, of those that this user may look into, that have the lock open, or are a ninja
    at work in its folder: one whose Python was killed compiles on."""
    target, found = lock.resolve(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or another user's
            works = (process / "comm").read_text().strip() == "ninja"
            works = works and _link(process / "cwd") == str(target.parent)
            if works or any(_link(one) == str(target) for one in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return None


def _quiet(folder: Path) -> float:
    """Seconds since anything in the folder has changed."""
    changed = [0.0]
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            if file.name != OURS:
                changed.append(file.stat().st_mtime)
    return time.time() - max(changed)
