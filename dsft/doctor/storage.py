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

from dsft.doctor.results import CheckResult, passed
from dsft.errors import StorageError
from dsft.system.disk import GIB, check_disk, size_text

if TYPE_CHECKING:
    from dsft.doctor.needs import FolderNeeds
    from dsft.doctor.results import ProbeResults

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

_PURPOSE = {
    "output_dir": "checkpoints, logs and the export are written there",
    "data.cache_dir": "the tokenized data are written there",
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
    folder = Path(shared).absolute()
    created = [each for each in (folder, *folder.parents) if not each.exists()]
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
            for each in created:
                each.rmdir()


def sees(path: str, nonce: str) -> str:
    """Return `yes`, or why the nonce file is not visible. Lists the folder first, since a network disk may
    cache the file's absence."""
    try:
        os.listdir(Path(path).parent)
        return "yes" if Path(path).read_text(encoding="utf-8") == nonce else "it has other content"
    except OSError as error:
        return error.strerror or str(error)


def space(probed: ProbeResults) -> Iterator[CheckResult]:
    for host, part in probed.part("storage"):
        for key, folder in part["folders"].items():
            yield _of_folder(host, key, folder, probed.needs.places[key])


def _of_folder(host: str, key: str, folder: Mapping[str, Any], place: FolderNeeds) -> CheckResult:
    named = f"{key} {folder['path']}"
    why = _PURPOSE.get(key, "the optimizer's states are swapped there")
    if folder["refused"] is not None:
        error = folder["refused"]
        value = error if "nvme_path" in key else f"{named} cannot be written ({error})"
        return CheckResult(
            "space", host, "failure", value, why, "make it writable there, or set another folder"
        )
    free = folder["free"]
    least = FLOOR if place.least is None else max(place.least, 1 << 20)
    if key in (EXTENSIONS, "data.cache_dir", HUB):
        least = min(least, 64 << 20)
    value = f"{named} has {size_text(free, 2)} free"
    do = "free space, or set another folder"
    if free < least:
        needs = f", and the run needs {size_text(least, 2)}" if place.least is not None else ""
        return CheckResult(
            "space", host, "failure", f"{value}{needs}", f"{why}; a full disk ends the run", do
        )
    if place.wanted is not None and free < place.wanted:
        return CheckResult(
            "space", host, "warning", f"{value}, and the run needs up to {size_text(place.wanted, 2)}",
            f"{why}; a full disk ends the run", f"{do}, or lower checkpoint.keep_last",
        )  # fmt: skip
    if place.wanted is None and free < LITTLE and key != EXTENSIONS:
        return CheckResult(
            "space", host, "warning", f"{value}; the size of the run's files is not known", why,
            f"{do}; after dsft plan SPEC, which counts the model, the doctor knows the size",
        )  # fmt: skip
    return passed("space", host, value + (f" of {size_text(place.wanted, 2)} needed" if place.wanted else ""))


def shared(probed: ProbeResults) -> Iterator[CheckResult]:
    """Check that the others see the file that the first host wrote."""
    if len(probed.slots) < 2 or probed.needs.first not in probed.answers.first:
        return
    written, folder = probed.answers.first[probed.needs.first].get("shared"), probed.needs.spec.output_dir
    if written is None:  # it cannot be written, which `space` reports
        return
    first = probed.needs.first
    blind = {
        host: answer["sees"]
        for host, answer in probed.answers.second.items()
        if host != probed.needs.first and answer.get("sees") != "yes"
    }
    for host, answer in blind.items():
        yield CheckResult(
            "shared", host, "failure",
            f"output_dir {folder} is not the folder that {first} has there (test file: {answer})",
            "every rank writes its part of a checkpoint there, and reads those of others when it resumes",
            "mount one disk at this path on all hosts, or set output_dir to a folder on a shared disk",
        )  # fmt: skip
    if not blind and len(probed.answers.second) > 1:
        yield passed("shared", None, f"output_dir {folder} is the same folder on all hosts")


def shared_memory(probed: ProbeResults) -> Iterator[CheckResult]:
    for host, part in probed.part("storage"):
        slots, found = probed.slots[host] or 1, part["shm"]
        do = "mount -o remount,size=8G /dev/shm, or --shm-size=8g (or --ipc=host) for a container"
        if found is None:
            yield CheckResult(
                "shm", host, "failure", "there is no /dev/shm", "ranks of a host share memory there",
                "mount -t tmpfs tmpfs /dev/shm",
            )  # fmt: skip
        elif probed.on_cpu(host) and found["free"] < slots * SHM_OF_RANK:
            yield CheckResult(
                "shm", host, "failure",
                f"/dev/shm has {size_text(found['free'], 2)} free for {slots} rank(s)",
                "DeepSpeed needs 69 MB per rank there, and ends with `bus error` without it", do,
            )  # fmt: skip
        elif not probed.on_cpu(host) and found["free"] < SHM_OF_NCCL:
            yield CheckResult(
                "shm", host, "warning", f"/dev/shm has {size_text(found['free'], 2)} free",
                "NCCL and data loaders share memory there, and end with `bus error` if it is full", do,
            )  # fmt: skip
        else:
            yield passed("shm", host, f"/dev/shm has {size_text(found['free'], 2)} free")
