"""The ranks of a group that splits rows, as threads of one process: what they send goes from thread to
thread, all else is the engine's own code. For unit tests that need no DeepSpeed. Models are built before,
since threads share torch's random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.dist import sequence
from dsft.model.policy import Policy
from tests.make import forward

T = TypeVar("T")
SECONDS = 120.0
"""After which a thread that waits for the others gives up."""


class Threads(sequence.RankExchange):
    """The exchange of all threads; `number` is that of the thread that asks."""

    def __init__(self, size: int, patch: pytest.MonkeyPatch) -> None:
        self.size, self.group = size, None  # type: ignore[assignment]
        self._here, self._sent = threading.local(), [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        calls = {
            "all_to_all_single": self._all_to_all,
            "all_gather_into_tensor": self._all_gather,
            "all_reduce": self._all_reduce,
        }
        patch.setattr(sequence, "dist", SimpleNamespace(**calls))
        patch.setattr(sequence, "exchange_of", lambda world: self)

    @property
    def number(self) -> int:  # type: ignore[override]
        return int(self._here.number)

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Return what `work` returns for each number."""

        def one(number: int) -> T:
            self._here.number = number
            try:
                return work(number)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            found = [pool.submit(one, number) for number in range(self.size)]
        failures = [failure for future in found if (failure := future.exception())]
        for failure in sorted(
            failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)
        ):
            raise failure  # not that of a thread that waited for the one that failed
        return [future.result() for future in found]

    def scored(self, policy: Policy, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities (B, T) of a whole micro-batch, to the thread of one rank with its
        policy."""
        rows, batch = sequence.RowSplit(policy.causal_lm, None), batch.to(torch.device("cpu"))  # type: ignore[arg-type]
        part = rows.part(batch)
        return rows.whole(forward(policy, part).logps, batch)

    def _collect(self, mine: Tensor, take: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        self._sent[self.number] = mine
        self._barrier.wait()
        found = take(self._sent)
        self._barrier.wait()
        return found

    def _all_to_all(self, received: Tensor, sent: Tensor, group: Any) -> None:
        received.copy_(self._collect(sent, lambda every: torch.stack([one[self.number] for one in every])))

    def _all_gather(self, whole: Tensor, part: Tensor, group: Any) -> None:
        whole.copy_(self._collect(part, lambda every: torch.cat(list(every))))

    def _all_reduce(self, total: Tensor, group: Any) -> None:
        total.copy_(self._collect(total.clone(), lambda every: torch.stack(list(every)).sum(0)))
