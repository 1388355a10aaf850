"""Check the files that a spec names: `look` lists them with their sizes on each host, `check` finds those
that are missing or differ in size. Contents are compared by the run's start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.doctor.results import CheckResult, listed, passed
from dsft.spec.listing import NoDataFileError, local_files

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

HUB = {"hub-model": "models", "hub-data": "datasets"}
MODEL = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.bin")
CHECK = "files"


def look(wanted: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return key -> {files: name -> bytes}, {missing: why}, or {commit} of a hub name.

    wanted: {key, path, kind}, with kind one of file, data, folder, hub-model, hub-data.
    """
    return {each["key"]: _one(each["path"], each["kind"]) for each in wanted}


def _one(path: str, kind: str) -> dict[str, Any]:
    try:
        if kind.startswith("hub-"):
            return _hub(path, kind)
        files = [Path(path)] if Path(path).is_file() else []
        if kind == "data":
            found = local_files(path)
            files = [] if found is None else list(found[0])
        elif Path(path).is_dir():
            files = [file for pattern in MODEL for file in Path(path).glob(pattern) if file.is_file()]
        if not files:
            return {"missing": "does not exist"}
        return {"files": {str(file): file.stat().st_size for file in files}}
    except NoDataFileError as error:
        return {"missing": str(error)}
    except OSError as error:
        return {"missing": error.strerror or str(error)}


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
    good = True
    for wanted in probed.needs.inputs:
        facts = {host: found[wanted["key"]] for host, found in by_host.items() if wanted["key"] in found}
        for finding in _of_key(wanted, facts):
            good = False
            yield finding
    if good and by_host:
        same = "there, with the same sizes everywhere" if len(by_host) > 1 else "there"
        yield passed(CHECK, None, f"spec, data and model are {same}")


def _of_key(wanted: Mapping[str, str], facts: Mapping[str, Mapping[str, Any]]) -> Iterator[CheckResult]:
    for host, found in facts.items():
        if "missing" in found:
            yield _missing(wanted, host, found)
    commits = {host: found["commit"] for host, found in facts.items() if "commit" in found}
    values = ""
    if len(set(commits.values())) > 1:
        by_host = ", ".join(f"{host} {commit[:12]}" for host, commit in commits.items())
        values = f"its newest revision differs between the caches: {by_host}"
    files = {host: found["files"] for host, found in facts.items() if "files" in found}
    names = {name for each in files.values() for name in each}
    different = sorted(name for name in names if len({each.get(name) for each in files.values()}) > 1)
    if different:
        values = f"{listed(different)} differ between {listed(list(files))}"
    if values:
        yield CheckResult(
            CHECK, None, "failure", f"{wanted['key']} {wanted['path']}: {values}",
            "ranks would train on other rows, or from other weights, than each other",
            "copy that of one host to all, or put it on a disk that they share",
        )  # fmt: skip


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
