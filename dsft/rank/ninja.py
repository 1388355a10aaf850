"""Find and end ninja, which runs the compiler of DeepSpeed's operations: `has_ninja` also looks beside this
Python, a folder that ssh's PATH may lack, and extends PATH; `end_ninja` ends it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

import psutil


def has_ninja(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether ninja is on PATH. If it is only in this Python's folder, append that folder to PATH
    first."""
    path = environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is not None:
        return True
    folder = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=folder) is None:
        return False
    environ["PATH"] = os.pathsep.join([path, folder])
    return True


def end_ninja() -> None:
    """Send SIGTERM to a ninja that this process has started (ninja then removes half-written files) and to
    its compilers. Call right before this process ends: otherwise its main thread sees a failed build."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process().children():
            if child.name() == "ninja":
                found += [child.pid, *(each.pid for each in child.children(recursive=True))]
    sys.setswitchinterval(60)  # seconds: no other thread runs before this one has ended the process
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
