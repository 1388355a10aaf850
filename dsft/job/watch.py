"""What all ranks' steps cost, watched from the loop: takes the world, gives the loop's `Watch`."""

from __future__ import annotations

import socket

from dsft.engine.waiting import Waiting
from dsft.engine.world import World
from dsft.job.api import Say
from dsft.report.hosts import HostWatch, Place


def watch_hosts(world: World, say: Say) -> HostWatch:
    """A collective: every rank tells where it runs."""
    places = world.gather(Place(socket.gethostname(), world.local_rank, world.stage))
    return HostWatch(places, world.rank, Waiting(world.device), world.device, say)
