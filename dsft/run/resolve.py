"""Complete a run's DeepSpeed configuration from its hosts and its model, and cut the model into pipeline
stages.

This happens in two steps: before anything is read, `swap_folders` creates folders for offload to NVMe; after
the model is counted, `resolve` sets all that depends on its size.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dsft.engine.aio import MEASURED, SETTINGS, Rates, fastest, rates
from dsft.engine.world import World
from dsft.errors import StorageError
from dsft.inputs import Inputs
from dsft.model.census import take_census
from dsft.model.files import weight_files
from dsft.plan.census import Census, census_from
from dsft.plan.checkpointing import Limits, decided
from dsft.plan.cut import Cut, cut_of
from dsft.plan.ds_config import bucket_sizes, sized
from dsft.plan.memory.layer import mlp_chunks
from dsft.plan.memory.offload import (
    AIO,
    KEYS,
    PARAMETER_BUFFER,
    SECTIONS,
    largest_part,
    locked_bytes,
    may_pin,
    swap_keys,
    swapped,
    with_pinning,
)
from dsft.plan.memory.ranks import most_tokens
from dsft.plan.memory.sizes import runs_on_cpu, saved_bytes, with_device
from dsft.rank.swap import remove_stale_folders, shared_swap_folder
from dsft.report.memory import room
from dsft.run.job import Config, Job, Log
from dsft.spec.schema import Model, Spec
from dsft.system.disk import check_disk, check_locked, check_swap_space, size_text
from dsft.system.host import host_memory
from dsft.system.run_folder import step_folders


@dataclass(frozen=True)
class Resolved:
    """The settings that follow from the hosts and the size of the model. spec: with the keys of `model` that
    the plan decides; config: the complete DeepSpeed configuration; counted: the model's parameters; cut: the
    pipeline stage of each layer; tokens: that a rank has of the largest micro-batch."""

    spec: Spec
    config: Config
    counted: Census
    cut: Cut
    tokens: int


def resolve(job: Job, inputs: Inputs, world: World, log: Log) -> Resolved:
    """Count the model, bind this process to its own cores, and complete the configuration. A key that the
    user's DeepSpeed JSON sets stays as it is. A collective, before the model is built. Raises DsftError."""
    cuts = job.layout.pipeline_stages > 1
    counted = world.first(lambda: census_from(take_census(job.spec.model, inputs.facts, cuts=cuts)))
    world.first(lambda: check_room(job, counted, inputs.around))
    if counted.trained < counted.numel:
        share = counted.trained / counted.numel
        log(f"trainable parameters: {counted.trained:,} of {counted.numel:,} ({share:.2%})")
    for line in untrained_rows(job.spec.model, inputs, counted):
        log(line)
    config = _with_bucket_sizes(job, job.config, counted, log)
    cut = cut_of(job.spec.parallel, counted)
    if cut.stages > 1:
        log(f"pipeline cut: {', '.join(map(str, cut.counts))} layers")
    if job.cores is not None:
        log(job.cores.bind())
    config = with_pinned_memory(job, config, counted, cut, world, log)
    spec, tokens = (
        with_checkpointing(job, counted, world, log),
        job.layout.part(most_tokens(job.spec, job.layout)),
    )
    chunks = mlp_chunks(spec, counted, tokens)
    if chunks > 1:
        log(f"MLPs: computed in {chunks} chunks of up to {-(-tokens // chunks):,} tokens")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"mlp_chunks": chunks})})
    return Resolved(spec, with_measured_swap(job, config, counted, world, log), counted, cut, tokens)


def with_checkpointing(job: Job, counted: Census, world: World, log: Log) -> Spec:
    """Return the spec with the share of layers that model.gradient_checkpointing: auto means, by what the
    fullest of all ranks can still allocate. A collective."""
    if job.spec.model.gradient_checkpointing != "auto":
        return job.spec
    found = world.gather((socket.gethostname(), room(world.device)))
    hosts = Counter(host for host, _ in found)
    if world.device.type != "cpu":
        limits = Limits(min(free for _, free in found), None)
    elif runs_on_cpu(job.spec):  # the plan then counts the ranks' memory as that of their hosts
        limits = Limits(None, min(free for _, free in found))
    else:
        limits = Limits(min(free // hosts[host] for host, free in found), None)
    planned = with_device(job.spec, world.device.type, world.places[0].device.memory)
    model = decided(planned, counted, counted, job.layout, hosts, limits).model
    spec = job.spec.model_copy(update={"model": model})
    layers = sum(map(spec.model.checkpoints, range(counted.num_layers)))
    log(f"gradient checkpointing: {layers} of {counted.num_layers} layers")
    return spec


def check_room(job: Job, counted: Census, around: PreTrainedConfig | None = None) -> None:
    """Raise StorageError if the disk of the run's folder has no room for a checkpoint and, in a run that has
    no checkpoint yet, the export. Known before the first step, not when the first checkpoint is written.
    around: as in `Inputs`; what the model's files have beside the text model goes into the export too."""
    checkpoint, export = saved_bytes(counted, job.spec)
    name = job.spec.model.name_or_path
    if around is not None and name is not None and job.spec.model.lora is None:
        dtype = around.dtype if isinstance(around.dtype, torch.dtype) else torch.bfloat16
        text = counted.numel * dtype.itemsize
        export += max(0, sum(file.stat().st_size for file in weight_files(name)) - text)
    is_new = not any(step_folders(job.folder))
    needed, free = checkpoint + export * is_new, shutil.disk_usage(job.folder).free
    if free < needed:
        raise StorageError(
            f"output_dir: {job.folder} has {size_text(free, 2)} free, but a checkpoint takes "
            f"{size_text(checkpoint, 2)} and the export {size_text(export, 2)}; free space there, or set "
            "another output_dir."
        )


def untrained_rows(model: Model, inputs: Inputs, counted: Census) -> Iterator[str]:
    """Yield a warning where embeddings with new rows are frozen: these rows stay the mean of the others."""
    if inputs.rows is None:
        return
    size = inputs.config.get_text_config().vocab_size
    frozen = [p for p in counted.parameters if p.layer is None and p.shape[0] == size and not p.trained]
    modules = [n.rsplit(".", 2)[-2] for p in frozen for n in (p.name, *p.aliases)]
    if frozen:
        key = "model.lora.modules_to_save" if model.lora else "model.trainable"
        named = modules if model.lora else [p.name for p in frozen]
        yield (
            f"warning: the new rows of {' and '.join(p.name for p in frozen)} keep the mean of the others, "
            f"since these weights are not trained; {key}: [{', '.join(named)}] trains them"
        )


def _with_bucket_sizes(job: Job, config: Config, counted: Census, log: Log) -> Config:
    """Fill in the bucket sizes, and report each that the user's DeepSpeed JSON sets to another value."""
    elements = counted.elements
    for key, size in bucket_sizes(elements):
        given = config["zero_optimization"].get(key)
        if key in job.decided and given != size:
            log(f"{key}: the DeepSpeed JSON's {given:,} is used; the model's size would give {size:,}")
    return sized(config, elements, job.decided)


# --- page-locked memory -----------------------------------------------------------------------------------


def with_pinned_memory(job: Job, config: Config, counted: Census, cut: Cut, world: World, log: Log) -> Config:
    """Set pin_memory where it is left open: to true if every host has room for the pinned memory, to false if
    not or without a GPU."""
    left_open = tuple(_left_open(job, config))
    if not left_open:
        return config
    if world.device.type == "cpu":
        value, reason = False, "there is no GPU to copy to"
    else:
        mine = locked_bytes(counted, job.spec, job.layout, world.stage, cut)
        value, reason = may_pin(world.gather((socket.gethostname(), mine, host_memory())))
    log(f"pin_memory: {str(value).lower()}, {reason}")
    return with_pinning(config, dict.fromkeys(left_open, value))


def _left_open(job: Job, config: Config) -> Iterator[str]:
    """Yield the offload sections that use host memory and whose pin_memory neither the spec nor the user's
    DeepSpeed JSON sets."""
    parallel, zero = job.spec.parallel, config["zero_optimization"]
    stated = (parallel.offload_optimizer.pin_memory, parallel.offload_parameters.pin_memory)
    for key, of_spec in zip(SECTIONS, stated, strict=True):
        is_there = zero.get(key, {}).get("device") == "cpu"
        if is_there and of_spec is None and key not in job.decided:
            yield key


# --- disks ------------------------------------------------------------------------------------------------


@contextmanager
def swap_folders(job: Job, world: World, log: Log) -> Iterator[Config]:
    """Yield the configuration with swap folders of this run's own, where it offloads to NVMe. Before anything
    is read or built, the disks are checked on every host and stale folders of dead runs removed; at the end,
    this run's folders are removed. Raises DsftError."""
    keys = swap_keys(job.spec)
    if not keys:
        yield job.config
        return
    nonce = world.broadcast(f"{job.spec.name}-{secrets.token_hex(4)}")
    paths = {key: Path(_section(job.config, key)["nvme_path"]).absolute() for key in keys}
    leads = world.local_rank == 0  # the first rank of its host

    def check() -> list[str]:
        for key, path in paths.items():
            check_disk(path, f"parallel.{key}.nvme_path")
        return [line for path in sorted(set(paths.values())) for line in remove_stale_folders(path)]

    for lines in world.gather(world.each(lambda: check() if leads else [])):
        for line in lines:
            log(line)
    with ExitStack() as locks:

        def lock() -> dict[Path, Path]:
            return {
                path: locks.enter_context(shared_swap_folder(path, nonce, job.folder.absolute()))
                for path in sorted(set(paths.values()))
            }

        folders = world.each(lock)
        config = job.config
        for key, path in paths.items():
            config = _with_section(config, key, {"nvme_path": str(folders[path])})
        yield config


def with_measured_swap(job: Job, config: Config, counted: Census, world: World, log: Log) -> Config:
    """Check that disk space and pinnable memory suffice for the model, measure the disks, and return the
    configuration with the aio settings and buffer size that follow. Raises DsftError."""
    keys = swap_keys(job.spec)
    if not keys:
        return config
    zero = config["zero_optimization"]
    needs = swapped(counted, job.spec, job.layout.shards, zero["sub_group_size"])
    folders = {key: Path(_section(config, key)["nvme_path"]) for key in keys}
    hosts = world.gather(socket.gethostname())
    leads = world.local_rank == 0
    parts = {"offload_optimizer": needs.states, "offload_parameters": needs.parameters}

    def fits() -> None:
        check_locked(max(needs.locked, MEASURED))
        ranks = hosts.count(hosts[world.rank])
        for named in _by_disk(folders) if leads else ():
            needed = max(ranks * sum(parts[key] for key in named), MEASURED)
            check_swap_space(folders[named[0]], needed, f"parallel.{' and '.join(named)}.nvme_path")

    world.each(fits)
    buffer = (
        _section(config, "offload_parameters").get("buffer_size") if "offload_parameters" in keys else None
    )
    if buffer == PARAMETER_BUFFER:
        size = {"buffer_size": largest_part(counted, job.layout.shards)}
        config = _with_section(config, "offload_parameters", size)
    if config["aio"] == AIO:  # else the user's JSON sets it
        config = {**config, "aio": dict(_measured(sorted(set(folders.values())), world, leads, log))}
    return config


def _by_disk(folders: Mapping[str, Path]) -> list[list[str]]:
    """Return the keys, grouped by the disk that their folders are on."""
    found: dict[int, list[str]] = {}
    for key, folder in folders.items():
        found.setdefault(folder.stat().st_dev, []).append(key)
    return list(found.values())


def _measured(folders: list[Path], world: World, leads: bool, log: Log) -> Mapping[str, Any]:
    """Measure the swap disks of all hosts, on the first rank of each, and return the aio settings with which
    the slowest disk is fastest."""

    def measure() -> list[tuple[list[Rates], bool]]:
        return [rates(folder) for folder in folders] if leads else []

    found = world.each(measure)
    disks = [disk for host in world.gather(found) for disk in host]
    best = fastest([disk for disk, _ in disks])
    reads, writes = (min(disk[best][way] for disk, _ in disks) / 1e9 for way in (0, 1))
    settings = SETTINGS[best]
    how = "measured now" if any(now for _, now in disks) else "measured at an earlier start"
    log(
        f"aio: the slowest of {len(disks)} swap disk(s) reads {reads:.2f} GB/s and writes {writes:.2f} GB/s "
        f"with block_size {settings['block_size']:,}, queue_depth {settings['queue_depth']} and "
        f"intra_op_parallelism {settings['intra_op_parallelism']} ({how})"
    )
    return settings


def _section(config: Config, key: str) -> Mapping[str, Any]:
    section: Mapping[str, Any] = config["zero_optimization"][KEYS[key]]
    return section


def _with_section(config: Config, key: str, values: Mapping[str, Any]) -> Config:
    zero = config["zero_optimization"]
    return {**config, "zero_optimization": {**zero, KEYS[key]: {**zero[KEYS[key]], **values}}}
