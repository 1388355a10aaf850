"""Find DeepSpeed's compiled ops without importing torch: which a run needs, the folder of compiled ones,
whether they are there, and what this host lacks to compile them. Used by a run and by `dsft doctor`."""

from __future__ import annotations

import ast
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
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
LAST = 20  # lines of a compiler's output that are shown


def needed_ops(spec: Spec) -> list[str]:
    """Return the ops of a run on any accelerator: cpu_adam where AdamW steps in the host's memory
    (ops/adam/cpu_adam.py:93 CPUAdamBuilder), `SWAPPING` for anything on NVMe. AdamW on a GPU is torch's own
    fused kernel."""
    parallel = spec.parallel
    found = []
    if spec.optim.facts.on_host and parallel.offload_optimizer.device != "none":
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
    """Return which program this host lacks to compile these ops, and the way out; None if it has all. What
    else can be missing (headers, libaio) shows in the compiler's output."""
    for name in ("CXX", "CFLAGS", "LDFLAGS"):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            return f"{name}={os.environ[name]!r} is not a list of shell words ({error})", "correct its quotes"
    program = (shlex.split(os.environ.get("CXX", "c++")) or [""])[0]
    if shutil.which(program) is None:
        named = "CXX names it" if os.environ.get("CXX") else "CXX is not set"
        return (f"the compiler {program!r} is not on PATH ({named})",
                "install one (Debian, Ubuntu: g++; Fedora, RHEL: gcc-c++), or set CXX to one")  # fmt: skip
    if not has_ninja():
        return "ninja is missing, which starts the compiler", "pip install ninja, with its folder on PATH"
    if with_cuda and not set(SWAPPING).isdisjoint(ops) and not _has_nvcc():
        return ("CUDA's compiler nvcc was not found",
                "install CUDA's toolkit, and set CUDA_HOME to the folder that has bin/nvcc")  # fmt: skip
    return None


def compiler_version() -> str:
    """Return the first line of `$CXX --version`, or the compiler's name."""
    name = os.environ.get("CXX", "c++")
    try:
        done = subprocess.run(
            [*shlex.split(name), "--version"], capture_output=True, text=True, timeout=6, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):  # ValueError: a quote without its other one
        return name
    return (done.stdout.splitlines() or [name])[0]


def last_lines(output: str) -> str:
    return "\n".join([line.rstrip() for line in output.splitlines() if line.strip()][-LAST:])


def _has_nvcc() -> bool:
    """Whether nvcc is found, as torch looks for it (utils/cpp_extension.py, _find_cuda_home)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home, "bin", "nvcc").is_file()
    return shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").is_file()
