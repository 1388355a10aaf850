"""Where ninja stands, which starts the compiler of DeepSpeed's operations: beside this Python, and ssh's PATH
does not name that folder. Takes an environment, and writes its PATH."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path


def has_ninja(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Whether it is on PATH, after the folder of this Python was put at its end where it is there alone."""
    path = environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is not None:
        return True
    folder = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=folder) is None:
        return False
    environ["PATH"] = os.pathsep.join([path, folder])
    return True
