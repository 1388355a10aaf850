"""A file system of its own for a test, with limits soon reached; skips where none can be mounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs at `folder`, which is made, with mount options such as size=3m or nr_inodes=8."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def take_all_inodes(disk: Path) -> None:
    """Make empty files until the disk takes no more; its bytes stay free."""
    with pytest.raises(OSError, match="No space left on device"):
        for number in range(10_000):
            (disk / f"file-{number}").touch()
