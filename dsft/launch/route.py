"""Which of this host's interfaces leads to another host. Asks the kernel's routes and sends nothing."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from dsft.launch.places import Place


def address_towards(host: str) -> str | None:
    """This host's own address on the way to `host`, a name or an address; None where there is no way."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # of a datagram socket: it chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(places: Sequence[Place], rank: int) -> str | None:
    """The interface over which `rank` reaches ranks of other hosts; None where there are none, or no way.
    `places`: of all ranks, by rank."""
    own = places[rank].address
    others = [place.address for place in places if place.machine != places[rank].machine]
    if not others:
        return None
    if own is None or is_loopback(own):  # rank 0's name stands for a loopback address on its own host
        reached = next((address for address in others if address and not is_loopback(address)), None)
        own = address_towards(reached) if reached else None
    return interface_of(own) if own else None


def interface_of(address: str) -> str | None:
    """The interface that has this address."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
