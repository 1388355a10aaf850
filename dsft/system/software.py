"""Read the versions of all software that affects a run's numbers, from package metadata without importing."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path

from packaging.specifiers import SpecifierSet

from dsft import __version__

DECISIVE = ("torch", "deepspeed", "transformers", "tokenizers", "numpy", "liger-kernel")
"""Packages whose version can change a loss, a mask or an update; all ranks of a run must have the same."""

SINKS = ("tensorboard", "swanlab", "wandb")
"""Packages with which a spec may record its run."""
RANGES = {"torch": ">=2.10", "deepspeed": ">=0.19.8,<0.20", "transformers": ">=5.17,<6"}
"""Supported versions, equal to those in pyproject.toml."""

SWITCHES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_COMPILE_DISABLE",
    "USE_HUB_KERNELS",
)
"""Environment variables that select other kernels or another arithmetic precision."""

OWN = Path(__file__).resolve().parents[1]


@functools.cache
def decisive_versions() -> dict[str, str | None]:
    """Return the version of Python and of each package in DECISIVE, None if not installed; for dsft also a
    digest of its files at the first call, since two checkouts of one version may contain different code."""
    dsft = f"{__version__}, files {code_digest()[:12]}"
    return {"python": platform.python_version(), "dsft": dsft} | {name: version_of(name) for name in DECISIVE}


def outside(versions: Mapping[str, str | None]) -> list[str]:
    """Return a clause for each package of RANGES whose version is out of range; missing packages are
    skipped."""
    return [
        f"{name} {version} is outside of the supported range {RANGES[name]}"
        for name, version in versions.items()
        if version is not None and name in RANGES
        if not SpecifierSet(RANGES[name]).contains(version, prereleases=True)
    ]


def switches(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of SWITCHES that are set."""
    return {name: environ[name] for name in SWITCHES if name in environ}


def versions_line(torch: str) -> str:
    """Format `torch 2.13.0+cu130, deepspeed 0.19.8, transformers 5.23.0, dsft 0.1.0`. torch: its version with
    that of CUDA, as in torch.__version__."""
    named = (f"{name} {version_of(name)}" for name in ("deepspeed", "transformers"))
    return ", ".join([f"torch {torch}", *named, f"dsft {__version__}"])


@functools.cache
def version_of(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest(folder: Path = OWN) -> str:
    """Return the hex SHA-256 over the names and contents of all Python files of dsft."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("[!.]*.py") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
