"""Check interfaces, host names, rank 0's port, and whether hosts reach each other: `look` asks the name
service, `listening` opens that port and a free one, `reach` connects to those of other hosts."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from dsft.doctor.results import CheckResult, passed
from dsft.rank.route import interfaces, is_loopback

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

CONNECT = 2.0  # seconds that another host may take to answer
NAMES = 3.0  # seconds that the name service may take
HANG = "ranks would wait for each other until a timeout"

T = TypeVar("T")


def look(names: Sequence[str]) -> dict[str, Any]:
    """Return facts about this host's network.

    resolved  name -> its addresses; [] if unknown, None if the name service did not answer in time
    hostname  this host's own name, which is resolved too
    named     the interface that the environment names
    """
    own = socket.gethostname()
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    return {
        "interfaces": interfaces(),
        "named": named,
        "hostname": own,
        "resolved": each(addresses, [own, *names], NAMES),
    }


def addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({str(place[4][0]) for place in found})


@contextmanager
def listening(port: int | None) -> Iterator[dict[str, Any]]:
    """Listen on a free port, and on `port` if given, until the block ends. Yields {free: the free port} and,
    for `port`, {port: None if it was free, else who uses it}."""
    with _server(0) as free:
        facts: dict[str, Any] = {"free": free.getsockname()[1]}
        if port is None:
            yield facts
            return
        try:
            taken = _server(port)
        except OSError as error:
            taken_by = holder(port) if error.errno == errno.EADDRINUSE else error.strerror
            yield {**facts, "port": taken_by or "a process of another user"}
            return
        with taken:
            yield {**facts, "port": None}


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def holder(port: int) -> str | None:
    """Return the process that listens at the port; None if this user cannot see it."""
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
    """Connect to each target (name -> (address, port)). Return name -> seconds, or why it failed."""
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
    """Call `work` for all names in parallel threads; None for calls that take longer than `limit` seconds (a
    call to the name service cannot be cancelled)."""
    pool = ThreadPoolExecutor(max(1, len(names)))
    calls = {name: pool.submit(work, name) for name in names}
    wait(calls.values(), limit)
    pool.shutdown(wait=False)
    return {name: call.result() if call.done() else None for name, call in calls.items()}


def port(probed: ProbeResults) -> Iterator[CheckResult]:
    for host, part in probed.part("listening"):
        if "port" not in part:
            continue
        number = probed.needs.port
        if part["port"] is None:
            yield passed("port", host, f"{number} is free")
        else:
            yield CheckResult(
                "port", host, "failure", f"{number} is used by {part['port']}",
                "rank 0 could not listen there, and the other ranks would not find it",
                "end that process (it may be left over from an earlier run), or choose another port with "
                "MASTER_PORT or --master_port",
            )  # fmt: skip


def chosen(part: Mapping[str, Any]) -> str | None:
    """Return the interface that the variables select on this host, by its name or, as for NCCL, the beginning
    of its name; None if they name none."""
    named = (part.get("named") or "").split(",")[0].strip().lstrip("=")
    if not named or named.startswith("^") or named in part["interfaces"]:
        return named if named in part["interfaces"] else None
    return next((name for name in part["interfaces"] if name.startswith(named)), named)


def address_of(part: Mapping[str, Any]) -> str | None:
    """Return the address at which other hosts reach this host's ranks, IPv4 first: on the named interface,
    else that of its own name, else of its first interface that is not a loopback; None if there is none."""
    name, places = chosen(part), part["interfaces"]
    if name is not None:
        found = [places.get(name, {}).get("addresses", [])]
    else:
        found = [
            part["resolved"].get(part["hostname"]) or [],
            *(places[name]["addresses"] for name in _up(part)),
        ]
    usable = (
        [each for each in sorted(group, key=lambda each: ":" in each) if _is_usable(each)] for group in found
    )
    return next((group[0] for group in usable if group), None)


def _up(part: Mapping[str, Any]) -> list[str]:
    """Return the interfaces that lead to other hosts: those that are up and have an address, but the loopback
    and Docker's, which NCCL skips too."""
    return [
        name for name, found in part["interfaces"].items()
        if found["up"] and found["addresses"] and not name.startswith(("lo", "docker"))
    ]  # fmt: skip


def _is_usable(address: str) -> bool:
    """Return whether others can use the address: not a loopback, nor link-local (fe80::…)."""
    return not is_loopback(address) and not ipaddress.ip_address(address).is_link_local


def interface(probed: ProbeResults) -> Iterator[CheckResult]:
    if len(probed.slots) < 2:
        return
    for host, part in probed.part("network"):
        name, up = chosen(part), _up(part)
        found = part["interfaces"].get(name)
        what, do = "", "set cluster.interface to one that every host has, or bring it up"
        if name is None and not up:
            what, do = "only the loopback is up", "bring up the network that the hosts share"
        elif name is not None and not (found and found["up"] and found["addresses"]):
            wrong = "does not exist" if found is None else "is down" if not found["up"] else "has no address"
            what = f"{name} {wrong}; interfaces that are up: {', '.join(up) or 'none'}"
        if what:
            yield CheckResult("interface", host, "failure", what, HANG, do)
        elif name is None:
            value = f"none is named: gloo uses the route to the other hosts, NCCL {up[0]}"
            yield passed("interface", host, value)
        else:
            speed = f", {found['speed']:,} Mb/s" if found["speed"] > 0 else ""
            yield passed("interface", host, f"{name}, {address_of(part)}{speed}")


def names(probed: ProbeResults) -> Iterator[CheckResult]:
    """Check that each host resolves the spec's names of all others."""
    if len(probed.slots) < 2:
        return
    good = len(probed.answers.first) == len(probed.slots)
    for host, part in probed.part("network"):
        lost = [name for name in probed.slots if not part["resolved"].get(name)]
        near = [
            name
            for name in probed.slots
            if name != host and any(map(is_loopback, part["resolved"].get(name) or []))
        ]
        if lost or near:
            good = False
            what = f"cannot resolve {', '.join(lost)}" if lost else f"resolves {', '.join(near)} to itself"
            yield CheckResult(
                "names", host, "failure", what, f"{HANG}: rank 0 is found by its name",
                "correct /etc/hosts there or the name service, or put addresses into cluster.hosts",
            )  # fmt: skip
    if good:
        yield passed("names", None, "every host resolves the names of all others")


def targets(
    seen_first: Mapping[str, Mapping[str, Any]], first: str, number: int
) -> dict[str, tuple[str, int]]:
    """Return label -> (address, port) that all hosts connect to: rank 0's port, and each host's own
    address."""
    found = {}
    for host, facts in seen_first.items():
        part, listening = facts.get("network", {}), facts.get("listening", {})
        if "free" not in listening or "interfaces" not in part:
            continue
        if host == first and listening.get("port", "") is None:
            found[f"{host} (port {number})"] = (host, number)
        address = address_of(part)
        if address is not None:
            found[host] = (address, listening["free"])
    return found


def connections(probed: ProbeResults) -> Iterator[CheckResult]:
    """Check that each host reaches each other."""
    if len(probed.slots) < 2:
        return
    tried = good = 0
    for host, answer in probed.answers.second.items():
        reached = answer.get("reached", {})
        failed = {name: why for name, why in reached.items() if isinstance(why, str) or why is None}
        failed = {name: why for name, why in failed.items() if name != host}
        tried, good = tried + len(reached), good + len(reached) - len(failed)
        if failed:
            names = "; ".join(f"{name}: {why or 'no answer'}" for name, why in failed.items())
            yield CheckResult(
                "connection", host, "failure", f"cannot connect to {names}", HANG,
                "open all ports between the hosts (ranks choose their own), or set cluster.interface to an "
                "interface on a network that all share",
            )  # fmt: skip
    if tried and tried == good and len(probed.answers.second) == len(probed.slots):
        yield passed("connection", None, "every host connects to all others, and to rank 0's port")
