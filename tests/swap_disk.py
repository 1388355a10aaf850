"""Whether offload to NVMe can be tried on this machine: gives the reason why not, or None."""

from __future__ import annotations

import ctypes.util
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsft.system.disk import IN_MEMORY, ON_THE_NETWORK, file_system


@functools.cache
def why_no_swap() -> str | None:
    """libaio, a compiler for DeepSpeed's async_io, and a local disk below pytest's folder."""
    if not any(Path(folder, "libaio.h").exists() for folder in _folders("CPATH", "/usr/include")):
        return "libaio's header is not here (Debian: libaio-dev), without which nothing is swapped to a disk"
    linked = (Path(folder, "libaio.so").exists() for folder in _folders("LIBRARY_PATH", "/usr/lib"))
    if ctypes.util.find_library("aio") is None and not any(linked):
        return "libaio is not here, without which nothing is swapped to a disk"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "no compiler is here, for DeepSpeed's async_io"
    kind = file_system(Path(tempfile.gettempdir()))
    if kind in IN_MEMORY | ON_THE_NETWORK:
        return f"{tempfile.gettempdir()} is no local disk ({kind})"
    return None


def _folders(variable: str, usual: str) -> Iterator[str]:
    yield from filter(None, os.environ.get(variable, "").split(os.pathsep))
    yield from (usual, usual.replace("/usr/", "/usr/local/"))
