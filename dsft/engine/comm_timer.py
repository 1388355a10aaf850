"""Measure how long this rank waits for others in its steps. Nothing is communicated.

Every wait of a step, DeepSpeed's and dsft's, synchronous or on a handle, goes through `Work.wait`, which is
timed during a step. On a CPU that is the time for which the thread is blocked. On a GPU the call returns at
once and a stream waits instead: two events around the call measure for how long. There, a call without a
handle runs on the current stream, before `wait`, so the calls themselves get events too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

CALLS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
    "reduce_scatter", "reduce_scatter_tensor", "send", "recv",
)  # fmt: skip
"""The methods of DeepSpeed's backend that engines call in a step."""
SPLIT_CALLS = ("all_to_all_single", "all_gather_into_tensor")
"""The functions of torch.distributed that `dsft.dist.sequence` calls in a step."""
MAX_PENDING = 1024
"""Number of event pairs above which the finished ones are read and dropped."""


class CommunicationTimer:
    """A clock of this rank's waits. On a CPU only waits of the thread that built it count; other threads work
    beside the step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._thread = threading.get_ident()
        self._inside = False  # in a call that itself waits
        self._seconds = 0.0
        self._events: deque[tuple[Any, Any]] = deque()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Count the waits in this block: those of a step, not of a checkpoint."""
        with ExitStack() as undo:
            self._clock(Work, "wait", undo)
            if self._on_gpu:
                for name in CALLS:
                    self._clock(deepspeed_comm.cdb, name, undo)
                for name in SPLIT_CALLS:
                    self._clock(dist, name, undo)
            yield

    def pop_seconds(self) -> float:
        """Return the seconds since the last call; on a GPU those of finished waits, the others with the next
        call."""
        self._read()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _read(self) -> None:
        """Add up the finished waits of all streams, which may wait at the same time: the sum can be more than
        a step lost by it."""
        while self._events and self._events[0][1].query():
            first, last = self._events.popleft()
            self._seconds += first.elapsed_time(last) / 1000

    def _clock(self, owner: Any, name: str, undo: ExitStack) -> None:
        call: Callable[..., Any] = getattr(owner, name)
        undo.callback(setattr, owner, name, call)
        clocked = self._between_events if self._on_gpu else self._between_readings
        setattr(owner, name, lambda *args, **kwargs: clocked(call, *args, **kwargs))

    def _between_readings(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return call(*args, **kwargs)
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._seconds += time.perf_counter() - began

    def _between_events(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Time a call, on whichever thread it is made. The backward pass calls from a thread of autograd, but
        never at the same time as the step's thread, so one `_inside` is enough for both."""
        if self._inside:
            return call(*args, **kwargs)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._inside = True
        first.record()
        try:
            return call(*args, **kwargs)
        finally:
            last.record()
            self._events.append((first, last))
            self._inside = False
            if len(self._events) > MAX_PENDING:
                self._read()
