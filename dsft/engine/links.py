"""Measure the links between hosts: `dsft doctor --network` starts this program on every host. Its requests
and their answers, over `dsft.remote`:

    {"do": "listen"}                           port (of its store), interfaces, gpus
    {"do": "reach", address, port}             interface (own), or error
    {"do": "pair", rank, name, address, port, peer}
                                               round_trip (seconds, to the other and back), gbit (received),
                                               or error
    {"do": "all_reduce", ranks (of this host), name, address, port, peer, world_size, backend, sizes, seconds}
                                               reduces: [[bytes, seconds], …], on rank 0

Two hosts measure their link with send and recv in a gloo group of their own, one direction after the other.
The all-reduce uses the run's backend, NCCL with one process per GPU or gloo with one per host. Each group
meets at the store of its first rank's host. Imports torch, but not DeepSpeed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from dsft.rank.route import address_towards, interface_of, interfaces
from dsft.remote import serve
from dsft.system.process import die_with

CONNECT = 3.0  # seconds for a host to accept a connection
TIMEOUT = timedelta(seconds=20)  # for a pair to meet, and for each of its operations
IMPORTED = timedelta(seconds=60)  # for the all-reduce: a host's other processes import torch first
PINGS, PING_SECONDS = 40, 0.5
LEAST, MOST = 1 << 16, 1 << 28  # bytes of a transfer
SECONDS = 0.3  # shortest transfer that counts, unless MOST bytes take less


def main() -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def answer(order: dict[str, Any]) -> list[dict[str, Any]]:
        if order["do"] == "listen":
            gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else torch.cuda.device_count()
            return [{"port": store.port, "interfaces": interfaces(), "gpus": gpus}]
        if order["do"] == "reach":
            return [reach(order["address"], order["port"])]
        if order["do"] == "pair":
            return [pair(order, store)]
        return [all_reduce(order, store)]

    serve(answer, silence=math.inf)  # many other pairs may be measured first
    os._exit(0)  # a group that cannot meet may still wait


def reach(address: str, port: int) -> dict[str, Any]:
    try:
        with socket.create_connection((address, port), timeout=CONNECT) as connection:
            return {"interface": interface_of(connection.getsockname()[0])}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}" if error.args else type(error).__name__}


@contextmanager
def group(order: Mapping[str, Any], rank: int, size: int, backend: str, own: Store | None) -> Iterator[None]:
    """Join a process group over the interface that leads to the others, as in a run. own: this host's store,
    at which rank 0 meets the others."""
    address = address_towards(order["peer"])
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if not chosen and address is not None and (interface := interface_of(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    timeout = TIMEOUT if order["do"] == "pair" else IMPORTED
    try:
        there = TCPStore(order["address"], order["port"], timeout=timeout) if rank or own is None else own
        store = PrefixStore(order["name"], there)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if not chosen:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


def pair(order: Mapping[str, Any], own: Store) -> dict[str, Any]:
    """Both directions, one after the other: who sends measures the round trip, who receives the speed. A link
    that fails is an answer too: the host's other links are still to be measured."""
    rank, other = order["rank"], 1 - order["rank"]
    found: dict[str, Any] = {}
    try:
        with group(order, rank, 2, "gloo", own):
            for sender in (0, 1):
                if rank == sender:
                    found["round_trip"] = ping(other)
                    send(other)
                else:
                    pong(other)
                    found["gbit"] = receive(other)
            dist.barrier()
    except RuntimeError as error:  # torch's; further lines are its stack
        return {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    return found


def ping(other: int) -> float:
    """Return the median round trip in seconds, without the first few."""
    spent: list[float] = []
    until = time.perf_counter() + PING_SECONDS
    while len(spent) < PINGS and (len(spent) < 4 or time.perf_counter() < until):
        began = time.perf_counter()
        _send_value(1.0, other)
        _receive_value(other)
        spent.append(time.perf_counter() - began)
    _send_value(0.0, other)
    return statistics.median(spent[3:])


def pong(other: int) -> None:
    while goes_on := _receive_value(other):
        _send_value(goes_on, other)


def receive(other: int) -> float:
    """Return the rate in Gbit/s of the first transfer that takes at least SECONDS or has at least MOST bytes;
    each has four times the bytes of the one before. The time includes half a round trip, that of the signal
    to the sender."""
    size = LEAST
    while True:
        buffer = torch.ones(size, dtype=torch.uint8)  # so that its pages are allocated
        _receive_value(other)
        began = time.perf_counter()
        _send_value(1.0, other)
        dist.recv(buffer, other)
        spent = time.perf_counter() - began
        is_last = spent >= SECONDS or size >= MOST
        _send_value(0.0 if is_last else 1.0, other)
        if is_last:
            return size * 8 / spent / 1e9
        size *= 4


def send(other: int) -> None:
    size, goes_on = LEAST, 1.0
    while goes_on:
        buffer = torch.ones(size, dtype=torch.uint8)
        _send_value(1.0, other)  # ready
        _receive_value(other)
        dist.send(buffer, other)
        goes_on = _receive_value(other)
        size *= 4


def _send_value(value: float, other: int) -> None:
    dist.send(torch.tensor(value), other)


def _receive_value(other: int) -> float:
    value = torch.zeros(())
    dist.recv(value, other)
    return float(value)


def all_reduce(order: Mapping[str, Any], own: Store) -> dict[str, Any]:
    """Time all-reduces. This process is the first rank of this host; the others are its child processes."""
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_member, args=(order, local, os.getpid()))
        for local in range(1, len(order["ranks"]))
    ]
    for other in others:
        other.start()
    reduces = _reduces(order, 0, own)
    for other in others:
        other.join()
    return {"reduces": reduces}


def _member(order: Mapping[str, Any], local: int, parent: int) -> None:
    die_with(parent)
    torch.set_num_threads(1)
    _reduces(order, local, None)


def _reduces(order: Mapping[str, Any], local: int, own: Store | None) -> list[tuple[int, float]]:
    rank, size, on_gpu = order["ranks"][local], order["world_size"], order["backend"] == "nccl"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    with group(order, rank, size, order["backend"], own):
        return [(bytes_, _seconds(bytes_, order["seconds"], device)) for bytes_ in order["sizes"]]


def _seconds(size: int, seconds: float, device: torch.device) -> float:
    """Return the median time of an all-reduce of `size` bytes, repeated for `seconds`."""
    tensor = torch.zeros(size // 4, device=device)

    def once() -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    first = max(once(), once())  # creates buffers and connections
    count = torch.tensor([min(max(int(seconds / max(first, 1e-6)), 3), 200)], device=device)
    dist.broadcast(count, 0)  # all ranks repeat as often as rank 0
    return statistics.median(once() for _ in range(int(count)))


if __name__ == "__main__":
    main()
