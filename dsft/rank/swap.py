"""Manage a run's own folder for DeepSpeed's swap files: all ranks of a host share it, the last one removes
it, and the next start removes stale folders of killed runs.

nvme_path/dsft-swap-<nonce>/dsft-swap.json     marker: the run that owns the folder; locked by living ranks
                           /zero_stage_3/…     DeepSpeed's files (*.swp), in folders that it names

The lock is a shared flock(2), which the kernel releases however a process ends. A folder is removed only by a
process that gets the lock exclusively, so never while a rank lives. Removed are the marker, DeepSpeed's files
(by their suffix) and folders that are then empty; other files stay and are reported.
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
from dsft.system.json_file import read_json

PREFIX = "dsft-swap-"
MARKER = "dsft-swap.json"


@contextmanager
def shared_swap_folder(nvme_path: Path, nonce: str, run: Path) -> Iterator[Path]:
    """Create, lock and yield the run's swap folder, on every rank of a host with the same nonce. The last
    rank to leave removes it. run: the run's folder, written to the marker.

    Raises StorageError if it cannot be created.
    """
    folder = nvme_path / f"{PREFIX}{nonce}"
    facts = {"folder": folder.name, "run": str(run), "host": socket.gethostname()}
    try:
        folder.mkdir(exist_ok=True)
        marker = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _creation_error(folder, error) from None
    try:
        try:
            fcntl.flock(marker, fcntl.LOCK_SH)  # first, since an empty marker protects the folder
            os.pwrite(marker, json.dumps(facts).encode() + b"\n", 0)  # every rank writes the same bytes
        except OSError as error:
            raise _creation_error(folder, error) from None
        yield folder
    finally:
        with suppress(OSError):
            _remove_alone(folder, marker)
        os.close(marker)


def _creation_error(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"{folder} cannot be created ({error.strerror}); name another nvme_path.")


def remove_stale_folders(nvme_path: Path) -> Iterator[str]:
    """Remove stale folders of ended runs; yield a line for each."""
    for folder in sorted(nvme_path.glob(f"{PREFIX}*")):
        facts = _facts(folder)
        if facts is None:
            continue
        with suppress(OSError):  # another user's, or removed meanwhile
            marker = os.open(folder / MARKER, os.O_RDONLY)
            try:
                size = sum(path.stat().st_size for path in folder.rglob("*.swp"))
                if _remove_alone(folder, marker):
                    rest = "; other files in it are left alone" if folder.exists() else ""
                    yield f"removed {folder}, {size:,} bytes that {facts['run']} had left{rest}"
            finally:
                os.close(marker)


def _facts(folder: Path) -> dict[str, Any] | None:
    """Return the marker's content; None if the folder was not made by dsft."""
    try:
        facts = read_json(folder / MARKER)
    except (OSError, ValueError):
        return None
    ours = isinstance(facts, dict) and facts.get("folder") == folder.name and "run" in facts
    return facts if ours and not folder.is_symlink() else None


def _remove_alone(folder: Path, marker: int) -> bool:
    """Remove the folder if no other process has it locked; return whether it was removed. marker: descriptor
    of its open marker."""
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    for place, folders, files in os.walk(folder, topdown=False):  # does not follow links
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
