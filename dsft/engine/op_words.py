"""What a compiler says, and what it means: takes its words, gives the cause and the way out. Pure, and
without torch: `dsft doctor` reads them too. Sources: what gcc 12 and clang print.
"""

from __future__ import annotations

import re
import sys

_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
LIBAIO = (
    "install libaio-dev (Debian, Ubuntu) or libaio-devel (RHEL), or name its folders in CFLAGS and LDFLAGS"
)
TOOLKIT = "install CUDA's toolkit, and set CUDA_HOME to the folder that holds bin/nvcc"

# How a header begins, or a library, that the compiler did not find -> what it belongs to, and the way out.
_BELONGS: dict[str, tuple[str, str]] = {
    "Python.h": ("Python", f"install {_PYTHON}-dev (Debian, Ubuntu) or {_PYTHON}-devel (Fedora, RHEL)"),
    "pyconfig.h": ("Python", f"install {_PYTHON}-dev (Debian, Ubuntu) or {_PYTHON}-devel (Fedora, RHEL)"),
    "libaio.h": ("libaio", LIBAIO),
    "aio": ("libaio", LIBAIO),
    "cuda": ("CUDA", TOOLKIT),
    "cublas": ("CUDA", TOOLKIT),
    "curand": ("CUDA", TOOLKIT),
    "nv": ("CUDA", TOOLKIT),
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


def meaning(output: str) -> str | None:
    """One clause: what is missing or too small, and the way out; None where the words are not known."""
    return headers(output) or resources(output)


def headers(output: str) -> str | None:
    for pattern, what in ((_MISSING_HEADER, "header"), (_MISSING_LIBRARY, "library")):
        found = pattern.search(output)
        if found is not None:
            name = next(filter(None, found.groups()))
            owner, way_out = next(
                (belongs for begins, belongs in _BELONGS.items() if name.startswith(begins)),
                ("what is not known here", "install the package that has it"),
            )
            return f"the {what} {name}, of {owner}, was not found; {way_out}"
    return None


def resources(output: str) -> str | None:
    if "No space left on device" in output:
        return "the disk is full; make room, or set TORCH_EXTENSIONS_DIR to a folder with some"
    if re.search(r"Killed|std::bad_alloc|virtual memory exhausted|Cannot allocate memory", output):
        return "the compiler was killed, as by a full memory; set MAX_JOBS=1, or end what else runs"
    if "failed to map segment" in output:
        return "its disk is mounted noexec; set TORCH_EXTENSIONS_DIR to a folder whose programs may run"
    return None


def own_words(output: str) -> str:
    """The first line that calls itself an error, else the last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"\berror\b", line, re.IGNORECASE) and "Error building" not in line
    ]
    return (errors[:1] or lines[-1:] or ["nothing was said"])[0].rstrip(".")
