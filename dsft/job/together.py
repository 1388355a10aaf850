"""The ranks of a run as one: none trains on without the others, and all stop together. Takes a job and its
world, gives the ring that a run leaves at its end and the question that its loop asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dsft.engine.peers import Agreement, Ring
from dsft.engine.world import World
from dsft.errors import DsftError, StoppedError, WorldError
from dsft.job.api import Job
from dsft.launch.stopping import REASONS

GRACE = 2.0
"""Seconds in which a process may still end by itself, and say why, after another one has ended."""
_MOMENT = 0.5  # seconds, by which a failed collective may be ahead of the ring


@dataclass
class _Lost:
    """rank: that has ended before its time; noticed: by this process."""

    rank: int | None = None
    noticed: bool = False


@contextmanager
def together(job: Job, world: World) -> Iterator[Ring]:
    """A collective. While it lasts, this process ends soon after another rank's process has, with 69; one of
    them says so. A stop is waited for by all, so that a launcher ends none of them that still writes.
    """
    lost, over = _Lost(), False

    def end() -> None:
        message = f"rank {world.rank}: rank {lost.rank} has ended before its time, and so does this one"
        job.stopping.now(WorldError.exit_code, message, speaks=lost.noticed)

    def gone(rank: int, noticed: bool) -> None:
        lost.rank, lost.noticed = rank, noticed
        time.sleep(GRACE)
        if not over:
            end()

    ring = Ring(world, gone)
    try:
        yield ring
    except StoppedError:
        world.gather(None)
        over = True
        raise
    except DsftError:
        over = True
        raise
    except Exception:
        time.sleep(_MOMENT)
        if lost.rank is not None:  # the cause of what failed here
            end()
        raise


def ask_all(job: Job, world: World) -> Callable[[], Callable[[], str | None]]:
    """For the loop, in which a stop saves: whether any rank has been asked to stop by now; the highest of
    REASONS."""
    agreement = Agreement(world)
    job.stopping.stage = "train"

    def ask() -> Callable[[], str | None]:
        reason = job.stopping.reason
        agreed = agreement.begin(0 if reason is None else 1 + REASONS.index(reason))

        def answer() -> str | None:
            number = agreed()
            return REASONS[number - 1] if number else None

        return answer

    return ask
