"""Operations that are built, or not: with a small one in the place of DeepSpeed's, which take a minute each.

The causes are real ones: no compiler, no ninja, no header, no CUDA toolkit, a compiler that is killed, a
folder that cannot be written, locks of processes that are dead or at work."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from deepspeed.ops.op_builder.async_io import AsyncIOBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils import cpp_extension

from dsft.engine import op_turn
from dsft.engine.op import LOG, load_everywhere, load_op
from dsft.engine.op_turn import turn
from dsft.errors import BuildError, StorageError

ROOT = Path(__file__).parents[3]
MODULE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "NAME", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_NAME() { return PyModule_Create(&definition); }
"""
NUMBERS = count()


class Small(OpBuilder):
    """An operation that does nothing, without torch's headers: it compiles in half a second."""

    def __init__(self, folder: Path, before: str = "") -> None:
        name = f"small_{os.getpid()}_{next(NUMBERS)}"  # torch and DeepSpeed remember what they have loaded
        super().__init__(name)
        self.file = folder / f"{name}.cpp"
        self.file.write_text(before + MODULE.replace("NAME", name))

    def absolute_name(self) -> str:
        return self.name

    def sources(self) -> list[str]:
        return [str(self.file)]


class OnGpu(AsyncIOBuilder):
    """DeepSpeed's own, on a host that has libaio and a GPU."""

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = False) -> Any:
        return OpBuilder.load(self)  # without pin_memory, which it compiles first


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture
def told() -> list[str]:
    return []


def refusal(builder: OpBuilder, told: list[str], kind: type[Exception] = BuildError) -> str:
    with pytest.raises(kind) as raised:
        load_op(builder, told.append)
    return str(raised.value)


def path_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str) -> None:
    """A PATH of these programs and a shell alone."""
    folder.mkdir()
    for program in (*programs, "sh"):
        found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
        assert found, program
        (folder / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))


class Alone:
    """A world of one rank."""

    local_rank = 0

    def gather(self, mine: Any) -> list[Any]:
        return [mine]

    def each(self, work: Callable[[], Any]) -> Any:
        return work()

    def hosts_first(self, work: Callable[[], object]) -> None:
        work()


def test_it_is_built_once_and_said(extensions: Path, tmp_path: Path, told: list[str]) -> None:
    builder = Small(tmp_path)
    load_everywhere(builder, Alone(), told.append)
    assert [line.split()[:2] for line in told] == [["building", builder.name], ["built", builder.name]]
    assert (extensions / builder.name / f"{builder.name}.so").exists()
    OpBuilder._loaded_ops.pop(builder.name)
    told.clear()
    load_everywhere(builder, Alone(), told.append)
    assert told == [], "what is there is not announced as being built"
    assert builder.name in OpBuilder._loaded_ops, "DeepSpeed finds it loaded, and takes no lock"


def test_no_compiler(
    extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path_with(monkeypatch, tmp_path / "bin", "ninja")
    message = refusal(Small(tmp_path), told)
    assert "the compiler is missing (it is called c++, which is not on PATH); install one" in message


def test_a_compiler_that_cxx_names_and_that_is_not_there(
    extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    assert "CXX names g++-99, which is not on PATH" in refusal(Small(tmp_path), told)


def test_no_ninja(extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path_with(monkeypatch, tmp_path / "bin", "c++")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # beside the real one ninja stands
    assert "ninja is missing" in refusal(Small(tmp_path), told)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("libaio_of_no_host.h", "the header libaio_of_no_host.h, of what is not known here, was not found"),
        ("cuda_of_no_host.h", "the header cuda_of_no_host.h, of CUDA, was not found; install CUDA's toolkit"),
        ("torch/of_no_host.h", "the header torch/of_no_host.h, of torch, was not found; install torch again"),
    ],
)
def test_a_header_that_is_not_there(
    extensions: Path, tmp_path: Path, told: list[str], header: str, words: str
) -> None:
    builder = Small(tmp_path, f"#include <{header}>\n")
    message = refusal(builder, told)
    assert words in message
    log = Path(re.search(r"all that was said: (\S+)\)", message).group(1))  # type: ignore[union-attr]
    assert log == extensions / builder.name / LOG and f"fatal error: {header}" in log.read_text()


def test_a_library_that_is_not_there(
    extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Small(tmp_path)
    monkeypatch.setattr(builder, "extra_ldflags", lambda: ["-lcudart_of_no_host"])
    assert "the library cudart_of_no_host, of CUDA, was not found" in refusal(builder, told)


def test_a_compiler_too_old_for_torch(
    extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "#error C++17 or later compatible compiler is required to use PyTorch."  # torch/all.h
    builder = Small(tmp_path, f"#if __cplusplus < 201703L\n{said}\n#endif\n")
    monkeypatch.setattr(builder, "cxx_args", lambda: ["-std=c++11"])
    assert "is too old for torch" in refusal(builder, told)


def test_words_of_the_compiler_that_fit_no_cause(extensions: Path, tmp_path: Path, told: list[str]) -> None:
    assert "'frobnicate' does not name a type" in refusal(Small(tmp_path, "frobnicate x;\n"), told)


def test_a_compiler_that_is_killed(
    extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nsh -c 'kill -9 $$'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "the compiler was killed, as by a full memory; set MAX_JOBS=1" in refusal(Small(tmp_path), told)


def test_no_libaio(extensions: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    builder = OnGpu()
    monkeypatch.setattr(
        builder, "is_compatible", lambda verbose: builder.has_function("io_of_no_host", ("aio_of_no_host",))
    )
    assert "libaio was not found; install libaio-dev (Debian" in refusal(builder, told)


def test_no_cuda_toolkit(
    extensions: Path, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    assert "CUDA's toolkit was not found; install" in refusal(OnGpu(), told)
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    assert f"CUDA_HOME {tmp_path} has no bin/nvcc; install" in refusal(OnGpu(), told)


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(file / "extensions"))
    message = refusal(Small(tmp_path), told, StorageError)
    assert "Not a directory" in message and "set TORCH_EXTENSIONS_DIR to a folder that can be" in message


@pytest.fixture
def start() -> Iterator[Callable[[str, Path], Popen[str]]]:
    """A process that runs the code with the path, up to its first line; killed at the end."""
    started: list[Popen[str]] = []

    def started_with(code: str, path: Path) -> Popen[str]:
        process = Popen([sys.executable, "-c", code, str(path)], stdout=PIPE, text=True, cwd=ROOT)
        started.append(process)
        assert process.stdout and process.stdout.readline()
        return process

    yield started_with
    for process in started:
        process.kill()
        process.communicate()


TORCHS = (
    "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(1, flush=True); time.sleep(60)"
)
OURS = """
import sys, time
from pathlib import Path
from dsft.engine.op_turn import turn
with turn(Path(sys.argv[1]), print):
    print(1, flush=True)
    time.sleep(60)
"""
Start = Callable[[str, Path], Popen[str]]


def end(process: Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_lock_that_a_killed_build_left_is_removed(
    extensions: Path, tmp_path: Path, told: list[str], start: Start
) -> None:
    builder = Small(tmp_path)
    lock = extensions / builder.name / "lock"
    lock.parent.mkdir(parents=True)
    end(start(TORCHS, lock))
    load_op(builder, told.append)
    assert told[0] == f"removed {lock}, which a build that was killed left behind"
    assert builder.name in OpBuilder._loaded_ops and not lock.exists()


def test_a_living_builder_is_waited_for(tmp_path: Path, told: list[str], start: Start) -> None:
    lock = tmp_path / "lock"
    living = start(TORCHS, lock)

    def say(text: str) -> None:
        told.append(text)
        assert lock.exists()
        end(living)
        lock.unlink()  # as torch ends

    with turn(tmp_path, say):
        assert told == [f"waiting for process {living.pid}, which builds {tmp_path.name} in {tmp_path}"]


def test_a_ninja_that_outlives_its_python_is_waited_for(tmp_path: Path, told: list[str]) -> None:
    """It would write the same files at the same time."""
    lock = tmp_path / "lock"
    lock.touch()
    (tmp_path / "build.ninja").write_text("rule wait\n  command = sleep 60\nbuild it: wait\n")
    ninja = Popen(["ninja"], cwd=tmp_path, stdout=PIPE, text=True)

    def say(text: str) -> None:
        told.append(text)
        end(ninja)

    while not op_turn.builders(lock):
        time.sleep(0.02)
    with turn(tmp_path, say):
        assert told[0] == f"waiting for process {ninja.pid}, which builds {tmp_path.name} in {tmp_path}"
        assert told[1].startswith(f"removed {lock}")
    ninja.communicate()


def test_a_lock_whose_holder_cannot_be_seen_is_waited_for(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that several hosts mount: it counts as left behind once nothing of the build changes."""
    monkeypatch.setattr(op_turn, "file_system", lambda folder: "nfs4")
    lock = tmp_path / "lock"
    lock.touch()

    def say(text: str) -> None:
        told.append(text)
        long_ago = time.time() - op_turn.QUIET - 60
        os.utime(lock, (long_ago, long_ago))

    with turn(tmp_path, say):
        assert "a process that cannot be seen from here" in told[0] and f"remove {lock} if" in told[0]
        assert told[1].startswith(f"removed {lock}")


def test_two_jobs_at_once_and_the_first_is_killed(tmp_path: Path, told: list[str], start: Start) -> None:
    other = start(OURS, tmp_path)

    def say(text: str) -> None:
        told.append(text)
        end(other)

    with turn(tmp_path, say):
        assert len(told) == 1 and f"waiting for process {other.pid} on " in told[0]
