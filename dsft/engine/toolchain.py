"""Find DeepSpeed's compiled ops without importing torch: which a run needs, the folder of compiled ones,
whether they are there, and what this host lacks to compile them. Used by a run and by `dsft doctor`."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

from dsft.rank.process_setup import has_ninja
from dsft.system.software import version_of

if TYPE_CHECKING:
    from dsft.spec.schema import Spec

ON_CPU = "deepspeed_shm_comm"
"""The op of every run on CPUs: ranks of one host reduce in shared memory (comm/torch.py:47 build_shm_op)."""
SWAPPING = ("pin_memory", "async_io")
"""Ops that are linked with libaio, in the order in which they are loaded: async_io loads the other."""
TIMEOUT = 6.0  # seconds of a trial compile; on a busy machine one takes 2
LAST = 20  # lines of a compiler's output that are shown

_SOURCE = """#include <Python.h>
#include <omp.h>
#include <vector>
extern "C" int dsft_trial(void) { std::vector<int> v(8); return omp_get_max_threads() + (int)v.size(); }
"""
_AIO = """#include <libaio.h>
extern "C" int dsft_trial(void) { return io_submit(0, 0, 0); }
"""


def needed_ops(spec: Spec) -> list[str]:
    """Return the ops of a run on any accelerator: cpu_adam where AdamW steps in the host's memory
    (ops/adam/cpu_adam.py:93 CPUAdamBuilder), `SWAPPING` for anything on NVMe. AdamW on a GPU is torch's own
    fused kernel."""
    parallel = spec.parallel
    found = []
    if spec.optim.name == "adamw" and parallel.offload_optimizer.device != "none":
        found.append("cpu_adam")
    if "nvme" in (parallel.offload_optimizer.device, parallel.offload_parameters.device):
        found += SWAPPING
    return found


def build_folder() -> Path:
    """Return dsft's own folder of ops for this Python, torch and DeepSpeed, in TORCH_EXTENSIONS_DIR or where
    torch puts extensions by default. No other program builds in it, nor does another environment, whose
    DeepSpeed has its sources elsewhere: ninja would compile everything again in each start of either."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cache / "torch_extensions")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    sources = crc32(str(package_file("deepspeed", "__init__.py")).encode())
    return root / f"dsft-{python}-torch{version_of('torch')}-deepspeed{version_of('deepspeed')}-{sources:08x}"


def is_compiled(op: str, accelerator: str) -> bool:
    """Whether the op is there, so that nothing has to be compiled. accelerator: cpu or cuda, as DeepSpeed
    calls it."""
    if is_installed(op, accelerator):
        return True
    with suppress(OSError):  # a folder above it may not be entered: the compile reports that
        return (build_folder() / op / f"{op}.so").is_file()
    return False


def is_installed(op: str, accelerator: str) -> bool:
    """Whether the op came compiled with DeepSpeed's package (DS_BUILD_OPS), for this accelerator."""
    file = package_file("deepspeed", "git_version_info_installed.py")
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    values = {name: ast.literal_eval(value) for name, _, value in (line.partition("=") for line in lines)
              if name in ("installed_ops", "accelerator_name")}  # fmt: skip
    return bool(values.get("installed_ops", {}).get(op)) and values.get("accelerator_name") == accelerator


def package_file(package: str, name: str) -> Path | None:
    """Return a file of an installed package without importing it; None where it is not there."""
    spec = importlib.util.find_spec(package)
    file = Path(spec.origin).parent / name if spec and spec.origin else None
    return file if file and file.is_file() else None


def lacking_tool(ops: Iterable[str], with_cuda: bool) -> tuple[str, str] | None:
    """Return what this host lacks to compile these ops, and the way out; None where ten lines compile."""
    if (lacking := _lacking_compiler()) is not None:
        return lacking
    compiler = _compiler()
    if not has_ninja():
        return "ninja is missing, which starts the compiler", "pip install ninja, with its folder on PATH"
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not any(Path(folder, "Python.h").is_file() for folder in _includes()):
        return (f"Python's headers are missing (no Python.h in {sysconfig.get_path('include')})",
                f"install {python}-dev (Debian, Ubuntu) or {python}-devel (Fedora, RHEL)")  # fmt: skip
    swaps = not set(SWAPPING).isdisjoint(ops)
    if swaps and with_cuda and not _has_nvcc():
        return ("CUDA's compiler nvcc was not found",
                "install CUDA's toolkit, and set CUDA_HOME to the folder that has bin/nvcc")  # fmt: skip
    if (output := _trial(compiler, _SOURCE)) is not None:
        return (f"{shlex.join(compiler)} cannot compile ten lines with OpenMP and -std={standard()}:\n"
                f"{last_lines(output)}\n", "correct that, or set CXX to another compiler")  # fmt: skip
    if swaps and _trial(compiler, _AIO, "-laio") is not None:
        return "libaio was not found", (
            "install libaio-dev (Debian, Ubuntu) or libaio-devel (RHEL), or name its folders in CFLAGS and "
            "LDFLAGS"
        )
    return None


def compiler_version() -> str:
    """Return the first line of `$CXX --version`, or the compiler's name."""
    name = os.environ.get("CXX", "c++")
    try:
        done = subprocess.run(
            [*shlex.split(name), "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):  # ValueError: a quote without its other one
        return name
    return (done.stdout.splitlines() or [name])[0]


def last_lines(output: str) -> str:
    return "\n".join([line.rstrip() for line in output.splitlines() if line.strip()][-LAST:])


def standard() -> str:
    """Return the C++ standard that this torch compiles extensions with."""
    file = package_file("torch", "utils/cpp_extension.py")
    found = re.findall(r"-std=(c\+\+\d\d)", file.read_text(encoding="utf-8")) if file else []
    return max(found, default="c++17")


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "c++")) or [""]


def _lacking_compiler() -> tuple[str, str] | None:
    for name in ("CXX", "CFLAGS", "LDFLAGS"):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            return f"{name}={os.environ[name]!r} is not a list of shell words ({error})", "correct its quotes"
    program = _compiler()[0]
    if shutil.which(program) is None:
        named = "CXX names it" if os.environ.get("CXX") else "CXX is not set"
        return (f"the compiler {program!r} is not on PATH ({named})",
                "install one (Debian, Ubuntu: g++; Fedora, RHEL: gcc-c++), or set CXX to one")  # fmt: skip
    return None


def _includes() -> set[str]:
    return {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}


def _trial(compiler: Sequence[str], source: str, *libraries: str) -> str | None:
    """Compile `source` as a trial. Return the compiler's output; None where it built a library or ran into
    the timeout."""
    flags = [f"-std={standard()}", "-fPIC", "-shared", "-fopenmp", *(f"-I{path}" for path in _includes())]
    flags += shlex.split(os.environ.get("CFLAGS", ""))
    links = [*shlex.split(os.environ.get("LDFLAGS", "")), *libraries]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trial.cpp")
        file.write_text(source, encoding="ascii")
        words = [*compiler, *flags, str(file), "-o", str(Path(folder, "trial.so")), *links]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            return None
        except OSError as error:
            return f"{compiler[0]}: {error.strerror}"
    return done.stdout + done.stderr if done.returncode else None


def _has_nvcc() -> bool:
    """Whether nvcc is found, as torch looks for it (utils/cpp_extension.py, _find_cuda_home)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home, "bin", "nvcc").is_file()
    return shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").is_file()
