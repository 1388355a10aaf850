"""What the ranks say to each other beside the training: numbers that they agree on while a step goes on, and
that one of them is gone. Takes a world; has groups of its own, of gloo and CPU tensors on any device.

NCCL tells nobody that a process has ended: the others wait in its collective for half an hour. Over gloo the
kernel closes the connection, and the rank behind it in the ring knows at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dsft.engine.world import TIMEOUT, World

_FOR_EVER = timedelta(days=3650)
_LEFT = 0  # in the ring: this rank leaves, all is well; 1 + n: rank n is gone


class Agreement:
    """Built by all ranks at once."""

    def __init__(self, world: World) -> None:
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if world.world_size > 1 else None

    def begin(self, mine: int) -> Callable[[], int]:
        """Start a collective, and go on: what it gives waits for the highest `mine` of all ranks."""
        if self._group is None:
            return lambda: mine
        highest = torch.tensor([mine])
        work = dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None, "it is asynchronous"

        def agreed() -> int:
            work.wait()
            return int(highest)

        return agreed


class Ring:
    """Each rank waits, in a thread, for a word of the one before it: that it leaves, or who is gone; where
    that rank itself is gone, the wait fails. What it learns it tells the one behind it, so all know at once.

    Built by all ranks at once. lost: called in that thread with the rank that is gone, and whether this rank
    is the one that noticed.
    """

    def __init__(self, world: World, lost: Callable[[int, bool], None]) -> None:
        self._thread: threading.Thread | None = None
        if world.world_size == 1:
            return
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._before = (world.rank - 1) % world.world_size
        self._behind = (world.rank + 1) % world.world_size
        self._lost = lost
        self._thread = threading.Thread(target=self._listen, name="ring", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """A collective, before the process group is closed: none is missed from now on."""
        if self._thread is not None:
            self._tell(_LEFT)
            self._thread.join()

    def _listen(self) -> None:
        word = torch.tensor([_LEFT])
        try:
            work = dist.irecv(word, self._before, group=self._group)
            assert work is not None, "this rank is in the group"
            work.wait(_FOR_EVER)
            noticed, gone = False, int(word) - 1
        except RuntimeError:  # the connection was closed
            noticed, gone = True, self._before
        if gone < 0:
            return
        if gone != self._behind:
            with suppress(RuntimeError):  # that one is gone too
                self._tell(1 + gone)
        self._lost(gone, noticed)

    def _tell(self, word: int) -> None:
        dist.send(torch.tensor([word]), self._behind, group=self._group)
