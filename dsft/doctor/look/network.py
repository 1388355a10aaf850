"""Interfaces, names, the port of rank 0, and whether other hosts answer. Asks the name service, listens on
the port and on one that is free, connects to those of others."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import psutil

CONNECT = 2.0  # seconds that another host may take to answer
NAMES = 3.0  # seconds that the name service may take

T = TypeVar("T")


def network(names: Sequence[str]) -> dict[str, Any]:
    """resolved: name -> its addresses, [] where there are none, None where the name service did not answer in
    time; hostname: how this host calls itself, resolved too; named: the interface that variables name."""
    own = socket.gethostname()
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    return {
        "interfaces": interfaces(),
        "named": named,
        "hostname": own,
        "resolved": each(addresses, [own, *names], NAMES),
    }


def interfaces() -> dict[str, dict[str, Any]]:
    """Name -> whether it is up, its IPv4 and IPv6 addresses, its speed in Mb/s (0: not known)."""
    stats = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        own = [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        state = stats.get(name)
        found[name] = {
            "up": bool(state and state.isup),
            "addresses": own,
            "speed": state.speed if state else 0,
        }
    return found


def addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(place[4][0]) for place in found})


@contextmanager
def listening(port: int | None) -> Iterator[dict[str, Any]]:
    """On a free port (`free`), and on `port` where it is given (`port`: None: it was free and is held until
    the block ends; else who has it)."""
    with _server(0) as free:
        facts: dict[str, Any] = {"free": free.getsockname()[1]}
        if port is None:
            yield facts
            return
        try:
            taken = _server(port)
        except OSError as error:
            taken_by = holder(port) if error.errno == errno.EADDRINUSE else error.strerror
            yield {**facts, "port": taken_by or "a process that cannot be seen from here"}
            return
        with taken:
            yield {**facts, "port": None}


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def holder(port: int) -> str | None:
    """The process that listens there, as far as this user may see."""
    try:
        found = [
            entry
            for entry in psutil.net_connections("inet")
            if entry.laddr and entry.laddr.port == port and entry.pid and entry.status == psutil.CONN_LISTEN
        ]
        return f"process {found[0].pid} ({psutil.Process(found[0].pid).name()})" if found else None
    except (psutil.Error, OSError):
        return None


def reach(targets: Mapping[str, Sequence[Any]]) -> dict[str, str | float | None]:
    """Targets: a name -> (address, port). A name -> seconds until it answered, or why it did not."""
    return each(lambda name: _connect(*targets[name]), list(targets), CONNECT + NAMES)


def _connect(address: str, port: int) -> str | float:
    began = time.monotonic()
    try:
        with socket.create_connection((address, port), timeout=CONNECT):
            return time.monotonic() - began
    except TimeoutError:
        return f"no answer within {CONNECT:g} s"
    except OSError as error:
        return error.strerror or str(error)


def each(work: Callable[[str], T], names: Sequence[str], limit: float) -> dict[str, T | None]:
    """All at once; None for what has not ended within `limit` seconds (a name service cannot be stopped)."""
    found: dict[str, T | None] = dict.fromkeys(names)

    def one(name: str) -> None:
        found[name] = work(name)

    threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return dict(found)
