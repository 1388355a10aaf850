"""The next step made while this one trains: takes steps, gives the same ones, on the device, sooner."""

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
    """Asked for step n, gives it and begins step n + 1 in a thread, one step ahead and no more.

    A step is a pure function of its number, so any may be asked for, at the cost of waiting for it. What the
    thread raises is raised by the `step` that wanted it.
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
    """The thread ends with the block. `total_steps`: the run's last step is the one before this number. fill:
    adds to a step's micro-batches what is known of them, in the thread."""
    if device.type == "cuda":  # a new thread has GPU 0, where pinning would open a context
        thread = ThreadPoolExecutor(1, "dsft-next-step", torch.cuda.set_device, (device,))
    else:
        thread = ThreadPoolExecutor(1, "dsft-next-step")
    try:
        yield StepsAhead(steps, total_steps, device, thread, fill)
    finally:
        thread.shutdown(cancel_futures=True)
