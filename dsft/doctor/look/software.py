"""Versions of what decides a run's numbers and messages, without importing any of it. Reads the installed
packages' metadata, torch's version.py and dsft's own files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import re
import sys
from pathlib import Path
from typing import Any

from dsft import __version__

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "peft", "pydantic")
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
OWN = Path(__file__).resolve().parents[2]
_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)


def software() -> dict[str, Any]:
    """versions: name -> version, None where it is not installed; executable: the Python that runs this."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: version_of(name) for name in PACKAGES}
    versions["CUDA of torch"] = cuda_of_torch()
    versions["NCCL"] = next(filter(None, map(version_of, NCCL)), None)
    versions["dsft"] = f"{__version__}, files {code_digest()[:12]}"
    return {"versions": versions, "executable": sys.executable}


def version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def code_digest(folder: Path = OWN) -> str:
    """Of all Python files of dsft: hosts with copies of their own may have other ones of one version."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
