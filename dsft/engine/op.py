"""A compiled operation of DeepSpeed: takes its builder, loads it into every process, compiled where need be.

A builder is an OpBuilder of DeepSpeed (ops/op_builder/builder.py). `ops` says which operations a run needs.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import Any, Protocol, TypeVar

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.cpp_extension import _get_build_directory

from dsft.engine.op_faults import missing_tool, why
from dsft.engine.op_turn import Say, turn
from dsft.errors import BuildError, StorageError

T = TypeVar("T")
LOG = "failed.log"
"""In the operation's folder: what the compiler and DeepSpeed said when it could not be built."""


class Ranks(Protocol):
    """Of `World`, what is needed here."""

    @property
    def local_rank(self) -> int: ...

    def gather(self, mine: T) -> list[T]: ...

    def each(self, work: Callable[[], T]) -> T: ...

    def hosts_first(self, work: Callable[[], object]) -> None: ...


def load_everywhere(builder: Any, ranks: Ranks, say: Say) -> None:
    """A collective: into every process, by one of each host first. `say` is told before and after a compile.

    Raises what `load_op` raises, on all ranks, where it fails on one.
    """
    is_here = ranks.each(lambda: is_compiled(builder))
    lacking = [host for host in ranks.gather(None if is_here or ranks.local_rank else gethostname()) if host]
    if lacking:
        say(f"building {builder.name} on {', '.join(lacking)}, about a minute, once per host")
    start = time.monotonic()
    ranks.hosts_first(lambda: load_op(builder, say))
    if lacking:
        say(f"built {builder.name} in {time.monotonic() - start:.0f} s")


def load_op(builder: Any, say: Say) -> None:
    """Into this process, when it is its turn, where it is not there yet; `say` is told whom it waits for.

    `builder.load` compiles under torch's lock, and keeps what it has loaded, so that DeepSpeed's own later
    call finds it there. Raises BuildError with the reason; StorageError where the folder cannot be written.
    """
    if builder.name in OpBuilder._loaded_ops:
        return
    if is_installed(builder):
        _load(builder, None)
        return
    folder = build_folder(builder.name)
    try:
        with turn(folder, say):
            cause = None if is_compiled(builder) else missing_tool()
            if cause is not None:  # said here, where torch would write a page of warnings first
                raise _cannot(builder, cause)
            _load(builder, folder)
    except OSError as error:
        raise _not_writable(folder, error) from None


def is_installed(builder: Any) -> bool:
    """Whether it came compiled with DeepSpeed's own package (DS_BUILD_OPS), so that no folder is needed."""
    here = get_accelerator()._name  # as OpBuilder.load asks, builder.py:489
    return bool(installed_ops.get(builder.name, False)) and accelerator_name == here


def is_compiled(builder: Any) -> bool:
    """Whether the library is there, newer than torch and DeepSpeed. This decides what is told; ninja decides
    what is compiled, by each source's flags and headers. Raises StorageError as `load_op` does."""
    if is_installed(builder):
        return True
    folder = build_folder(builder.name)
    try:
        made = (folder / f"{folder.name}.so").stat().st_mtime
    except OSError:
        return False
    installed = (Path(package.__file__ or "") for package in (torch, deepspeed))
    return made >= max(package.stat().st_mtime for package in installed)


def build_folder(name: str) -> Path:
    """Where torch compiles it; made where it is not there yet. Raises StorageError where that fails."""
    try:
        return Path(_get_build_directory(name, False))
    except OSError as error:
        raise _not_writable(Path(error.filename or name), error) from None


def _not_writable(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder} on {gethostname()} cannot be written ({error.strerror}), where DeepSpeed's "
        "operations are compiled; set TORCH_EXTENSIONS_DIR to a folder that can be."
    )


def _load(builder: Any, folder: Path | None) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), _in_english():
            builder.load()
    except Exception as error:  # of torch, of DeepSpeed, or an ImportError of what they have built
        output = f"{said.getvalue()}{error}\n"
        reason = why(builder, output)
        kept = _keep(output, folder) if folder else ""
        raise _cannot(builder, f"{reason}{kept}") from None


def _cannot(builder: Any, cause: str) -> BuildError:
    return BuildError(f"DeepSpeed's {builder.name} cannot be built on {gethostname()}: {cause}.")


@contextlib.contextmanager
def _in_english() -> Iterator[None]:
    """The compiler's words, which `why` reads."""
    before = os.environ.get("LC_ALL")
    os.environ["LC_ALL"] = "C"
    try:
        yield
    finally:
        os.environ.pop("LC_ALL")
        if before is not None:
            os.environ["LC_ALL"] = before


def _keep(output: str, folder: Path) -> str:
    try:
        (folder / LOG).write_text(output, encoding="utf-8")
    except OSError:  # a full disk
        return ""
    return f" (all that was said: {folder / LOG})"
