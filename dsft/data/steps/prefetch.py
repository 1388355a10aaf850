"""Prefetch: build the next step's micro-batches and copy them to the device while the current step trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from dsft.data.steps.batch import GlobalStep


class Prefetcher:
    """Prefetches one step ahead: `step(n)` returns step n and starts to build step n + 1 in a thread, which
    ends with the `with` block.

    Steps may be requested in any order; one that was not prefetched is waited for. An error in the thread is
    raised by the call of `step` for that step.
    """

    def __init__(
        self,
        build: Callable[[int], GlobalStep],
        total_steps: int,
        device: torch.device,
        complete: Callable[[GlobalStep], GlobalStep] = lambda step: step,
    ) -> None:
        """build: returns a step by its number, from 0; total_steps: of the run, none after them is
        prefetched; complete: called in the thread to complete a step."""
        self._build, self._total, self._device, self._complete = build, total_steps, device, complete
        self._next: tuple[int, Future[GlobalStep]] | None = None
        if device.type == "cuda":  # else the thread's current GPU is 0, where pinning memory makes a context
            self._thread = ThreadPoolExecutor(1, "dsft-next-step", torch.cuda.set_device, (device,))
        else:
            self._thread = ThreadPoolExecutor(1, "dsft-next-step")

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def step(self, index: int) -> GlobalStep:
        started, self._next = self._next, None
        if started is not None and started[0] == index:
            future = started[1]
        else:
            future = self._thread.submit(self._complete_step, index)
        step = future.result()
        if index + 1 < self._total:
            self._next = (index + 1, self._thread.submit(self._complete_step, index + 1))
        return step

    def _complete_step(self, index: int) -> GlobalStep:
        step = self._complete(self._build(index))
        batches, others = (
            tuple(batch.to(self._device) for batch in some)
            for some in (step.micro_batches, step.estimate_batches)
        )
        return replace(step, micro_batches=batches, estimate_batches=others)
