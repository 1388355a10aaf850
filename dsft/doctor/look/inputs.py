"""Digests of the files that a spec names, each host's own. Reads them: small ones whole, of
large ones samples."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsft.spec.listing import NoDataFileError, local_files

WHOLE = 4 << 20  # bytes up to which a file is read whole
SAMPLES, SAMPLE = 64, 1 << 12  # number and bytes of what is read of a larger one
SECONDS = 3.0  # that all of them may take; the sizes of the rest are compared alone
HUB = {"hub-model": "models", "hub-data": "datasets"}
MODEL = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.bin")


def inputs(wanted: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """wanted: {key, path, kind}, kind being file, data, folder, hub-model or hub-data. Key -> {files: name ->
    [bytes, digest or None], missing: why}."""
    end = time.monotonic() + SECONDS
    return {each["key"]: _one(each["path"], each["kind"], end) for each in wanted}


def _one(path: str, kind: str, end: float) -> dict[str, Any]:
    try:
        if kind.startswith("hub-"):
            return _hub(path, kind)
        files = list(_files(path, kind))
        if not files:
            return {"missing": "is not there"}
        return {"files": {str(file): _facts(file, end) for file in files}}
    except NoDataFileError as error:
        return {"missing": str(error)}
    except OSError as error:
        return {"missing": error.strerror or str(error)}


def _files(path: str, kind: str) -> Iterable[Path]:
    if kind == "data":
        found = local_files(path)
        return [] if found is None else found[0]
    if kind == "folder" and Path(path).is_dir():
        return sorted({file for pattern in MODEL for file in Path(path).glob(pattern) if file.is_file()})
    return [Path(path)] if Path(path).is_file() else []


def _facts(file: Path, end: float) -> list[Any]:
    size = file.stat().st_size
    return [size, digest(file, size) if time.monotonic() < end else None]


def digest(file: Path, size: int) -> str:
    """sha256 of the content up to WHOLE bytes, of samples at equal distances and of the end above."""
    found = hashlib.sha256()
    with file.open("rb") as opened:
        if size <= WHOLE:
            found.update(opened.read())
        else:
            for number in range(SAMPLES):
                opened.seek(number * (size // SAMPLES))
                found.update(opened.read(SAMPLE))
            opened.seek(size - SAMPLE)
            found.update(opened.read(SAMPLE))
    return found.hexdigest()


def hub_cache() -> Path:
    """As huggingface_hub finds it (constants.py)."""
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home, "hub")).expanduser()


def _hub(name: str, kind: str) -> dict[str, Any]:
    """The commit that the cache holds: its files are named by their content."""
    name, _, revision = name.partition("@")
    folder = hub_cache() / f"{HUB[kind]}--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="ascii").strip()
    except OSError:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        return {"missing": "is not in the cache", "folder": str(folder), "offline": offline}
    return {"commit": commit}
