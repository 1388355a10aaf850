"""Check folders and /dev/shm: `look` writes a temporary file in each folder; the first host writes a file
with a nonce that the others look for. The checks compare free space with what the run keeps."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.doctor.finding import GIB, CheckResult, gib, passed
from dsft.errors import StorageError
from dsft.system.disk import check_disk

if TYPE_CHECKING:
    from dsft.doctor.finding import ProbeResults
    from dsft.doctor.needs import FolderNeeds

SHM = Path("/dev/shm")
NVME = "nvme_path"
EXTENSIONS, HUB = "TORCH_EXTENSIONS_DIR", "HF_HUB_CACHE"
"""Folders that each host finds from its own variables."""
FLOOR, LITTLE = 256 << 20, 2 * GIB
"""Free bytes below which a run is expected to fail; below which a warning is given, if the run's sizes are
unknown."""
SHM_OF_RANK = 69 << 20
"""Bytes of /dev/shm per rank on CPUs: DeepSpeed's buffer for reductions in shared memory, 69 MB."""
SHM_OF_NCCL = GIB
"""Bytes of /dev/shm for NCCL, which uses tens of MB per pair of GPUs; the default of containers is 64 MiB."""

_WHAT = {
    "output_dir": "checkpoints, logs and the export are written there",
    "data.cache_dir": "the tokens of the data are made there",
    EXTENSIONS: "DeepSpeed's operations are compiled there",
    HUB: "models and data of the hub are downloaded there",
}


def look(folders: Mapping[str, str]) -> dict[str, Any]:
    """Return facts about the folders (key -> path) and {free: bytes} of /dev/shm, None if it does not
    exist."""
    free = {"free": shutil.disk_usage(SHM).free} if SHM.is_dir() else None
    return {"folders": {key: folder(key, Path(path)) for key, path in folders.items()}, "shm": free}


def folder(key: str, path: Path) -> dict[str, Any]:
    """Return facts about a folder. place: the folder, or its nearest existing parent; refused: why it cannot
    be used."""
    facts: dict[str, Any] = {"path": str(path), "refused": None}
    try:
        place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        facts |= {"place": str(place), "free": shutil.disk_usage(place).free}
        if NVME in key:
            check_disk(path, key)
        else:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"\0" * 4096)
                file.flush()
    except OSError as error:
        facts["refused"] = error.strerror or str(error)
    except StorageError as error:
        facts["refused"] = str(error)
    return facts


@contextmanager
def nonce_file(shared: str, nonce: str) -> Iterator[str | None]:
    """Write a file with the nonce to the shared folder; yield its path, None if it cannot be written. At the
    end, remove the file and the folders created for it."""
    folder, made = Path(shared).absolute(), []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        made.append(each)
    file = folder / f".dsft-doctor-{nonce}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(nonce, encoding="utf-8")
    except OSError:
        yield None
    else:
        yield str(file)
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: a run has begun to use it
            for each in made:
                each.rmdir()


def sees(path: str, nonce: str) -> str:
    """Return `yes`, or why the nonce file is not visible. Lists the folder first, since a network disk may
    cache the file's absence."""
    try:
        os.listdir(Path(path).parent)
        return "yes" if Path(path).read_text(encoding="utf-8") == nonce else "it holds something else"
    except OSError as error:
        return error.strerror or str(error)


def space(seen: ProbeResults) -> Iterator[CheckResult]:
    for host, part in seen.part("storage"):
        for key, folder in part["folders"].items():
            yield _of_folder(host, key, folder, seen.needs.places[key])


def _of_folder(host: str, key: str, folder: Mapping[str, Any], place: FolderNeeds) -> CheckResult:
    named = f"{key} {folder['path']}"
    why = _WHAT.get(key, "the optimizer's states are swapped there")
    if folder["refused"] is not None:
        said = folder["refused"]
        value = said if "nvme_path" in key else f"{named} cannot be written ({said})"
        return CheckResult(
            "space", host, "failure", value, why, "make it writable there, or name another folder"
        )
    free = folder["free"]
    least = FLOOR if place.least is None else max(place.least, 1 << 20)
    if key in (EXTENSIONS, "data.cache_dir", HUB):
        least = min(least, 64 << 20)
    value = f"{named} has {gib(free)} free"
    do = "free space, or name another folder"
    if free < least:
        needs = f", and the run needs {gib(least)}" if place.least is not None else ""
        return CheckResult(
            "space", host, "failure", f"{value}{needs}", f"{why}; a full disk ends the run", do
        )
    if place.wanted is not None and free < place.wanted:
        return CheckResult(
            "space", host, "warning", f"{value}, and all that the run keeps takes {gib(place.wanted)}",
            f"{why}; a full disk ends the run", f"{do}, or lower checkpoint.keep_last",
        )  # fmt: skip
    if place.wanted is None and free < LITTLE and key != EXTENSIONS:
        return CheckResult(
            "space", host, "warning", f"{value}; what the run needs is not known here", why,
            f"{do}; dsft plan SPEC counts the model, and the doctor knows its size from then on",
        )  # fmt: skip
    return passed("space", host, value + (f" of {gib(place.wanted)} needed" if place.wanted else ""))


def shared(seen: ProbeResults) -> Iterator[CheckResult]:
    """Check that the others see the file that the first host wrote."""
    if len(seen.slots) < 2 or seen.needs.first not in seen.visits.first:
        return
    written, folder = seen.visits.first[seen.needs.first].get("shared"), seen.needs.spec.output_dir
    if written is None:  # it cannot be written, which `space` reports
        return
    blind = {
        host: said["sees"]
        for host, said in seen.visits.second.items()
        if host != seen.needs.first and said.get("sees") != "yes"
    }
    for host, said in blind.items():
        yield CheckResult(
            "shared", host, "failure",
            f"output_dir {folder} is another folder than on {seen.needs.first} (a file of its own: {said})",
            "every rank writes its part of a checkpoint there, and reads all of it when the run goes on",
            "mount one disk at this path on all hosts, or name a folder on one that they share in output_dir",
        )  # fmt: skip
    if not blind and len(seen.visits.second) > 1:
        yield passed("shared", None, f"output_dir {folder} is one folder for all")


def shared_memory(seen: ProbeResults) -> Iterator[CheckResult]:
    for host, part in seen.part("storage"):
        slots, found = seen.slots[host] or 1, part["shm"]
        do = "mount -o remount,size=8G /dev/shm, or --shm-size=8g (or --ipc=host) for a container"
        if found is None:
            yield CheckResult(
                "shm", host, "failure", "there is no /dev/shm", "ranks of a host meet there", "mount -t tmpfs"
                " tmpfs /dev/shm"
            )  # fmt: skip
        elif seen.on_cpu(host) and found["free"] < slots * SHM_OF_RANK:
            yield CheckResult(
                "shm", host, "failure", f"/dev/shm has {gib(found['free'])} free for {slots} rank(s)",
                "DeepSpeed keeps 69 MB a rank there, and a rank that gets none ends with `bus error`", do,
            )  # fmt: skip
        elif not seen.on_cpu(host) and found["free"] < SHM_OF_NCCL:
            yield CheckResult(
                "shm", host, "warning", f"/dev/shm has {gib(found['free'])} free",
                "NCCL and data loaders share memory there, and end with `bus error` where it is full", do,
            )  # fmt: skip
        else:
            yield passed("shm", host, f"/dev/shm has {gib(found['free'])} free")
