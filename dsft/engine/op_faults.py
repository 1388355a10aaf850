"""Why an operation could not be built: takes its builder and what was said, gives the cause and the way out.

Looks at this host's compiler and ninja, then at the words (`op_words`). Sources: what torch's cpp_extension
and DeepSpeed's builder raise.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from torch.utils import cpp_extension

from dsft.engine.op_words import LIBAIO, TOOLKIT, headers, own_words, resources
from dsft.launch.ninja import has_ninja


def why(builder: Any, output: str) -> str:
    """One clause: what does not fit (compiler, headers, CUDA, torch, memory, disk), and the way out."""
    looked = (look(builder, output) for look in _LOOKS)
    return missing_tool() or next(filter(None, looked), None) or own_words(output)


def missing_tool() -> str | None:
    """A program that a build starts, and that is not there."""
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        named = "CXX names" if os.environ.get("CXX") else "it is called"
        return (
            f"the compiler is missing ({named} {compiler}, which is not on PATH); install one (Debian, "
            "Ubuntu: g++; Fedora, RHEL: gcc-c++), or set CXX"
        )
    if not has_ninja():
        return "ninja is missing, which starts the compiler; pip install ninja, with its folder on PATH"
    return None


def _cuda(builder: Any, output: str) -> str | None:
    """The toolkit, of an operation that is compiled with it (async_io is; cpu_adam is not)."""
    if not isinstance(builder, CUDAOpBuilder) or not torch.cuda.is_available() or torch.version.hip:
        return None
    home = cpp_extension.CUDA_HOME
    if home is None:
        return f"CUDA's toolkit was not found; {TOOLKIT}"
    if shutil.which("nvcc", path=str(Path(home, "bin"))) is None:
        return f"CUDA_HOME {home} has no bin/nvcc; {TOOLKIT}"
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
    found = headers(output)
    if found is None and builder.name == "async_io" and "not being compatible" in output:
        return f"libaio was not found; {LIBAIO}"  # it links a program with libaio beforehand
    return found


def _resources(builder: Any, output: str) -> str | None:
    return resources(output)


_Look = Callable[[Any, str], str | None]
_LOOKS: tuple[_Look, ...] = (_cuda, _torch, _headers, _resources)
