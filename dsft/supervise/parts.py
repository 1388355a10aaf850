"""What each host is to run: takes the hosts and their slots, the launcher and train.py's own arguments, gives
argument vectors and variables. Pure but for the environment that it is given.

A launcher's program for one host is started by that host's agent, so that neither pdsh nor ssh carries an
argument: `deepspeed.launcher.launch` and `torch.distributed.run` are what the commands `deepspeed` and
`torchrun` start there too (deepspeed/launcher/multinode_runner.py:94 active_workers).
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from dsft.plan.launch import environment
from dsft.plan.torchrun import SIGNALS
from dsft.spec.schema import Cluster
from dsft.supervise.wire import Order

TRAIN = Path(__file__).resolve().parents[1] / "train.py"

FORWARDED = (
    "HF_*", "HUGGING_FACE_*", "HUGGINGFACE_*", "TRANSFORMERS_*", "TOKENIZERS_*", "WANDB_*", "SWANLAB_*",
    "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "OMP_*", "MKL_*", "KMP_*", "GOMP_*", "TORCH_*", "PYTORCH_*",
    "TRITON_*", "CUDA_*", "DS_*", "DEEPSPEED_*", "DSFT_*", "PYTHON*", "LD_LIBRARY_PATH", "CC", "CXX",
    "CFLAGS", "CXXFLAGS", "MAX_JOBS", "XDG_CACHE_HOME", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
    "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
    "LANG", "LC_ALL", "TZ",
)  # fmt: skip
"""Variables that other hosts get from here. Others they have of their own, or get by `cluster.env`."""

NOT_FORWARDED = (
    "CUDA_VISIBLE_DEVICES",
    "DS_ENV_FILE",
    "DSFT_JOB",
    "DSFT_LOGS",
    "DSFT_PULSE",
    "DSFT_SSH_ARGS",
)
"""Of those, what is another's on another host, or of the start alone."""

_FORWARDED = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in FORWARDED))


@dataclass(frozen=True)
class World:
    """hosts: host -> slots, in the order of the ranks. program: train.py with its arguments. folder: where it
    runs, on every host. logs: of the run."""

    launcher: str
    hosts: Mapping[str, int]
    program: tuple[str, ...]
    folder: str
    logs: str
    job: str

    @property
    def ranks(self) -> dict[str, tuple[int, ...]]:
        ends = accumulate(self.hosts.values())
        return {
            host: tuple(range(end - slots, end))
            for (host, slots), end in zip(self.hosts.items(), ends, strict=True)
        }


def orders(world: World, address: str, port: int, environ: Mapping[str, str]) -> dict[str, Order]:
    """Host -> its order. address, port: of rank 0."""
    ranks = world.ranks
    return {
        host: Order(
            host,
            f"{world.job}.{node}",
            tuple(launcher_argv(world, node, address, port)),
            environ,
            world.folder,
            world.logs,
            ranks[host],
        )
        for node, host in enumerate(world.hosts)
    }


def launcher_argv(world: World, node: int, address: str, port: int) -> list[str]:
    """Of one host, of which `node` is the number."""
    rendezvous = [f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}"]
    if world.launcher == "deepspeed":
        info = [f"--world_info={world_info(world.hosts)}", "--no_local_rank"]
        return [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *info, *rendezvous, *world.program]
    slots = list(world.hosts.values())[node]
    counts = [f"--nnodes={len(world.hosts)}", f"--nproc_per_node={slots}"]
    torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", SIGNALS]
    return [*torchrun, *counts, *rendezvous, *world.program]


def world_info(hosts: Mapping[str, int]) -> str:
    """As deepspeed/launcher/runner.py encodes host -> numbers of its devices."""
    devices = {host: list(range(slots)) for host, slots in hosts.items()}
    return base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()


def forwarded(environ: Mapping[str, str], cluster: Cluster | None) -> dict[str, str]:
    """What the ranks get: the variables of FORWARDED, then those that the spec's cluster says."""
    named = {
        name: value
        for name, value in environ.items()
        if _FORWARDED.fullmatch(name) and name not in NOT_FORWARDED
    }
    return {**named, **environment(cluster)}


def address_of(host: str, addresses: Mapping[str, Sequence[str]], interface: str | None) -> str:
    """Where the other hosts reach it, by its own interfaces: of the one that is named, else the first that is
    not the loopback; 127.0.0.1 where it has no other."""
    if interface is not None and addresses.get(interface):
        return addresses[interface][0]
    found = [each for listed in addresses.values() for each in listed if not _is_local(each)]
    if host in found:
        return host
    return next((each for each in found if ":" not in each), next(iter(found), "127.0.0.1"))


def _is_local(address: str) -> bool:
    return address.startswith(("127.", "fe80:")) or address == "::1" or "%" in address
