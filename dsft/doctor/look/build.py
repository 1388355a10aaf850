"""Whether this host can compile what a run needs of DeepSpeed, and the locks of builds. Compiles ten lines
with the compiler and the options that torch would take; removes a lock that is left over, where it is asked
to."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsft.doctor.look.software import cuda_of_torch, package_file
from dsft.engine.op_turn import TORCHS, clear, look
from dsft.engine.op_words import TOOLKIT, meaning, own_words
from dsft.launch.ninja import has_ninja

TIMEOUT = 6.0  # seconds of a compiler; on a busy machine one of these takes 2
SWAPPING = ("pin_memory", "async_io")
"""Operations that are linked with libaio."""

_SOURCE = """#include <Python.h>
#include <cstdio>
#include <omp.h>
#include <vector>
{more}
template <typename T> concept Number = sizeof(T) > 0;
extern "C" int dsft_doctor(void) {{ std::vector<int> v(8);
  return omp_get_max_threads() + (int)v.size(){call}; }}
"""


def build(ops: Sequence[str], on_cpu: bool) -> dict[str, Any]:
    """root: the folder of compiled operations; lacking: those that would have to be compiled; fault: why they
    could not be; compiler: its name and version; locks: of torch's, one that is there."""
    root = extensions_root()
    lacking = [op for op in ops if not is_there(op, root, on_cpu)]
    facts: dict[str, Any] = {"root": str(root), "ops": list(ops), "lacking": lacking, "fault": None}
    facts["locks"] = [facts_of(lock) for lock in sorted(root.glob(f"*/{TORCHS}"))]
    if lacking:
        facts["compiler"], facts["fault"] = compiler(lacking, on_cpu)
    return facts


def extensions_root() -> Path:
    """As torch finds it (utils/cpp_extension.py, _get_build_directory)."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()
    cuda = cuda_of_torch()
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return cache / "torch_extensions" / f"{python}_{'cu' + cuda.replace('.', '') if cuda else 'cpu'}"


def is_there(op: str, root: Path, on_cpu: bool) -> bool:
    """As `dsft.engine.op.is_compiled`, without importing torch: installed with DeepSpeed, or compiled and
    newer than torch and DeepSpeed."""
    if is_installed(op, on_cpu):
        return True
    try:
        made = (root / op / f"{op}.so").stat().st_mtime
    except OSError:
        return False
    files = (package_file(package, "__init__.py") for package in ("torch", "deepspeed"))
    return all(file is None or made >= file.stat().st_mtime for file in files)


def is_installed(op: str, on_cpu: bool) -> bool:
    file = package_file("deepspeed", "git_version_info_installed.py")
    if file is None:
        return False
    values = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition("=")
        if name in ("installed_ops", "accelerator_name"):
            values[name] = ast.literal_eval(value)
    here = "cpu" if on_cpu else "cuda"
    return bool(values.get("installed_ops", {}).get(op)) and values.get("accelerator_name") == here


def facts_of(lock: Path) -> dict[str, Any]:
    """holders: processes of this host that build there; over: nobody does; age: seconds."""
    found = look(lock)
    if found is None:  # gone meanwhile
        return {"path": str(lock), "holders": [], "over": False, "age": 0.0}
    age = time.time() - found.changed
    return {"path": str(lock), "holders": found.holders, "over": found.is_over, "age": age}


def clear_locks(paths: Sequence[str]) -> dict[str, str]:
    """path -> removed, held, or why it could not be removed."""
    told = {}
    for path in paths:
        try:
            told[path] = "removed" if clear(Path(path).parent) else "held"
        except OSError as error:
            told[path] = error.strerror or str(error)
    return told


def compiler(ops: Sequence[str], on_cpu: bool) -> tuple[str, str | None]:
    """Its name, with the first line of its version; why it cannot compile these, None where it can."""
    name = os.environ.get("CXX", "c++")
    command = shlex.split(name)
    if not command or shutil.which(command[0]) is None:
        return (
            name,
            f"{name} is not on PATH; install one (Debian, Ubuntu: g++; Fedora, RHEL: gcc-c++), or set CXX",
        )
    if not has_ninja():
        return name, "ninja is missing, which starts the compiler; pip install ninja, with its folder on PATH"
    if not on_cpu and set(ops) & set(SWAPPING) and not has_nvcc():
        return name, f"CUDA's toolkit was not found; {TOOLKIT}"
    try:
        told = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
        title = (told.stdout.splitlines() or [name])[0]
        output = _compiled(command, bool(set(ops) & set(SWAPPING)))
    except subprocess.TimeoutExpired:
        return name, None  # slow: nothing is known
    except OSError as error:
        return name, f"{name} cannot be started ({error.strerror}); install one, or set CXX"
    return title, None if output is None else meaning(output) or own_words(output)


def _compiled(command: Sequence[str], with_aio: bool) -> str | None:
    """What the compiler said; None where it made a library."""
    source = _SOURCE.format(
        more="#include <libaio.h>" if with_aio else "", call=" + io_submit(0, 0, 0)" if with_aio else ""
    )
    include = [f"-I{path}" for path in {sysconfig.get_path("include"), sysconfig.get_path("platinclude")}]
    words = {key: shlex.split(os.environ.get(key, "")) for key in ("CFLAGS", "LDFLAGS")}
    with tempfile.TemporaryDirectory() as folder:
        file, made = Path(folder, "doctor.cpp"), Path(folder, "doctor.so")
        file.write_text(source, encoding="ascii")
        flags = [f"-std={standard()}", "-fPIC", "-shared", "-fopenmp", *include, *words["CFLAGS"]]
        links = [*words["LDFLAGS"], *(["-laio"] if with_aio else [])]
        told = subprocess.run(
            [*command, *flags, str(file), "-o", str(made), *links],
            capture_output=True, text=True, timeout=TIMEOUT, check=False, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        return None if told.returncode == 0 else told.stdout + told.stderr


def standard() -> str:
    """Of C++, that this torch compiles extensions with."""
    file = package_file("torch", "utils/cpp_extension.py")
    found = re.findall(r"-std=(c\+\+\d\d)", file.read_text(encoding="utf-8")) if file else []
    return max(found, default="c++17")


def has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which("nvcc") is not None or any(
        Path(place, "bin", "nvcc").is_file() for place in (home, "/usr/local/cuda") if place
    )
