"""Forks ranks from a process that has imported torch, DeepSpeed and transformers, which is most of what a
launch costs. All processes of the tests connect to the socket LISTENER (a file descriptor) and send launches
as JSON; get {"pid": …} at a launch's start and {"code": …} at its end. Ends when the process TESTS has ended.

    python tests/forked.py LISTENER TESTS
    {"script", "args", "ranks", "supervised", "port", "environ", "cwd", "stdout", "stderr"}

Over the stand-in GPU (tests/standin/gpu.py) it is a second server, which asks CUDA nothing.

As under torchrun a rank that fails ends the others, and the exit code is then 1; unless `supervised` is
false: then the others go on. With 0 ranks the script runs alone, as `python SCRIPT` does, and the exit code
is its own.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import psutil

ROOT = Path(__file__).resolve().parent.parent
SHARED = (
    "dsft.run",
    "dsft.train",
    "deepspeed.module_inject.auto_ep_layer",  # by DeepSpeed's engine
    "numpy.ma",
    "torch.utils.cpp_extension",  # to load a compiled operation
    "transformers.convert_slow_tokenizer",
    "transformers.tokenization_utils_tokenizers",
    "transformers.models.llama.modeling_llama",
)
"""What every rank imports, or many."""

LONGEST = 1 << 18  # bytes of a message
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL


def serve(listener: socket.socket, tests: int) -> None:
    gc.disable()
    with unasked():
        for name in SHARED:
            importlib.import_module(name)
        from dsft.model.quantize import load_bitsandbytes

        load_bitsandbytes()  # before peft, as a rank does; it asks torch for a GPU
        importlib.import_module("peft")
        make_once()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    gc.enable()
    gc.collect()
    gc.freeze()  # a quarter of the ranks' time went into looking for garbage among what was imported
    listener.settimeout(1.0)
    while psutil.pid_exists(tests):
        with suppress(TimeoutError), listener.accept()[0] as connection:
            child(lambda: answer(connection))  # noqa: B023  called at once


@contextmanager
def unasked() -> Iterator[None]:
    """Let what is imported within know one GPU of the stand-in without asking CUDA, which torch refuses to
    the forks of a process that has."""
    if "STANDIN_MODE" not in os.environ:
        yield
        return
    import torch

    with (
        mock.patch.object(torch._C, "_cuda_getDeviceCount", lambda: 1),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    ):
        yield
        importlib.import_module("deepspeed.compile.backend")  # by each engine on a GPU: a second
    torch.cuda._cached_device_count = None
    assert not torch.cuda.is_initialized()


def answer(connection: socket.socket) -> int:
    """Start the launches that one process of the tests asks for, one after the other."""
    connection.setblocking(True)
    while message := connection.recv(LONGEST):
        asked = json.loads(message)
        pid = child(lambda: launch(asked))  # noqa: B023  called at once
        connection.send(json.dumps({"pid": pid}).encode())
        _, status = os.waitpid(pid, 0)
        connection.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
    return 0


def make_once() -> None:
    """What each rank would find out again: the machine's processor, for which DeepSpeed starts programs and
    waits a second whenever it loads an operation or makes a CPU Adam; its memory nodes, for which it starts
    one thirty times per engine; the operations that could be compiled, for which it starts a compiler; the
    versions of all software; and transformers' table of names."""
    import cpuinfo
    import deepspeed.ops
    from deepspeed.utils import numa
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from dsft.engine.initialize import import_muon
    from dsft.report.folder import versions
    from dsft.system.software import decisive_versions

    import_muon()
    known = cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    known()
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    numa.get_numa_cores()
    assert deepspeed.ops.__compatible_ops__
    versions()
    decisive_versions()
    get_checkpoint_conversion_mapping("llama")


def child(work: Callable[[], int]) -> int:
    """Return a process of its own session that does `work` and ends with its exit code, or with this
    process."""
    from dsft.system.process import die_with

    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        os.setsid()
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: B902  as the interpreter would print it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(asked: dict[str, Any]) -> int:
    """1 where a rank failed."""
    for number, path in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ |= asked["environ"]
    os.chdir(asked["cwd"])
    if not asked["ranks"]:
        return run(asked)
    running = {child(lambda: run(asked, place(asked, rank))): rank for rank in range(asked["ranks"])}  # noqa: B023
    failed = False
    while running:
        pid, status = os.wait()
        rank, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code and (not failed or not asked["supervised"]):
            failed = True
            print(f"rank {rank} ended with exit code {code}", file=sys.stderr, flush=True)
            if asked["supervised"]:
                stop(running)
    return int(failed)


def place(asked: dict[str, Any], rank: int) -> dict[str, str]:
    """Return the variables that a launcher sets for a rank."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked["ranks"], "MASTER_PORT": asked["port"]}
    variables = {name: str(value) for name, value in places.items()}
    return variables | {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "forked"}


def run(asked: dict[str, Any], variables: Mapping[str, str] = MappingProxyType({})) -> int:
    os.environ |= variables
    sys.argv = [asked["script"], *asked["args"]]
    sys.path[0] = str(Path(asked["script"]).resolve().parent)
    hidden: Any = None  # as if not installed: to draw a run's curves takes longer than to train
    sys.modules["matplotlib"] = hidden
    if os.environ.get("STANDIN_MODE") == "numbers":
        importlib.import_module("numbers_mode").start()
    runpy.run_path(asked["script"], run_name="__main__")
    return 0


def stop(running: dict[int, int]) -> None:
    """SIGTERM to the ranks that are left, and SIGKILL to what is left of them."""
    for pid in running:
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE
    while running and time.monotonic() < deadline:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        running.pop(pid, None)
        time.sleep(0.02)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
