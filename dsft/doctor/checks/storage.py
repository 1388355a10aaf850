"""Free space against what the run keeps, the shared output folder, and /dev/shm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsft.doctor.finding import Finding, passed
from dsft.doctor.needs import EXTENSIONS, HUB, Place
from dsft.doctor.seen import GIB, Seen, gib

FLOOR, LITTLE = 256 << 20, 2 * GIB
"""Bytes below which a run cannot be expected to write at all; below which one is warned, where its own sizes
are not known."""
SHM_OF_RANK = 69 << 20
"""Of /dev/shm, per rank on CPUs: DeepSpeed's buffer for adding up in shared memory, 69 MB."""
SHM_OF_NCCL = GIB
"""NCCL keeps tens of MB per pair of GPUs there; containers have 64 MiB where nobody says otherwise."""

_WHAT = {
    "output_dir": "checkpoints, logs and the export are written there",
    "data.cache_dir": "the tokens of the data are made there",
    EXTENSIONS: "DeepSpeed's operations are compiled there",
    HUB: "models and data of the hub are downloaded there",
}


def space(seen: Seen) -> Iterator[Finding]:
    for host, part in seen.part("storage"):
        for key, folder in part["folders"].items():
            yield _of_folder(host, key, folder, seen.needs.places[key])


def _of_folder(host: str, key: str, folder: Mapping[str, Any], place: Place) -> Finding:
    named = f"{key} {folder['path']}"
    why = _WHAT.get(key, "the optimizer's states are swapped there")
    if folder["refused"] is not None:
        said = folder["refused"]
        value = said if "nvme_path" in key else f"{named} cannot be written ({said})"
        return Finding("space", host, "failure", value, why, "make it writable there, or name another folder")
    free = folder["free"]
    least = FLOOR if place.least is None else max(place.least, 1 << 20)
    if key in (EXTENSIONS, "data.cache_dir", HUB):
        least = min(least, 64 << 20)
    value = f"{named} has {gib(free)} free"
    do = "free space, or name another folder"
    if free < least:
        needs = f", and the run needs {gib(least)}" if place.least is not None else ""
        return Finding("space", host, "failure", f"{value}{needs}", f"{why}; a full disk ends the run", do)
    if place.wanted is not None and free < place.wanted:
        return Finding(
            "space", host, "warning", f"{value}, and all that the run keeps takes {gib(place.wanted)}",
            f"{why}; a full disk ends the run", f"{do}, or lower checkpoint.keep_last",
        )  # fmt: skip
    if place.wanted is None and free < LITTLE and key != EXTENSIONS:
        return Finding(
            "space", host, "warning", f"{value}; what the run needs is not known here", why,
            f"{do}; dsft plan SPEC counts the model, and the doctor knows its size from then on",
        )  # fmt: skip
    return passed("space", host, value + (f" of {gib(place.wanted)} needed" if place.wanted else ""))


def shared(seen: Seen) -> Iterator[Finding]:
    """The first host wrote a file, and the others looked for it."""
    if len(seen.slots) < 2 or seen.needs.first not in seen.visits.first:
        return
    written, folder = seen.visits.first[seen.needs.first].get("shared"), seen.needs.spec.output_dir
    if written is None:  # it cannot be written, which `space` tells
        return
    blind = {
        host: said["sees"]
        for host, said in seen.visits.second.items()
        if host != seen.needs.first and said.get("sees") != "yes"
    }
    for host, said in blind.items():
        yield Finding(
            "shared", host, "failure",
            f"output_dir {folder} is another folder than on {seen.needs.first} (a file of its own: {said})",
            "every rank writes its part of a checkpoint there, and reads all of it when the run goes on",
            "mount one disk at this path on all hosts, or name a folder on one that they share in output_dir",
        )  # fmt: skip
    if not blind and len(seen.visits.second) > 1:
        yield passed("shared", None, f"output_dir {folder} is one folder for all")


def shared_memory(seen: Seen) -> Iterator[Finding]:
    for host, part in seen.part("storage"):
        slots, found = seen.slots[host] or 1, part["shm"]
        do = "mount -o remount,size=8G /dev/shm, or --shm-size=8g (or --ipc=host) for a container"
        if found is None:
            yield Finding(
                "shm", host, "failure", "there is no /dev/shm", "ranks of a host meet there", "mount -t tmpfs"
                " tmpfs /dev/shm"
            )  # fmt: skip
        elif seen.on_cpu(host) and found["free"] < slots * SHM_OF_RANK:
            yield Finding(
                "shm", host, "failure", f"/dev/shm has {gib(found['free'])} free for {slots} rank(s)",
                "DeepSpeed keeps 69 MB a rank there, and a rank that gets none ends with `bus error`", do,
            )  # fmt: skip
        elif not seen.on_cpu(host) and found["free"] < SHM_OF_NCCL:
            yield Finding(
                "shm", host, "warning", f"/dev/shm has {gib(found['free'])} free",
                "NCCL and data loaders share memory there, and end with `bus error` where it is full", do,
            )  # fmt: skip
        else:
            yield passed("shm", host, f"/dev/shm has {gib(found['free'])} free")
