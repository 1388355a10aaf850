"""What a run swaps to disks (offload to NVMe): takes a job, gives it back with folders of its own on every
host, measured settings and buffers of the model's size; nothing where it swaps nothing.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsft.engine.aio import MEASURED, SETTINGS, Rates, fastest, rates
from dsft.engine.world import World
from dsft.job.api import Job, Say
from dsft.launch.swap import clear_left_over, hold_swap_folder
from dsft.plan.census import Census
from dsft.plan.memory.offload import AIO, KEYS, PARAMETER_BUFFER, largest_part, swap_keys, swapped
from dsft.system.disk import check_disk, check_locked, check_space


@contextmanager
def swap_folders(job: Job, world: World, say: Say) -> Iterator[Job]:
    """Checked on every host before anything is read or built, cleared of what dead runs have left, removed at
    the end. Raises DsftError."""
    keys = swap_keys(job.spec)
    if not keys:
        yield job
        return
    nonce = world.broadcast(f"{job.spec.name}-{secrets.token_hex(4)}")
    paths = {key: Path(_section(job.config, key)["nvme_path"]).absolute() for key in keys}
    leads = world.local_rank == 0  # of its host

    def check() -> list[str]:
        for key, path in paths.items():
            check_disk(path, f"parallel.{key}.nvme_path")
        return [line for path in sorted(set(paths.values())) for line in clear_left_over(path)]

    for lines in world.gather(world.each(lambda: check() if leads else [])):
        for line in lines:
            say(line)
    with ExitStack() as held:

        def hold() -> dict[Path, Path]:
            return {
                path: held.enter_context(hold_swap_folder(path, nonce, job.folder.absolute()))
                for path in sorted(set(paths.values()))
            }

        folders = world.each(hold)
        config = job.config
        for key, path in paths.items():
            config = _with_section(config, key, {"nvme_path": str(folders[path])})
        yield replace(job, config=config)


def measured_swap(job: Job, counted: Census, world: World, say: Say) -> Job:
    """Space and locked memory held against the model's, the disks measured, and what follows from that in the
    configuration, but for what the user's own JSON decides. Raises DsftError."""
    keys = swap_keys(job.spec)
    if not keys:
        return job
    zero = job.config["zero_optimization"]
    needs = swapped(counted, job.spec, job.layout.shards, zero["sub_group_size"])
    folders = {key: Path(_section(job.config, key)["nvme_path"]) for key in keys}
    hosts = world.gather(socket.gethostname())
    leads = world.local_rank == 0
    parts = {"offload_optimizer": needs.states, "offload_parameters": needs.parameters}

    def fits() -> None:
        check_locked(max(needs.locked, MEASURED))
        ranks = hosts.count(hosts[world.rank])
        for named in _by_disk(folders) if leads else ():
            needed = max(ranks * sum(parts[key] for key in named), MEASURED)
            check_space(folders[named[0]], needed, f"parallel.{' and '.join(named)}.nvme_path")

    world.each(fits)
    config = job.config
    buffer = (
        _section(config, "offload_parameters").get("buffer_size") if "offload_parameters" in keys else None
    )
    if buffer == PARAMETER_BUFFER:
        size = {"buffer_size": largest_part(counted, job.layout.shards)}
        config = _with_section(config, "offload_parameters", size)
    if config["aio"] == AIO:  # else the user's own JSON says how
        config = {**config, "aio": dict(_measured(sorted(set(folders.values())), world, leads, say))}
    return replace(job, config=config)


def _by_disk(folders: Mapping[str, Path]) -> list[list[str]]:
    """The keys, those whose folders share a disk together."""
    found: dict[int, list[str]] = {}
    for key, folder in folders.items():
        found.setdefault(folder.stat().st_dev, []).append(key)
    return list(found.values())


def _measured(folders: list[Path], world: World, leads: bool, say: Say) -> Mapping[str, Any]:
    """The settings for all disks of all hosts, which their first ranks measure."""

    def measure() -> list[tuple[list[Rates], bool]]:
        return [rates(folder) for folder in folders] if leads else []

    found = world.each(measure)
    told = [disk for host in world.gather(found) for disk in host]
    best = fastest([disk for disk, _ in told])
    reads, writes = (min(disk[best][way] for disk, _ in told) / 1e9 for way in (0, 1))
    settings = SETTINGS[best]
    how = "measured now" if any(now for _, now in told) else "measured at an earlier start"
    say(
        f"aio: the slowest of {len(told)} swap disk(s) reads {reads:.2f} GB/s and writes {writes:.2f} GB/s "
        f"with block_size {settings['block_size']:,}, queue_depth {settings['queue_depth']} and "
        f"intra_op_parallelism {settings['intra_op_parallelism']} ({how})"
    )
    return settings


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = config["zero_optimization"][KEYS[key]]
    return section


def _with_section(config: Mapping[str, Any], key: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    zero = config["zero_optimization"]
    return {**config, "zero_optimization": {**zero, KEYS[key]: {**zero[KEYS[key]], **values}}}
