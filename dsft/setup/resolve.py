"""Collect what a run must know of its model and its hosts, write its DeepSpeed configuration, and cut the
model into pipeline stages.

`swap_folders` creates folders for offload to NVMe before anything is read; after the model is counted,
`resolve` finds the other facts (`HostFacts`) and writes every key once.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dsft.errors import StorageError
from dsft.model.census import take_census
from dsft.model.files import weight_files
from dsft.plan.census import Census, Elements, census_from
from dsft.plan.checkpointing import Limits, decided
from dsft.plan.cut import Cut, cut_of
from dsft.plan.ds_config import bucket_sizes, entries
from dsft.plan.ds_entries import ConfigEntry, HostFacts, UserConfig, nested
from dsft.plan.memory.layer import mlp_chunks
from dsft.plan.memory.offload import largest_part, locked_bytes, may_pin, swap_keys, swapped
from dsft.plan.memory.ranks import most_tokens
from dsft.plan.memory.sizes import saved_bytes, with_device
from dsft.rank.swap import remove_stale_folders, shared_swap_folder
from dsft.report.memory import room
from dsft.setup.inputs import Inputs
from dsft.setup.run import Job, Run
from dsft.spec.schema import Model, Spec
from dsft.system.disk import check_disk, check_locked, check_swap_space, size_text
from dsft.system.host import host_memory
from dsft.system.run_folder import step_folders


@dataclass(frozen=True)
class Plan:
    """The settings that follow from the hosts and the size of the model. spec: with the keys of `model` that
    the plan decides; keys: those of the DeepSpeed configuration; counted: the model's parameters; cut: the
    pipeline stage of each layer; tokens: that a rank has of the largest micro-batch."""

    spec: Spec
    keys: Sequence[ConfigEntry]
    counted: Census
    cut: Cut
    tokens: int

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The configuration as `deepspeed.initialize` gets it and the run's deepspeed.json has it."""
        return nested(self.keys)


def resolve(run: Run, inputs: Inputs, found: HostFacts) -> Plan:
    """Count the model, bind this process to its own cores, and write the DeepSpeed configuration. found: the
    facts that are known before the model is counted. A collective, before the model is built. Raises
    DsftError."""
    given, world, log = run.spec, run.world, run.log
    cuts = run.layout.pipeline_stages > 1
    counted = world.first(lambda: census_from(take_census(given.model, inputs.facts, cuts=cuts)))
    world.first(lambda: check_room(run, counted, inputs.around))
    if counted.trained < counted.numel:
        share = counted.trained / counted.numel
        log(f"trainable parameters: {counted.trained:,} of {counted.numel:,} ({share:.2%})")
    for line in untrained_rows(given.model, inputs, counted):
        log(line)
    cut = cut_of(given.parallel, counted)
    if cut.stages > 1:
        log(f"pipeline cut: {', '.join(map(str, cut.counts))} layers")
    if run.cores is not None:
        log(run.cores.bind())
    facts = replace(
        found,
        elements=counted.elements,
        largest_part=largest_part(counted, run.layout.shards),
        pin=pinning(run, counted, cut),
    )
    keys = entries(given, run.batch, facts, run.file)
    if facts.pin is not None and facts.pin[1] in {entry.reason for entry in keys}:
        log(f"pin_memory: {str(facts.pin[0]).lower()}, {facts.pin[1]}")
    for line in kept_sizes(run.file, counted.elements):
        log(line)
    spec = with_checkpointing(run, counted)
    tokens = run.layout.part(most_tokens(given, run.layout))
    chunks = mlp_chunks(spec, counted, tokens)
    if chunks > 1:
        log(f"MLPs: computed in {chunks} chunks of up to {-(-tokens // chunks):,} tokens")
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"mlp_chunks": chunks})})
    plan = Plan(spec, keys, counted, cut, tokens)
    if facts.swap:
        check_swap(run, plan, facts.swap)
    return plan


def kept_sizes(file: UserConfig | None, elements: Elements) -> Iterator[str]:
    """Yield a line for each bucket size of the user's JSON that differs from what the model's size gives."""
    for key, size in bucket_sizes(elements):
        given = file.values.get(f"zero_optimization.{key}", size) if file else size
        if given != size:
            yield f"{key}: the DeepSpeed JSON's {given:,} is used; the model's size would give {size:,}"


def with_checkpointing(run: Run, counted: Census) -> Spec:
    """Return the spec with the share of layers that model.gradient_checkpointing: auto means, by what the
    fullest of all ranks can still allocate. A collective."""
    world = run.world
    if run.spec.model.gradient_checkpointing != "auto":
        return run.spec
    found = world.gather((socket.gethostname(), room(world.device)))
    hosts = Counter(host for host, _ in found)
    if world.device.type != "cpu":
        limits = Limits(min(free for _, free in found), None)
    elif run.spec.is_on_cpu:  # the plan then counts the ranks' memory as that of their hosts
        limits = Limits(None, min(free for _, free in found))
    else:
        limits = Limits(min(free // hosts[host] for host, free in found), None)
    planned = with_device(run.spec, world.device.type, world.places[0].device.memory)
    share = decided(planned, counted, counted, run.layout, hosts, limits).model.gradient_checkpointing
    model = run.spec.model.model_copy(update={"gradient_checkpointing": share})
    spec = run.spec.model_copy(update={"model": model})
    layers = sum(map(spec.model.checkpoints, range(counted.num_layers)))
    run.log(f"gradient checkpointing: {layers} of {counted.num_layers} layers")
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


def pinning(run: Run, counted: Census, cut: Cut) -> tuple[bool, str] | None:
    """Return whether offloaded states in host memory are pinned, and why: if every host has room for all that
    its ranks would pin, and there is a GPU. None where nothing is offloaded to host memory. A collective."""
    parallel, world = run.spec.parallel, run.world
    if "cpu" not in (parallel.offload_optimizer.device, parallel.offload_parameters.device):
        return None
    if world.device.type == "cpu":
        return False, "there is no GPU to copy to"
    mine = locked_bytes(counted, run.spec, run.layout, world.stage, cut)
    return may_pin(world.gather((socket.gethostname(), mine, host_memory())))


# --- disks ------------------------------------------------------------------------------------------------


@contextmanager
def swap_folders(run: Run) -> Iterator[dict[str, str]]:
    """Yield the run's own swap folders where it offloads to NVMe, by the key of `parallel`. Before anything
    is read or built, the disks are checked on every host and stale folders of dead runs removed; at the end,
    this run's folders are removed. Raises DsftError."""
    parallel, world = run.spec.parallel, run.world
    paths = {key: Path(getattr(parallel, key).nvme_path).absolute() for key in swap_keys(run.spec)}
    if not paths:
        yield {}
        return
    nonce = world.broadcast(f"{run.spec.name}-{secrets.token_hex(4)}")
    leads = world.local_rank == 0  # the first rank of its host

    def check() -> list[str]:
        for key, path in paths.items():
            check_disk(path, f"parallel.{key}.nvme_path")
        return [line for path in sorted(set(paths.values())) for line in remove_stale_folders(path)]

    for lines in world.gather(world.each(lambda: check() if leads else [])):
        for line in lines:
            run.log(line)
    with ExitStack() as locks:

        def lock() -> dict[Path, str]:
            return {
                path: str(locks.enter_context(shared_swap_folder(path, nonce, run.folder.absolute())))
                for path in sorted(set(paths.values()))
            }

        folders = world.each(lock)
        yield {key: folders[path] for key, path in paths.items()}


def check_swap(run: Run, plan: Plan, swap: Mapping[str, str]) -> None:
    """Check that disk space and pinnable memory suffice for what the run offloads to NVMe. A collective.
    swap: as `swap_folders` yields it. Raises StorageError."""
    sub_group = plan.config["zero_optimization"]["sub_group_size"]
    needs = swapped(plan.counted, run.spec, run.layout.shards, sub_group)
    world = run.world
    hosts = world.gather(socket.gethostname())
    bytes_of = {"offload_optimizer": needs.states, "offload_parameters": needs.parameters}
    disks: dict[int, list[str]] = {}
    for key, folder in swap.items():
        disks.setdefault(os.stat(folder).st_dev, []).append(key)

    def fits() -> None:
        check_locked(needs.locked)
        for keys in disks.values() if world.local_rank == 0 else ():
            needed = hosts.count(hosts[world.rank]) * sum(bytes_of[key] for key in keys)
            check_swap_space(Path(swap[keys[0]]), needed, f"parallel.{' and '.join(keys)}.nvme_path")

    world.each(fits)
