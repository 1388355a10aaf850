"""Folders: whether they are there, can be written, and what is free. Writes an empty file into each, which is
gone at once, and where it is asked to, a file with a nonce that other hosts look for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dsft.errors import StorageError
from dsft.system.disk import check_disk, file_system

SHM = Path("/dev/shm")
NVME = "nvme_path"


def storage(folders: Mapping[str, str]) -> dict[str, Any]:
    """folders: key -> path. shm: bytes of /dev/shm, None where there is none."""
    return {"folders": {key: folder(key, Path(path)) for key, path in folders.items()}, "shm": shm()}


def folder(key: str, path: Path) -> dict[str, Any]:
    """place: the folder itself or the nearest above it that is there; refused: why it cannot be used."""
    facts: dict[str, Any] = {"path": str(path), "refused": None}
    try:
        place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        facts |= {"place": str(place), "exists": place == path.absolute(), "kind": file_system(place)}
        usage = shutil.disk_usage(place)
        facts |= {"free": usage.free, "total": usage.total, "device": place.stat().st_dev}
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


def shm(place: Path = SHM) -> dict[str, int] | None:
    if not place.is_dir():
        return None
    usage = shutil.disk_usage(place)
    return {"total": usage.total, "free": usage.free}


@contextmanager
def nonce_file(shared: str, nonce: str) -> Iterator[str | None]:
    """The path of a file in the shared folder that holds the nonce; None where it cannot be written. A folder
    that is made for it is removed with it."""
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
        with suppress(OSError):  # a run has begun to use it
            for each in made:
                each.rmdir()


def sees(path: str, nonce: str) -> str:
    """`yes`, or why not. The folder is listed first: a network disk may remember that there was no file."""
    try:
        os.listdir(Path(path).parent)
        return "yes" if Path(path).read_text(encoding="utf-8") == nonce else "it holds something else"
    except OSError as error:
        return error.strerror or str(error)
