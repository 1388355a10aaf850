"""Versions of what decides a run's numbers and messages, without importing any of it. Reads the installed
packages' metadata, torch's version.py and dsft's own files."""

from __future__ import annotations

import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import Any

from dsft.launch.software import decisive_versions, version_of

ALSO = ("safetensors", "peft", "pydantic")
"""Packages beside DECISIVE that decide messages and files."""
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


def software() -> dict[str, Any]:
    """versions: name -> version, None where it is not installed; executable: the Python that runs this."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= decisive_versions() | {name: version_of(name) for name in ALSO}
    versions["CUDA of torch"] = cuda_of_torch()
    versions["NCCL"] = next(filter(None, map(version_of, NCCL)), None)
    return {"versions": versions, "executable": sys.executable}


def cuda_of_torch() -> str | None:
    """That torch was built for; None on a CPU build, or without torch."""
    file = package_file("torch", "version.py")
    if file is None:
        return None
    found = _CUDA.search(file.read_text(encoding="utf-8"))
    return (found[1] or found[2]) if found else None


def package_file(package: str, name: str) -> Path | None:
    """A file of an installed package, which is not imported; None where it is not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / name
    return file if file.is_file() else None
