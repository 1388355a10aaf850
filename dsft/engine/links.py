"""Time an all-reduce over all ranks and the links between hosts, on the backend that a run would use: what
each rank of `dsft doctor --network` runs (`dsft.launcher.network`). Imports torch, but not DeepSpeed.

Rank 0 prints one line of JSON; hosts are numbers, in the order of their ranks:

{"backend", "processes", "reduces": [[bytes, seconds], …],
 "links": [[sender, receiver, seconds of a message of 4 bytes, Gbit/s of the largest all-reduce's bytes], …]}
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsft.rank.environment import detect
from dsft.rank.route import address_towards, interface_of

SIZES = {"gloo": (4, 65_536, 1 << 20, 1 << 24), "nccl": (4, 1 << 20, 1 << 24, 1 << 28)}
LONG = 0.05  # seconds of an all-reduce, other than the smallest, after which no larger one is tried
TIMEOUT = timedelta(seconds=60)
REPEATS = 10  # of which the median counts; the first is not measured, since it connects


def main() -> None:
    torch.set_num_threads(1)
    launched = detect(os.environ)
    on_gpu = os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.device_count() > launched.local_rank
    backend, device = ("nccl", torch.device("cuda", launched.local_rank)) if on_gpu else ("gloo", None)
    if device is not None:
        torch.cuda.set_device(device)
    interface = interface_of(address_towards(launched.master_addr) or "")
    if interface is not None:  # over which this host reaches the others, as in a run
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group(backend, timeout=TIMEOUT, device_id=device)
    reduces: list[tuple[int, float]] = []
    for size in SIZES[backend]:
        reduces.append((size, time_all_reduce(size, device)))
        if len(reduces) > 1 and reduces[-1][1] > LONG:  # the first has too few bytes for a Gbit/s
            break
    place = gathered(launched.local_rank)
    leaders = [rank for rank, local in enumerate(place) if local == 0]
    own = time_links(leaders, reduces[-1][0], device) if launched.local_rank == 0 else []
    found = {
        "backend": backend, "processes": len(place), "reduces": reduces,
        "links": [link for links in gathered(own) for link in links],
    }  # fmt: skip
    if launched.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def gathered(mine: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def time_all_reduce(size: int, device: torch.device | None) -> float:
    """Return rank 0's median time of an all-reduce of `size` bytes, in seconds, on all ranks."""
    values = torch.zeros(size // 4, device=device)
    took = torch.tensor([median_time(lambda: dist.all_reduce(values), device)], device=device)
    dist.broadcast(took, 0)
    return took.item()


def time_links(
    leaders: Sequence[int], size: int, device: torch.device | None
) -> list[tuple[int, int, float, float]]:
    """Return what this host receives from each other one: (sender, this host, seconds, Gbit/s). leaders: the
    first rank of each host.

    In round n each host sends to the n-th after it while it receives from the n-th before it, so that every
    direction is measured once and no host sends twice at a time.
    """
    own, links = leaders.index(dist.get_rank()), []
    for distance in range(1, len(leaders)):
        to, sender = (own + distance) % len(leaders), (own - distance) % len(leaders)

        def exchange(values: torch.Tensor, to: int = leaders[to], sender: int = leaders[sender]) -> None:
            received = torch.empty_like(values)
            both = [dist.P2POp(dist.isend, values, to), dist.P2POp(dist.irecv, received, sender)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        small, large = torch.zeros(1, device=device), torch.zeros(size // 4, device=device)
        seconds = median_time(lambda: exchange(small), device)  # noqa: B023  called in this round
        gbit = size * 8e-9 / median_time(lambda: exchange(large), device)  # noqa: B023
        links.append((sender, own, seconds, gbit))
    return links


def median_time(work: Callable[[], object], device: torch.device | None) -> float:
    """Return the median duration of `work` in seconds, of a GPU's part too."""
    spent = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        work()
        if device is not None:
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - began)
    return statistics.median(spent[1:])


if __name__ == "__main__":
    main()
