"""Operations that are built, or not: with a small one in the place of DeepSpeed's, which take a minute each.

The causes are real ones: no compiler, no ninja, no header, no CUDA toolkit, a compiler that is
killed, a folder that cannot be written, locks of processes that are dead or at work."""

import importlib.metadata
import os
import re
import shutil
import sys
from itertools import count
from pathlib import Path
from subprocess import PIPE, Popen

import deepspeed
import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from dsft.engine.ops import LOG, load_everywhere, load_op
from dsft.engine.toolchain import build_folder, compiler_version, is_compiled, lacking_tool
from dsft.errors import BuildError, StorageError
from tests.make import ALONE

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


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


@pytest.fixture
def lines() -> list[str]:
    return []


def refusal(builder: OpBuilder, lines: list[str], kind: type[Exception] = BuildError) -> str:
    with pytest.raises(kind) as raised:
        load_op(builder, lines.append)
    return str(raised.value)


def path_with(monkeypatch: pytest.MonkeyPatch, folder: Path, *programs: str) -> None:
    """A PATH of these programs and a shell alone."""
    folder.mkdir()
    for program in (*programs, "sh"):
        found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
        assert found, program
        (folder / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))


def test_op_is_built_once_and_logged(
    extensions: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = Small(tmp_path)
    load_everywhere(builder, ALONE, lines.append)
    assert [line.split()[:2] for line in lines] == [["building", builder.name], ["built", builder.name]]
    assert (build_folder() / builder.name / f"{builder.name}.so").exists()
    assert build_folder().parent == extensions == Path(os.environ["TORCH_EXTENSIONS_DIR"])
    assert is_compiled(builder.name, "cpu")
    OpBuilder._loaded_ops.pop(builder.name)
    lines.clear()
    monkeypatch.setattr("dsft.engine.ops.lacking_tool", lambda *_: pytest.fail("tries the compiler again"))
    load_everywhere(builder, ALONE, lines.append)
    assert lines == [], "what is there is not announced as being built"
    assert builder.name in OpBuilder._loaded_ops, "DeepSpeed finds it loaded, and takes no lock"


def test_build_folder_depends_on_torch_and_deepspeed(
    extensions: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = f"torch{importlib.metadata.version('torch')}-deepspeed{deepspeed.__version__}"
    assert build_folder().parent == extensions and f"{version}-" in build_folder().name
    folder = build_folder() / "op"
    folder.mkdir(parents=True)
    (folder / "op.so").touch()
    assert is_compiled("op", "cpu")
    with monkeypatch.context() as patched:
        patched.setattr("dsft.engine.toolchain.version_of", lambda name: "9.9")
        assert not is_compiled("op", "cpu")
    with monkeypatch.context() as patched:  # of the same versions, in another environment
        patched.setattr("dsft.engine.toolchain.package_file", lambda *_: tmp_path / "deepspeed")
        assert build_folder().parent == extensions and not (build_folder() / "op").exists()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build_folder().parent == tmp_path / "torch_extensions"


def without_locks(*_: object, **__: object) -> None:
    raise NotImplementedError("FileSystem does not appear to support flock")


NO_WORDS = '="g++ \'x" is not a list of shell words (No closing quotation); correct its quotes'
CAUSES: dict[str, tuple[dict[str, str], tuple[str, ...] | None, type[Exception], tuple[str, ...]]] = {
    "no compiler": ({}, ("ninja",), BuildError, ("'c++' is not on PATH (CXX is not set); install one",)),
    "no compiler of CXX": ({"CXX": "g++-99"}, None, BuildError, ("'g++-99' is not on PATH (CXX names it)",)),
    "CXX": ({"CXX": "g++ 'x"}, None, BuildError, (f"CXX{NO_WORDS}",)),
    "CFLAGS": ({"CFLAGS": "g++ 'x"}, None, BuildError, (f"CFLAGS{NO_WORDS}",)),
    "LDFLAGS": ({"LDFLAGS": "g++ 'x"}, None, BuildError, (f"LDFLAGS{NO_WORDS}",)),
    "no ninja": ({}, ("c++",), BuildError, ("ninja is missing",)),
    "no file locks": (
        {}, None, StorageError, ("does not appear to support flock", "set TORCH_EXTENSIONS_DIR"),
    ),
}  # fmt: skip
"""Cause: variables, the programs on PATH (None: all), the error, and words of its message."""


@pytest.mark.parametrize("cause", CAUSES)
def test_cause_of_a_failed_build_is_named(
    extensions: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    variables, programs, kind, words = CAUSES[cause]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if programs is not None:
        path_with(monkeypatch, tmp_path / "bin", *programs)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # ninja is beside the real one
    if cause == "no file locks":
        monkeypatch.setattr("dsft.engine.ops.FileLock.acquire", without_locks)
    message = refusal(Small(tmp_path), lines, kind)
    assert [part for part in words if part not in message] == [], message
    assert cause != "no compiler of CXX" or compiler_version() == "g++-99"
    assert compiler_version(), "it is part of the folder's name whatever is wrong"


def test_missing_header_is_in_the_message(extensions: Path, tmp_path: Path, lines: list[str]) -> None:
    message = refusal(Small(tmp_path, "#include <no_such_libaio.h>\n"), lines)
    assert "no_such_libaio.h: No such file or directory" in message and "libaio: libaio-dev" in message


def test_missing_cuda_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = lacking_tool(["async_io"], with_cuda=True)
    assert found is not None and found[0] == "CUDA's compiler nvcc was not found"
    assert lacking_tool(["cpu_adam"], with_cuda=True) is None, "it is compiled without"


def test_last_lines_of_the_compiler_are_shown(extensions: Path, tmp_path: Path, lines: list[str]) -> None:
    pragmas = "".join(f'#pragma message "line {number}"\n' for number in range(30))
    message = refusal(Small(tmp_path, f"{pragmas}frobnicate x;\n"), lines)
    assert "'frobnicate' does not name a type" in message.replace("\u2018", "'").replace("\u2019", "'")
    assert len(message.splitlines()) == 22 and "line 0" not in message
    assert message.endswith("or set CXX to another compiler.")
    log = Path(re.search(r"All of its output is in (\S+)\. ", message).group(1))  # type: ignore[union-attr]
    assert log.parent.parent == build_folder() and log.name == LOG and "line 0" in log.read_text()


def test_killed_compiler(
    extensions: Path, tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nsh -c 'kill -9 $$'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert "Killed" in refusal(Small(tmp_path), lines)


def test_build_folder_not_writable(tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(file / "extensions"))
    message = refusal(Small(tmp_path), lines, StorageError)
    assert "Not a directory" in message and "set TORCH_EXTENSIONS_DIR to a folder that can be" in message


def test_folder_that_cannot_be_examined_is_an_error(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / ("x" * 300)))
    with pytest.raises(StorageError, match="File name too long"):
        load_everywhere(Small(tmp_path), ALONE, lines.append)


def test_stale_build_lock_is_removed(extensions: Path, tmp_path: Path, lines: list[str]) -> None:
    builder = Small(tmp_path)
    lock = build_folder() / builder.name / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    foreign = extensions / builder.name / "lock"  # of a program that uses torch's loader by itself
    foreign.parent.mkdir()
    foreign.touch()
    load_op(builder, lines.append)
    assert lines == [f"removed {lock}, which a build that was killed left behind"]
    assert builder.name in OpBuilder._loaded_ops and not lock.exists() and foreign.exists()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(extensions)


HOLDS = """
import sys, time
from pathlib import Path
from filelock import FileLock
with FileLock(Path(sys.argv[1], ".lock")):
    Path(sys.argv[1], ".lock").write_text("process 7 on node2")
    print(1, flush=True)
    time.sleep(60)
"""


def test_building_process_is_waited_for_until_its_lock_ends(
    extensions: Path, tmp_path: Path, lines: list[str]
) -> None:
    build_folder().mkdir(parents=True)
    builder = Small(tmp_path)
    with Popen([sys.executable, "-c", HOLDS, str(build_folder())], stdout=PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline()

        def say(text: str) -> None:
            lines.append(text)
            assert builder.name not in OpBuilder._loaded_ops
            other.kill()

        load_op(builder, say)
    assert lines == [f"waiting for process 7 on node2, which builds DeepSpeed's ops in {build_folder()}"]
    assert builder.name in OpBuilder._loaded_ops


def test_prebuilt_ops_of_the_deepspeed_package(
    extensions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DS_BUILD_OPS writes them down when it is installed."""
    file = tmp_path / "git_version_info_installed.py"
    file.write_text(
        "version='0.19.8'\ninstalled_ops={'cpu_adam': True, 'x': False}\naccelerator_name='cpu'\n"
    )
    monkeypatch.setattr("dsft.engine.toolchain.package_file", lambda package, name: file)
    assert is_compiled("cpu_adam", "cpu") and not is_compiled("cpu_adam", "cuda")
    assert not is_compiled("x", "cpu") and not is_compiled("async_io", "cpu")
