"""A run's own folder for what DeepSpeed swaps to a disk, held by every rank of the host and removed by the
last one; what a run that was killed has left is removed at the next start.

    nvme_path/dsft-swap-<nonce>/dsft-swap.json     the marker: whose folder it is; locked while a rank lives
                               /zero_stage_3/…     DeepSpeed's files (*.swp), in folders that it names

The lock is flock(2), shared by the ranks, which the kernel drops when a process ends, however it ends: a
folder is removed by whoever gets it alone, so never that of a living process. Of it go the marker,
DeepSpeed's files by their ending, and folders that are then empty; anything else stays, and is told.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dsft.errors import StorageError

PREFIX = "dsft-swap-"
MARKER = "dsft-swap.json"


@contextmanager
def hold_swap_folder(nvme_path: Path, nonce: str, run: Path) -> Iterator[Path]:
    """By every rank of a host, with the same nonce. Removed when the last one leaves. run: whose it is.

    Raises StorageError where it cannot be made.
    """
    folder = nvme_path / f"{PREFIX}{nonce}"
    facts = {"folder": folder.name, "run": str(run), "host": socket.gethostname()}
    try:
        folder.mkdir(exist_ok=True)
        marker = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_made(folder, error) from None
    try:
        try:
            fcntl.flock(
                marker, fcntl.LOCK_SH
            )  # before it says whose it is: an empty one is nobody's to remove
            os.pwrite(marker, json.dumps(facts).encode() + b"\n", 0)  # the same bytes by every rank
        except OSError as error:
            raise _not_made(folder, error) from None
        yield folder
    finally:
        with suppress(OSError):
            _remove_alone(folder, marker)
        os.close(marker)


def _not_made(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"{folder} cannot be made ({error.strerror}); name another nvme_path.")


def clear_left_over(nvme_path: Path) -> Iterator[str]:
    """Remove folders of runs that have ended without doing so; a line for each."""
    for folder in sorted(nvme_path.glob(f"{PREFIX}*")):
        facts = _facts(folder)
        if facts is None:
            continue
        with suppress(OSError):  # another user's, or gone meanwhile
            marker = os.open(folder / MARKER, os.O_RDONLY)
            try:
                size = sum(path.stat().st_size for path in folder.rglob("*.swp"))
                if _remove_alone(folder, marker):
                    kept = "; other files in it are left alone" if folder.exists() else ""
                    yield f"removed {folder}, {size:,} bytes that {facts['run']} had left{kept}"
            finally:
                os.close(marker)


def _facts(folder: Path) -> dict[str, Any] | None:
    """What its marker says; None where it is none of ours."""
    try:
        facts = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(facts, dict) and facts.get("folder") == folder.name and "run" in facts
    return facts if ours and not folder.is_symlink() else None


def _remove_alone(folder: Path, marker: int) -> bool:
    """Whether no process held it, so that it was removed. marker: its open file."""
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    for place, folders, files in os.walk(folder, topdown=False):  # follows no link
        for name in files:
            if name.endswith(".swp"):
                os.unlink(Path(place, name))
        for name in folders:
            with suppress(OSError):  # not empty
                os.rmdir(Path(place, name))
    os.unlink(folder / MARKER)
    with suppress(OSError):
        os.rmdir(folder)
    return True
