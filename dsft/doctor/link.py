"""The program that `dsft doctor --network` starts on every host: takes orders as JSON lines on standard
input, gives one JSON line for each. It ends with its input. No torch: it stands within a moment.

    {"do": "listen"}                               → port, interfaces: {name: {addresses, mbit}}, gpus
    {"do": "free_port"}                            → port
    {"do": "send", "address", "port", "seconds"}   → round_trip (seconds), sender (own address), or error
    {"do": "received"}                             → bytes, seconds: of the last one who sent to this host

A transfer is one TCP stream. The receiver counts what arrives, once the stream has run for a quarter of its
time, and then resets it: what stands in the buffers of a slow link is not waited for.
"""

from __future__ import annotations

import json
import queue
import socket
import statistics
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ANSWER = 3.0  # seconds for a host to take a connection, and for each word of it
PINGS, PING_SECONDS = 40, 0.5
BLOCK = bytes(1 << 20)
FAR = 0.005  # of a round trip, from which on a stream needs longer to reach its speed
FAR_SECONDS = 1.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time


def main() -> None:
    server = Server()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(server.answer(order)), flush=True)


class Server:
    def __init__(self) -> None:
        self._listening: socket.socket | None = None
        self._received: queue.SimpleQueue[dict[str, float]] = queue.SimpleQueue()

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] == "listen":
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listening = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
            threading.Thread(target=self._serve, args=(self._listening,), daemon=True).start()
            port = self._listening.getsockname()[1]
            return {"port": port, "interfaces": interfaces(), "gpus": gpus()}
        if order["do"] == "free_port":
            with socket.create_server(("", 0)) as probe:
                return {"port": probe.getsockname()[1]}
        if order["do"] == "send":
            return send(order["address"], order["port"], order["seconds"])
        try:
            return self._received.get(timeout=ANSWER)
        except queue.Empty:
            return {"error": "nothing arrived"}

    def _serve(self, listening: socket.socket) -> None:
        while True:
            peer, _ = listening.accept()
            threading.Thread(target=self._attend, args=(peer,), daemon=True).start()

    def _attend(self, peer: socket.socket) -> None:
        """The first 8 bytes say for how long a stream is taken; 0: what comes is sent back."""
        try:
            with peer:
                peer.settimeout(ANSWER)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                (seconds,) = struct.unpack("d", _exactly(peer, 8))
                if seconds:
                    self._received.put(take(peer, seconds))
                    return
                while word := peer.recv(64):
                    peer.sendall(word)
        except OSError:  # the one who called gave up, and tells
            return


def send(address: str, port: int, seconds: float) -> dict[str, Any]:
    """Pings, then a stream until the receiver ends it."""
    try:
        with socket.create_connection((address, port), timeout=ANSWER) as peer:
            sender = peer.getsockname()[0]
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(struct.pack("d", 0.0))
            round_trip = ping(peer)
        if round_trip > FAR:
            seconds = max(seconds, FAR_SECONDS)
        with socket.create_connection((address, port), timeout=ANSWER) as peer:
            peer.sendall(struct.pack("d", seconds))
            until = time.monotonic() + seconds + ANSWER
            try:
                while time.monotonic() < until:
                    peer.sendall(BLOCK)
            except (ConnectionError, TimeoutError):
                pass  # its end; how much arrived the receiver knows
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}" if error.args else type(error).__name__}
    return {"round_trip": round_trip, "sender": sender}


def ping(peer: socket.socket) -> float:
    """The median round trip in seconds, without the first few."""
    found: list[float] = []
    until = time.perf_counter() + PING_SECONDS
    while len(found) < PINGS and (len(found) < 4 or time.perf_counter() < until):
        began = time.perf_counter()
        peer.sendall(b"x")
        _exactly(peer, 1)
        found.append(time.perf_counter() - began)
    return statistics.median(found[3:])


def take(peer: socket.socket, seconds: float) -> dict[str, float]:
    """What arrives in the last three quarters of `seconds`, from the first byte on."""
    buffer = bytearray(len(BLOCK))
    count = 0
    try:
        peer.recv_into(buffer, 1)
        began = time.perf_counter()
        counted = began + seconds / 4
        peer.settimeout(seconds)
        while (now := time.perf_counter()) < began + seconds:
            size = peer.recv_into(buffer)
            if not size:
                break
            count += size * (now >= counted)
        spent = time.perf_counter() - counted
    except OSError:
        spent = seconds
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return {"bytes": count, "seconds": spent}


def interfaces() -> dict[str, dict[str, Any]]:
    """Those that are up. mbit: what the device says of its speed, where it is a device."""
    states, found = psutil.net_if_stats(), {}
    for name, each in psutil.net_if_addrs().items():
        internet = [a.address for a in each if a.family in (socket.AF_INET, socket.AF_INET6)]
        if internet and name in states and states[name].isup:
            place = Path("/sys/class/net", name)
            real = (place / "device").exists() or (place / "bonding").exists()
            addresses = [address.partition("%")[0] for address in internet]
            found[name] = {"addresses": addresses, "mbit": states[name].speed if real else 0}
    return found


def gpus() -> int:
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


def _exactly(peer: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = peer.recv(size - len(found))
        if not more:
            raise ConnectionError("the connection was closed")
        found += more
    return found


if __name__ == "__main__":
    main()
