"""Why an operation could not be built: takes its builder and what was said, gives the cause and the way out.

Looks at this host's compiler and ninja, then at the words. Sources: what torch's cpp_extension and
DeepSpeed's builder raise, and what gcc 12 and clang print.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from torch.utils import cpp_extension

_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIBAIO = (
    "install libaio-dev (Debian, Ubuntu) or libaio-devel (RHEL), or name its folders in CFLAGS and LDFLAGS"
)
_TOOLKIT = "install CUDA's toolkit, and set CUDA_HOME to the folder that holds bin/nvcc"

# How a header begins, or a library, that the compiler did not find -> what it belongs to, and the way out.
_BELONGS: dict[str, tuple[str, str]] = {
    "Python.h": ("Python", f"install {_PYTHON}-dev (Debian, Ubuntu) or {_PYTHON}-devel (Fedora, RHEL)"),
    "pyconfig.h": ("Python", f"install {_PYTHON}-dev (Debian, Ubuntu) or {_PYTHON}-devel (Fedora, RHEL)"),
    "libaio.h": ("libaio", LIBAIO),
    "aio": ("libaio", LIBAIO),
    "cuda": ("CUDA", _TOOLKIT),
    "cublas": ("CUDA", _TOOLKIT),
    "curand": ("CUDA", _TOOLKIT),
    "nv": ("CUDA", _TOOLKIT),
    "omp.h": ("OpenMP", "install libgomp1 and g++ (Debian, Ubuntu), or libomp-dev for clang"),
    "gomp": ("OpenMP", "install libgomp1 and g++ (Debian, Ubuntu), or libomp-dev for clang"),
    "omp": ("OpenMP", "install libgomp1 and g++ (Debian, Ubuntu), or libomp-dev for clang"),
    "torch": ("torch", "install torch again: its own files are not whole"),
    "ATen": ("torch", "install torch again: its own files are not whole"),
    "c10": ("torch", "install torch again: its own files are not whole"),
    "stdc++": ("the C++ library", "install g++ (Debian, Ubuntu) or gcc-c++ (Fedora, RHEL)"),
}
_MISSING_HEADER = re.compile(r"fatal error: '?([\w./+-]+)'?(?: file not found|: No such file or directory)")
_MISSING_LIBRARY = re.compile(r"cannot find -l([\w+.-]+)|library not found for -l([\w+.-]+)")


def why(builder: Any, output: str) -> str:
    """One clause: what does not fit (compiler, headers, CUDA, torch, memory, disk), and the way out."""
    looked = (look(builder, output) for look in _LOOKS)
    return missing_tool() or next(filter(None, looked), None) or _own_words(output)


def missing_tool() -> str | None:
    """A program that a build starts, and that is not there."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        named = "CXX names" if os.environ.get("CXX") else "it is called"
        return (
            f"the compiler is missing ({named} {compiler}, which is not on PATH); install one (Debian, "
            "Ubuntu: g++; Fedora, RHEL: gcc-c++), or set CXX"
        )
    if not cpp_extension.is_ninja_available():
        return "ninja is missing, which starts the compiler; pip install ninja, with its folder on PATH"
    return None


def _cuda(builder: Any, output: str) -> str | None:
    """The toolkit, of an operation that is compiled with it (async_io is; cpu_adam is not)."""
    if not isinstance(builder, CUDAOpBuilder) or not torch.cuda.is_available() or torch.version.hip:
        return None
    home = cpp_extension.CUDA_HOME
    if home is None:
        return f"CUDA's toolkit was not found; {_TOOLKIT}"
    if shutil.which("nvcc", path=str(Path(home, "bin"))) is None:
        return f"CUDA_HOME {home} has no bin/nvcc; {_TOOLKIT}"
    return None


def _torch(builder: Any, output: str) -> str | None:
    """An operation, or a compiler, that does not go with this torch."""
    if "version mismatch! DeepSpeed ops were compiled" in output:
        return (
            f"it came compiled for another torch or CUDA than torch {torch.__version__}; install deepspeed "
            "again without DS_BUILD_OPS, and it is compiled here"
        )
    if "undefined symbol" in output:
        return f"what is there was built for another torch than {torch.__version__}; remove that folder"
    if re.search(r"GLIBCXX_\S+. not found|GLIBC_\S+. not found", output):
        return (
            "it was compiled with a newer compiler than the C++ library that Python has loaded; set CXX to a "
            "compiler of Python's own environment (conda: gxx_linux-64)"
        )
    if re.search(r"C\+\+\d+ or later compatible compiler|(unrecognized|invalid).*-std=c\+\+", output):
        compiler = cpp_extension.get_cxx_compiler()
        return (
            f"the compiler {compiler} is too old for torch {torch.__version__}; install g++ 11 or newer, or "
            "set CXX to one"
        )
    return None


def _headers(builder: Any, output: str) -> str | None:
    for pattern, what in ((_MISSING_HEADER, "header"), (_MISSING_LIBRARY, "library")):
        found = pattern.search(output)
        if found is not None:
            name = next(filter(None, found.groups()))
            owner, way_out = next(
                (belongs for begins, belongs in _BELONGS.items() if name.startswith(begins)),
                ("what is not known here", "install the package that has it"),
            )
            return f"the {what} {name}, of {owner}, was not found; {way_out}"
    if (
        builder.name == "async_io" and "not being compatible" in output
    ):  # it links a program with libaio beforehand
        return f"libaio was not found; {LIBAIO}"
    return None


def _resources(builder: Any, output: str) -> str | None:
    if "No space left on device" in output:
        return "the disk is full; make room, or set TORCH_EXTENSIONS_DIR to a folder with some"
    if re.search(r"Killed|std::bad_alloc|virtual memory exhausted|Cannot allocate memory", output):
        return "the compiler was killed, as by a full memory; set MAX_JOBS=1, or end what else runs"
    if "failed to map segment" in output:
        return "its disk is mounted noexec; set TORCH_EXTENSIONS_DIR to a folder whose programs may run"
    return None


def _own_words(output: str) -> str:
    """The first line that calls itself an error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"\berror\b", line, re.IGNORECASE) and "Error building" not in line
    ]
    return (errors[:1] or lines[-1:] or ["nothing was said"])[0].rstrip(".")


_Look = Callable[[Any, str], str | None]
_LOOKS: tuple[_Look, ...] = (_cuda, _torch, _headers, _resources)
