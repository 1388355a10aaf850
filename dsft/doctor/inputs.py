"""Check the files that a spec names: `look` computes their digests on each host (from samples of large
files), `check` finds those that are missing or differ."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.doctor.results import CheckResult, listed, passed
from dsft.spec.listing import NoDataFileError, local_files

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

WHOLE = 4 << 20  # bytes up to which a file is read completely
SAMPLES, SAMPLE = 64, 1 << 12  # number and size of the samples of a larger one
SECONDS = 3.0  # for all digests; of the remaining files only sizes are compared
HUB = {"hub-model": "models", "hub-data": "datasets"}
MODEL = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.bin")
CHECK = "files"


def look(wanted: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return key -> {files: name -> [bytes, digest or None], missing: why}, or {commit} of a hub name.

    wanted: {key, path, kind}, with kind one of file, data, folder, hub-model, hub-data.
    """
    end = time.monotonic() + SECONDS
    return {each["key"]: _one(each["path"], each["kind"], end) for each in wanted}


def _one(path: str, kind: str, end: float) -> dict[str, Any]:
    try:
        if kind.startswith("hub-"):
            return _hub(path, kind)
        files = list(_files(path, kind))
        if not files:
            return {"missing": "does not exist"}
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
    """Return the SHA-256 of the file's content; above WHOLE bytes, of equidistant samples and of the end."""
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
    """Return huggingface_hub's cache folder."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _hub(name: str, kind: str) -> dict[str, Any]:
    """Return the cached commit, which identifies the content of all its files."""
    name, _, revision = name.partition("@")
    folder = hub_cache() / f"{HUB[kind]}--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / (revision or "main")).read_text(encoding="ascii").strip()
    except OSError:
        from huggingface_hub.constants import HF_HUB_OFFLINE

        return {"missing": "is not in the cache", "folder": str(folder), "offline": HF_HUB_OFFLINE}
    return {"commit": commit}


def check(probed: ProbeResults) -> Iterator[CheckResult]:
    by_host = dict(probed.part("inputs"))
    good, without_digest = True, set[str]()
    for wanted in probed.needs.inputs:
        facts = {host: found[wanted["key"]] for host, found in by_host.items() if wanted["key"] in found}
        for finding in _of_key(wanted, facts):
            good = False
            yield finding
        files = [item for found in facts.values() for item in found.get("files", {}).items()]
        without_digest |= {name for name, (_, digest) in files if digest is None}
    if good and by_host:
        same = "the same everywhere" if len(by_host) > 1 else "there"
        note = f"; {len(without_digest)} compared by size only, to save time" if without_digest else ""
        yield passed(CHECK, None, f"spec, data and model are {same}{note}")


def _of_key(wanted: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    missing = {host: found for host, found in facts.items() if "missing" in found}
    for host, found in missing.items():
        yield _missing(wanted, host, found)
    commits = {host: found["commit"] for host, found in facts.items() if "commit" in found}
    if len(set(commits.values())) > 1:
        values = ", ".join(f"{host} {commit[:12]}" for host, commit in commits.items())
        yield _other(wanted, f"its newest revision differs between the caches: {values}")
    files = {host: found["files"] for host, found in facts.items() if "files" in found}
    different = sorted(_differing(files))
    if different:
        yield _other(wanted, f"{listed(different)} differ between {listed(list(files))}")


def _differing(files: Mapping[str, Mapping[str, list[Any]]]) -> set[str]:
    """Return the names of files that differ between hosts or are missing on some. A digest that a host had no
    time to compute counts as equal."""
    found = set()
    for name in {name for each in files.values() for name in each}:
        facts = [each.get(name) for each in files.values()]
        there = [fact for fact in facts if fact is not None]
        digests = {fact[1] for fact in there if fact[1] is not None}
        if len(there) < len(facts) or len({fact[0] for fact in there}) > 1 or len(digests) > 1:
            found.add(name)
    return found


def _missing(wanted: Mapping[str, str], host: str, found: Mapping[str, Any]) -> CheckResult:
    named = f"{wanted['key']} {wanted['path']}"
    if "folder" not in found:
        return CheckResult(
            CHECK, host, "failure", f"{named}: {found['missing']}", "each rank reads it on its own host",
            "copy it there, to the same path, or put it on a disk that all hosts share",
        )  # fmt: skip
    if found["offline"]:
        return CheckResult(
            CHECK, host, "failure", f"{named} is not in {found['folder']}, and HF_HUB_OFFLINE is set",
            "it cannot be downloaded", "download it there once, or copy the cache",
        )  # fmt: skip
    return CheckResult(
        CHECK, host, "warning", f"{named} is not in this host's cache", "each host downloads it at the start",
        "download it before the run, or share HF_HOME between the hosts",
    )  # fmt: skip


def _other(wanted: Mapping[str, str], value: str) -> CheckResult:
    return CheckResult(
        CHECK, None, "failure", f"{wanted['key']} {wanted['path']}: {value}",
        "ranks would train on other rows, or from other weights, than each other",
        "copy that of one host to all, or put it on a disk that they share",
    )  # fmt: skip
