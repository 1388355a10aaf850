"""Work out what a run needs of its hosts: what the probe of each host has to look at (`Needs.orders`), and
sizes as far as they are known. Uses the model's census if one is cached; takes none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsft.doctor.storage import EXTENSIONS, HUB
from dsft.engine.toolchain import ON_CPU, needed_ops
from dsft.errors import SpecError
from dsft.generate.scripts import environment
from dsft.plan.census import Census, known_census
from dsft.plan.memory.offload import Swapped, swap_keys, swapped
from dsft.plan.memory.sizes import saved_bytes
from dsft.remote import forwarded
from dsft.spec.layout import layout_of
from dsft.spec.schema import Spec
from dsft.spec.sources import BUILTIN_PREFIX, hub_data
from dsft.system.run_folder import step_folders


@dataclass(frozen=True)
class FolderNeeds:
    """A folder.

    path    None: each host finds it from its own variables
    least   bytes without which the run ends before its end; None if unknown
    wanted  bytes with everything that the run keeps; None if unknown
    """

    path: str | None
    least: int | None = None
    wanted: int | None = None


@dataclass(frozen=True)
class Needs:
    """What the doctor checks, and on which hosts.

    hosts    host -> slots; None if the spec has no cluster
    port     rank 0's
    places   key -> folder
    locked   bytes that a process locks; None if unknown
    inputs   for `inputs.look`
    through  srun inside a Slurm allocation if that is the spec's launcher, else ssh
    """

    spec: Spec
    hosts: Mapping[str, int | None]
    port: int
    places: Mapping[str, FolderNeeds]
    locked: int | None
    inputs: tuple[Mapping[str, str], ...]
    ops: tuple[str, ...]
    environ: Mapping[str, str]
    through: Literal["ssh", "srun"] = "ssh"
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def first(self) -> str:
        """The host of rank 0."""
        return next(iter(self.hosts))

    def orders(self, host: str) -> dict[str, Any]:
        leads = host == self.first
        return {
            "folder": os.getcwd(),
            "names": list(self.hosts) if len(self.hosts) > 1 else [],
            "port": self.port if leads else None,
            "folders": {key: place.path for key, place in self.places.items()},
            "shared": self.spec.output_dir if leads and len(self.hosts) > 1 else None,
            "nonce": self.nonce,
            "inputs": [dict(each) for each in self.inputs],
            "ops": list(self.ops),
            "ops_on_cpu": [ON_CPU],
        }


def needs_of(
    spec: Spec, spec_path: Path, hosts: Mapping[str, int] | None, port: int, environ: Mapping[str, str] | None
) -> Needs:
    """Return the needs of a spec. hosts: in place of the spec's; environ: variables that each rank gets, by
    default those that `dsft.remote.forwarded` selects here."""
    own = hosts or (spec.cluster.hosts if spec.cluster else None)
    slots: Mapping[str, int | None] = dict(own) if own else {"localhost": None}
    census = known_census(spec.model)
    swap = _swapped(spec, census, slots)
    given = forwarded(os.environ, spec.cluster) if environ is None else environ
    is_slurm = spec.cluster is not None and spec.cluster.launcher == "slurm"
    return Needs(
        spec,
        slots,
        port,
        dict(_places(spec, census, swap, slots)),
        swap.locked if swap else None,
        tuple(_inputs(spec, spec_path)),
        tuple(needed_ops(spec)),
        {**given, **environment(spec.cluster)},
        "srun" if is_slurm and os.environ.get("SLURM_JOB_ID") else "ssh",
    )


def _swapped(spec: Spec, census: Census | None, hosts: Mapping[str, int | None]) -> Swapped | None:
    slots = [count for count in hosts.values() if count is not None]
    if census is None or not swap_keys(spec) or not slots:
        return None
    try:
        return swapped(census, spec, layout_of(spec.parallel, sum(slots)).shards)
    except SpecError:  # a hostfile of another size: the run's start reports it
        return None


def _places(
    spec: Spec, census: Census | None, swap: Swapped | None, hosts: Mapping[str, int | None]
) -> Iterator[tuple[str, FolderNeeds]]:
    yield "output_dir", _output(spec, census)
    if any(not source.path.startswith(BUILTIN_PREFIX) for source in (*spec.data.train, *spec.data.eval)):
        cache = spec.data.cache_dir or str(Path(spec.output_dir, ".cache", "data"))
        yield "data.cache_dir", FolderNeeds(cache)
    yield EXTENSIONS, FolderNeeds(None)
    if any(each["kind"].startswith("hub-") for each in _inputs(spec, Path())):
        yield HUB, FolderNeeds(None)
    most = max((count or 1 for count in hosts.values()), default=1)
    for key in swap_keys(spec):
        folder = getattr(spec.parallel, key).nvme_path
        if folder is not None:
            size = None
            if swap is not None:
                size = most * (swap.states if key == "offload_optimizer" else swap.parameters)
            yield f"parallel.{key}.nvme_path", FolderNeeds(folder, size, size)


def _output(spec: Spec, census: Census | None) -> FolderNeeds:
    """Return the output folder with its sizes: a checkpoint is written before an older one is removed, and
    the export comes last."""
    if census is None:
        return FolderNeeds(spec.output_dir)
    checkpoint, export = saved_bytes(census, spec)
    there = len(step_folders(Path(spec.output_dir, spec.name)))
    most = (spec.checkpoint.keep_last or 1) + (spec.checkpoint.keep_best or 0)
    return FolderNeeds(spec.output_dir, checkpoint + export, max(1, most + 1 - there) * checkpoint + export)


def _inputs(spec: Spec, spec_path: Path) -> Iterator[dict[str, str]]:
    yield {"key": "the spec", "path": str(spec_path), "kind": "file"}
    for part, sources in (("train", spec.data.train), ("eval", spec.data.eval)):
        for index, source in enumerate(sources):
            if not source.path.startswith(BUILTIN_PREFIX):
                yield _data(f"data.{part}.{index}.path", source.path)
    if spec.data.chat_template is not None and Path(spec.data.chat_template).is_file():
        yield {"key": "data.chat_template", "path": spec.data.chat_template, "kind": "file"}
    named = {"model.name_or_path": spec.model.name_or_path, "model.tokenizer": spec.model.tokenizer}
    if spec.model.lora is not None:
        named["model.lora.path"] = spec.model.lora.path
    if spec.reference is not None:
        named[spec.own_key("reference_model")] = spec.reference.reference_model
    for key, name in named.items():
        if name is not None:
            yield {"key": key, "path": name, "kind": "folder" if Path(name).exists() else "hub-model"}


def _data(key: str, path: str) -> dict[str, str]:
    hub = None if Path(path).exists() else hub_data(path)
    if hub is None:
        return {"key": key, "path": path, "kind": "data"}
    return {"key": key, "path": hub.id + (f"@{hub.revision}" if hub.revision else ""), "kind": "hub-data"}
