"""Limit the CPU time and memory that a chat template may use for one rendering.

A template is a program that comes with a model. Jinja's sandbox keeps it from the process's objects, but lets
it loop and allocate without limit. The kernel enforces the limits: a timer of the process's CPU time, whose
signal raises an error, and a limit on its data segment (RLIMIT_DATA), beyond which Python raises MemoryError.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading

TIME_LIMIT = 10.0
"""Seconds of CPU time for one rendering."""
MEMORY_LIMIT = 2**30
"""Bytes by which the process's memory may grow in one rendering."""

_AGAIN = 1.0  # seconds until the signal repeats, in case its error was swallowed
_PAGE = resource.getpagesize()


class OutOfTimeError(Exception):
    """A rendering took more than TIME_LIMIT."""


class RenderLimits:
    """A context that raises OutOfTimeError after TIME_LIMIT seconds of CPU time, and MemoryError if memory
    grows by more than MEMORY_LIMIT. Do not nest it, nor use it for code that catches every exception.

    The handler of SIGVTALRM stays installed and does nothing outside the context. Garbage collection is off
    inside, since an error raised in a callback of the collector is lost. Only a process's main thread
    receives signals, so in other threads there are no limits.
    """

    _inside = False
    _expired = False  # needed since C code may replace the error with another one

    def __enter__(self) -> None:
        self._bounds = threading.current_thread() is threading.main_thread()
        if not self._bounds:
            return
        if signal.getsignal(signal.SIGVTALRM) is not _out_of_time:
            signal.signal(signal.SIGVTALRM, _out_of_time)
        self._soft, self._hard = resource.getrlimit(resource.RLIMIT_DATA)
        used = _data_bytes()
        most = used + MEMORY_LIMIT if used else self._soft
        if self._soft != resource.RLIM_INFINITY:
            most = min(most, self._soft)
        self._collects = gc.isenabled()
        gc.disable()
        RenderLimits._inside, RenderLimits._expired = True, False
        signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT, _AGAIN)
        resource.setrlimit(resource.RLIMIT_DATA, (most, self._hard))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bounds:
            RenderLimits._inside = False
            resource.setrlimit(resource.RLIMIT_DATA, (self._soft, self._hard))
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if self._collects:
                gc.enable()
            if RenderLimits._expired and kind is not None and issubclass(kind, Exception):
                raise OutOfTimeError


def _out_of_time(*_: object) -> None:
    if RenderLimits._inside:
        RenderLimits._expired = True
        raise OutOfTimeError


def _data_bytes() -> int:
    """Return the bytes that RLIMIT_DATA counts, plus the stack: the sixth number of proc(5)'s statm, which is
    0 on some kernels."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 256).split()[5]) * _PAGE
    finally:
        os.close(file)
