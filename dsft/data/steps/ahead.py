"""Prefetch: build the next step's micro-batches and copy them to the device while the current step trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from dsft.data.steps.batch import GlobalStep, MicroBatch

Fill = Callable[[Sequence[MicroBatch]], Sequence[MicroBatch]]


class Steps(Protocol):
    def step(self, index: int) -> GlobalStep: ...


class StepsAhead:
    """Prefetches one step ahead: `step(n)` returns step n and starts to build step n + 1 in a thread.

    Steps may be requested in any order; one that was not prefetched is waited for. An error in the thread is
    raised by the call of `step` for that step.
    """

    def __init__(
        self, steps: Steps, total_steps: int, device: torch.device, thread: ThreadPoolExecutor, fill: Fill
    ) -> None:
        self._steps, self._total, self._device, self._thread = steps, total_steps, device, thread
        self._fill = fill
        self._next: tuple[int, Future[GlobalStep]] | None = None

    def step(self, index: int) -> GlobalStep:
        made = self._begun(index).result()
        if index + 1 < self._total:
            self._next = (index + 1, self._thread.submit(self._make, index + 1))
        return made

    def _begun(self, index: int) -> Future[GlobalStep]:
        begun, self._next = self._next, None
        if begun is not None and begun[0] == index:
            return begun[1]
        return self._thread.submit(self._make, index)

    def _make(self, index: int) -> GlobalStep:
        made = self._steps.step(index)
        filled = self._fill(made.micro_batches)
        return replace(made, micro_batches=tuple(batch.to(self._device) for batch in filled))


@contextmanager
def ahead(
    steps: Steps, total_steps: int, device: torch.device, fill: Fill = lambda batches: batches
) -> Iterator[StepsAhead]:
    """Yield a StepsAhead whose thread ends with the block.

    total_steps  number of steps of the run; none after them is prefetched
    fill         called in the thread to complete the micro-batches of a step
    """
    if device.type == "cuda":  # a new thread's current GPU is 0, where pinning memory would create a context
        thread = ThreadPoolExecutor(1, "dsft-next-step", torch.cuda.set_device, (device,))
    else:
        thread = ThreadPoolExecutor(1, "dsft-next-step")
    try:
        yield StepsAhead(steps, total_steps, device, thread, fill)
    finally:
        thread.shutdown(cancel_futures=True)
