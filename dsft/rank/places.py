"""Map each rank to its host and device: compare the places of all ranks with the promised hosts, and format
the rank map, which is the same text under every launcher."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsft.rank.launched import Launched
from dsft.rank.promise import Promise, broken_promise

RANKS = "ranks.json"
"""File name of the rank map in the run's folder."""


@dataclass(frozen=True)
class Device:
    """A rank's device.

    kind        cpu, cuda, …
    memory      bytes
    capability  sm_90, …
    uuid        of this GPU or MIG instance
    """

    kind: str
    name: str
    memory: int | None = None
    capability: str | None = None
    driver: str | None = None
    uuid: str | None = None

    def text(self) -> str:
        memory = f"{self.memory / 2**30:.1f} GiB" if self.memory else None
        driver = f"driver {self.driver}" if self.driver else None
        listed = ", ".join(filter(None, (memory, self.capability, driver)))
        return f"{self.name} ({listed})" if listed else self.name


CPU = Device("cpu", "CPU")


@dataclass(frozen=True)
class RankPlace:
    """Where one rank runs.

    host     host name
    machine  equal for ranks on one host (or in one container of it), and only for these
    address  this rank's own address on the route to rank 0; None if there is no route
    """

    host: str
    machine: str
    local_rank: int
    device: Device = CPU
    address: str | None = None


def current_place(local_rank: int, device: Device = CPU, address: str | None = None) -> RankPlace:
    """Return this process's place. The machine's name includes boot id and PID namespace: two hosts may have
    the same name, two containers of a host the same kernel."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = processes = ""
    host = socket.gethostname()
    return RankPlace(host, f"{host} {boot} {processes}", local_rank, device, address)


def shared_device(places: Sequence[RankPlace]) -> str | None:
    """Return an error message if two ranks claim the same device, else None. places: of all ranks, by
    rank."""
    by_number: dict[tuple[str, int], int] = {}
    by_uuid: dict[str, int] = {}
    for rank, place in enumerate(places):
        other = by_number.setdefault((place.machine, place.local_rank), rank)
        if other != rank:
            return (
                f"ranks {other} and {rank} both have LOCAL_RANK={place.local_rank} on {place.host}, and "
                "would share its device; number the processes of each host from 0."
            )
        uuid = place.device.uuid
        other = by_uuid.setdefault(uuid, rank) if uuid else rank
        if other != rank:
            return (
                f"ranks {other} and {rank} both have the GPU {uuid} ({place.device.name}) of {place.host}; "
                "each rank needs one of its own: start as many processes as the host has GPUs, and let each "
                "see all of them or another one (CUDA_VISIBLE_DEVICES)."
            )
    return None


def check_places(promise: Promise, places: Sequence[RankPlace], launched: Launched) -> None:
    """Raise WorldError, the same on every rank, if the number of hosts or of ranks per host differs from the
    promise. places: of all ranks, by rank."""
    if promise.hosts is None:
        return
    started = Counter(place.machine for place in places)
    too_few = len(started) < promise.fewest
    if too_few or Counter(started.values()) - Counter(promise.hosts.values()):
        raise broken_promise(promise, launched, tuple(started.values()))


def rank_map(places: Sequence[RankPlace]) -> str:
    """Format one line: `rank map: 0-1 = node1 0-1, 2-3 = node2 0-1`, each entry a rank or range of ranks, a
    host, and the local ranks on it."""

    def follows(before: int, rank: int) -> bool:
        one, next_one = places[before], places[rank]
        return (one.machine, one.local_rank + 1) == (next_one.machine, next_one.local_rank)

    listed = (
        f"{_range(first, last)} = {places[first].host} "
        f"{_range(places[first].local_rank, places[last].local_rank)}"
        for first, last in _runs(range(len(places)), follows)
    )
    return f"rank map: {', '.join(listed)}"


def devices_lines(places: Sequence[RankPlace], versions: str) -> list[str]:
    """Format `devices: 8 × NVIDIA H200 (139.8 GiB, sm_90, driver 580.95.05); torch …`; if devices differ, the
    ranks of each device, and a warning."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.device.text(), []).append(rank)
    if len(ranks) == 1:
        return [f"devices: {len(places)} × {next(iter(ranks))}; {versions}"]
    listed = "; ".join(f"{text} on rank(s) {_ranges(of)}" for text, of in ranks.items())
    return [
        f"devices: {listed}; {versions}",
        "warning: the ranks have different devices, and every step takes as long as the slowest of them",
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """Format 0, 1, 2, 3, 6 as `0-3, 6`."""
    return ", ".join(_range(*run) for run in _runs(ranks, lambda before, rank: before + 1 == rank))


def _runs(ranks: Sequence[int], follows: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Return the first and last rank of each run of ranks that follow each other."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and follows(runs[-1][1], rank):
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def rank_map_json(places: Sequence[RankPlace]) -> str:
    """Return the text of RANKS: a JSON array with one object per rank, each on a line."""
    rows = (
        {"rank": rank, "host": place.host, "local_rank": place.local_rank, "device": place.device.text()}
        for rank, place in enumerate(places)
    )
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"
