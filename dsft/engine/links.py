"""The program that `dsft doctor --network` starts on every host for the real backend: takes one order as
JSON on standard input, joins a process group (NCCL on GPUs, gloo on CPUs) with the other hosts', gives the
seconds that all-reduces of several sizes take, as JSON lines on rank 0. It ends with its input.

    {"ranks": [r, …] of this host, "world_size", "address", "port", "backend", "environ",
     "sizes" (bytes), "seconds" for each size}

More than one rank: it starts itself once for each. Imports torch, and no DeepSpeed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from dsft.launch.route import address_towards, interface_of
from dsft.system.process import die_with

TOGETHER = timedelta(seconds=20)  # for all to have imported torch and met, and for each all-reduce


def main() -> int:
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=end_with_input, daemon=True).start()
    os.environ.update(order["environ"])
    if len(order["ranks"]) == 1:
        measure(order)
        return 0
    own = os.getpid()
    running = []  # whose inputs stay open
    for local, rank in enumerate(order["ranks"]):
        one = order | {"ranks": [rank], "local_rank": local, "parent": own}
        process = subprocess.Popen([sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(one) + "\n")
        process.stdin.flush()
        running.append(process)
    return max(abs(process.wait()) for process in running)


def end_with_input() -> None:
    """Whoever started this program is gone, or wants no more of it."""
    sys.stdin.read()
    os._exit(1)


def measure(order: dict[str, Any]) -> None:
    if "parent" in order:
        die_with(order["parent"])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, local = order["ranks"][0], order.get("local_rank", 0)
    on_gpu = order["backend"] == "nccl"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    own = address_towards(order["address"])
    if own is not None and (interface := interface_of(own)) is not None:  # as in a run
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rendezvous = f"tcp://{order['address']}:{order['port']}"
    dist.init_process_group(
        order["backend"], rendezvous, rank=rank, world_size=order["world_size"], timeout=TOGETHER
    )

    def timed(tensor: torch.Tensor) -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    if rank == 0:
        print(json.dumps({"joined": order["world_size"]}), flush=True)
    for size in order["sizes"]:
        tensor = torch.zeros(size // 4, device=device)
        first = max(timed(tensor), timed(tensor))  # buffers and connections are made
        count = torch.tensor([min(max(int(order["seconds"] / max(first, 1e-6)), 3), 200)], device=device)
        dist.broadcast(count, 0)  # each repeats as often as rank 0 says
        spent = [timed(tensor) for _ in range(int(count))]
        if rank == 0:
            print(json.dumps({"bytes": size, "seconds": statistics.median(spent)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
