"""List this host's network interfaces and find the one that leads to another host. Asks the kernel's routing
table; sends nothing."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from dsft.rank.places import RankPlace


def address_towards(host: str) -> str | None:
    """Return this host's own address on the route to `host`, a name or an address; None if there is no
    route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # on a datagram socket this only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(places: Sequence[RankPlace], rank: int) -> str | None:
    """Return the interface over which `rank` reaches the ranks of other hosts; None if there are none, or no
    route. places: of all ranks, by rank."""
    own = places[rank].address
    others = [place.address for place in places if place.machine != places[rank].machine]
    if not others:
        return None
    if own is None or is_loopback(own):  # on its own host, rank 0's name resolves to a loopback address
        reached = next((address for address in others if address and not is_loopback(address)), None)
        own = address_towards(reached) if reached else None
    return interface_of(own) if own else None


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address; None if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None


def interfaces() -> dict[str, dict[str, Any]]:
    """Return per interface name whether it is up, its IPv4 and IPv6 addresses, and the device's speed in
    Mbit/s (0: unknown, or no device)."""
    stats = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [entry for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        place, state = Path("/sys/class/net", name), stats.get(name)
        is_device = (place / "device").exists() or (place / "bonding").exists()
        found[name] = {
            "up": bool(state and state.isup),
            "addresses": [entry.address.partition("%")[0] for entry in own],
            "speed": state.speed if state and is_device else 0,
        }
    return found


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
