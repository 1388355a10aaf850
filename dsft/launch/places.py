"""Where each rank is: takes what all ranks have told of themselves, compares it with the promise, gives the
rank map, which is the same text for every way in."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import WorldError
from dsft.launch.launched import Launched
from dsft.launch.promise import Promise, broken

RANKS = "ranks.json"
"""In the run's folder."""


@dataclass(frozen=True)
class Place:
    """Of one rank. host: its host's name; machine: of equal ones on one host, or in one container of it."""

    host: str
    machine: str
    local_rank: int


def here(local_rank: int) -> Place:
    """Of this process. Two hosts may have one name, two containers of a host one kernel."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = processes = ""
    host = socket.gethostname()
    return Place(host, f"{host} {boot} {processes}", local_rank)


def check_places(promise: Promise, places: Sequence[Place], launched: Launched) -> None:
    """places: of all ranks, by rank. Raises WorldError, the same on every rank, where another number of hosts
    or of ranks on them came than promised, and where two ranks claim one device."""
    holders: dict[tuple[str, int], int] = {}
    for rank, place in enumerate(places):
        other = holders.setdefault((place.machine, place.local_rank), rank)
        if other != rank:
            raise WorldError(
                f"ranks {other} and {rank} both have LOCAL_RANK={place.local_rank} on {place.host}, and "
                "would share its device; number the processes of each host from 0."
            )
    if promise.hosts is None:
        return
    came = Counter(place.machine for place in places)
    too_few = len(came) < promise.fewest
    if too_few or Counter(came.values()) - Counter(promise.hosts.values()):
        raise broken(promise, launched, tuple(came.values()))


def rank_map(places: Sequence[Place]) -> str:
    """One line: `rank map: 0-1 = node1 0-1, 2-3 = node2 0-1`, each a rank or range of ranks, a host, and
    their local ranks there."""
    runs: list[tuple[int, int]] = []  # first rank, last rank
    for rank, place in enumerate(places):
        before = places[rank - 1]
        follows = (before.machine, before.local_rank + 1) == (place.machine, place.local_rank)
        if runs and follows:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    told = (
        f"{_range(first, last)} = {places[first].host} "
        f"{_range(places[first].local_rank, places[last].local_rank)}"
        for first, last in runs
    )
    return f"rank map: {', '.join(told)}"


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def rank_map_json(places: Sequence[Place]) -> str:
    """The text of RANKS: an array with an object for each rank, one a line."""
    rows = [
        json.dumps({"rank": rank, "host": place.host, "local_rank": place.local_rank})
        for rank, place in enumerate(places)
    ]
    return "[\n" + ",\n".join(rows) + "\n]\n"
