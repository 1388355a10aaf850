"""Load the DeepSpeed ops that a run needs into every process, before the model is built. Where one is not
compiled yet, one process of each host compiles it and the others wait.

A builder is an OpBuilder of DeepSpeed (ops/op_builder/builder.py). `toolchain` knows which ops a run needs,
where they are compiled, and what a host lacks to compile them.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder
from deepspeed.ops.op_builder.builder import OpBuilder
from filelock import FileLock, Timeout

from dsft.dist.world import World
from dsft.engine.toolchain import (
    build_folder,
    is_compiled,
    is_installed,
    lacking_tool,
    last_lines,
    needed_ops,
)
from dsft.errors import BuildError, StorageError
from dsft.spec.schema import Spec
from dsft.system.lock import holder
from dsft.system.run_folder import LOCK

Log = Callable[[str], None]

EXTENSIONS = "TORCH_EXTENSIONS_DIR"
LOG = "failed.log"
"""File in the op's folder with the output of the compiler and of DeepSpeed after a failed build."""
PATIENCE = 1.0
"""Seconds to wait for the lock before reporting it: ranks of one host load an op one after another."""

_BUILDERS = {"cpu_adam": CPUAdamBuilder, "pin_memory": PinMemoryBuilder, "async_io": AsyncIOBuilder}
_WAY_OUT = "or set parallel.allow_torch_adam: true, and torch's AdamW steps on the CPU instead."


def silent(text: str) -> None:
    """Print nothing."""


def prepare_ops(spec: Spec, world: World, log: Log) -> bool | None:
    """Load the ops that the spec needs on all ranks. Return whether AdamW on the CPU is DeepSpeed's, None
    where the run has no such AdamW. A collective.

    Raises BuildError or StorageError where a host cannot load an op. If that op is cpu_adam, for states in
    memory, and parallel.allow_torch_adam is set, all ranks use torch's AdamW instead, and `log` gets the
    reason.
    """
    cpu_adam = None
    for op in needed_ops(spec):
        try:
            load_everywhere(_BUILDERS[op](), world, log)
        except (BuildError, StorageError) as error:
            if op != "cpu_adam" or spec.parallel.offload_optimizer.device == "nvme":
                raise
            reason = str(error).rstrip(".")
            if not spec.parallel.allow_torch_adam:
                raise type(error)(f"{reason}; {_WAY_OUT}") from None
            log(f"warning: {reason}; by parallel.allow_torch_adam torch's AdamW steps on the CPU instead")
            cpu_adam = False
        else:
            cpu_adam = True if op == "cpu_adam" else cpu_adam
    return cpu_adam


def load_everywhere(builder: Any, world: World, log: Log) -> None:
    """Load the op on all ranks, on one of each host first. A collective. `log` gets a line before and after a
    compile. Raises on all ranks what `load_op` raises on one."""
    is_here = is_compiled(builder.name, _accelerator())
    lacking = [host for host in world.gather(None if is_here or world.local_rank else gethostname()) if host]
    if lacking:
        log(f"building {builder.name} on {', '.join(lacking)}, about a minute, once per host")
    start = time.monotonic()
    world.hosts_first(lambda: load_op(builder, log))
    if lacking:
        log(f"built {builder.name} in {time.monotonic() - start:.0f} s")


def load_op(builder: Any, log: Log) -> Any:
    """Return the op's module; compile it first where necessary. DeepSpeed's own later call finds it loaded.
    `log` gets a line while another process compiles.

    Raises BuildError with what is missing or the compiler's last lines; StorageError where the folder cannot
    be written.
    """
    op = builder.name
    if op in OpBuilder._loaded_ops:
        return OpBuilder._loaded_ops[op]
    folder = build_folder()
    try:
        if is_installed(op, _accelerator()):
            return _loaded(builder, None)
        folder.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder, log):
            if not (folder / op / f"{op}.so").is_file():
                lacking = lacking_tool([op], torch.cuda.is_available())
                if lacking is not None:  # torch would print a page of warnings first
                    raise _cannot(builder, f": {lacking[0]}; {lacking[1]}.")
            return _loaded(builder, folder)
    except (OSError, NotImplementedError) as error:  # the latter of filelock, on a disk that cannot lock
        file, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        raise StorageError(
            f"{file or folder} on {gethostname()} cannot be written ({reason or error}), where "
            f"DeepSpeed's ops are compiled; set {EXTENSIONS} to a folder that can be."
        ) from None


def _accelerator() -> str:
    return str(get_accelerator()._name)


@contextlib.contextmanager
def _alone_in(folder: Path, log: Log) -> Iterator[None]:
    """Lock dsft's folder and make torch build there. The kernel releases the lock when its process dies.
    torch's own lock, the mere existence of a file (torch/utils/file_baton.py), outlives a killed build, and
    torch waits for it without end: here no other process can own it, so it is removed."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=PATIENCE)
    except Timeout:
        log(f"waiting for {holder(folder)}, which builds DeepSpeed's ops in {folder}")
        lock.acquire()
    before = os.environ.get(EXTENSIONS)
    os.environ[EXTENSIONS] = str(folder)
    try:
        (folder / LOCK).write_text(f"process {os.getpid()} on {gethostname()}")
        for left in folder.glob("*/lock"):
            left.unlink()
            log(f"removed {left}, which a build that was killed left behind")
        yield
    finally:
        os.environ.pop(EXTENSIONS)
        if before is not None:
            os.environ[EXTENSIONS] = before
        lock.release()


def _loaded(builder: Any, folder: Path | None) -> Any:
    output_stream = io.StringIO()
    try:
        with contextlib.redirect_stdout(output_stream):
            return builder.load()
    except OSError:  # its folder cannot be written
        raise
    except Exception as error:  # from torch, from DeepSpeed, or an ImportError of the built module
        output = f"{output_stream.getvalue()}{error}\n"
        where = ""
        with contextlib.suppress(OSError):  # a full disk
            if folder is not None:
                log = folder / builder.name / LOG
                log.write_text(output, encoding="utf-8")
                where = f"All of its output is in {log}. "
        way_out = "Correct that (Python.h: python3-dev; libaio: libaio-dev), or set CXX to another compiler."
        words = f".\n{last_lines(output)}\n{where}{way_out}"
        raise _cannot(builder, words) from None


def _cannot(builder: Any, words: str) -> BuildError:
    return BuildError(f"DeepSpeed's {builder.name} cannot be built on {gethostname()}{words}")
