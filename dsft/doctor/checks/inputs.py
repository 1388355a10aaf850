"""Spec, data and model files: there on every host, and the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsft.doctor.finding import Finding, passed
from dsft.doctor.seen import Seen, listed

CHECK = "files"


def inputs(seen: Seen) -> Iterator[Finding]:
    by_host = dict(seen.part("inputs"))
    sampled = alone = 0
    good = True
    for wanted in seen.needs.inputs:
        told = {host: found[wanted["key"]] for host, found in by_host.items() if wanted["key"] in found}
        for finding in _of_key(wanted, told):
            good = False
            yield finding
        for name in {name for found in told.values() for name in found.get("files", {})}:
            facts = [found["files"][name] for found in told.values() if name in found.get("files", {})]
            sampled += any(size > 4 << 20 for size, _ in facts)
            alone += any(digest is None for _, digest in facts)
    if good and by_host:
        notes = [f"{sampled} large ones by size and samples"] if sampled else []
        notes += [f"{alone} by size alone, as time was short"] if alone else []
        same = "the same everywhere" if len(by_host) > 1 else "there"
        yield passed(CHECK, None, f"spec, data and model are {same}" + "".join(f"; {note}" for note in notes))


def _of_key(wanted: Mapping[str, str], told: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    missing = {host: found for host, found in told.items() if "missing" in found}
    for host, found in missing.items():
        yield _missing(wanted, host, found)
    commits = {host: found["commit"] for host, found in told.items() if "commit" in found}
    if len(set(commits.values())) > 1:
        values = ", ".join(f"{host} {commit[:12]}" for host, commit in commits.items())
        yield _other(wanted, f"its newest revision in the caches differs: {values}")
    files = {host: found["files"] for host, found in told.items() if "files" in found}
    different = sorted(_differing(files))
    if different:
        yield _other(wanted, f"on {listed(list(files))} differ {listed(different)}")


def _differing(files: Mapping[str, Mapping[str, list[Any]]]) -> set[str]:
    """Names of files that one host has otherwise, or lacks; a digest that one host had no time for is not
    held against another's."""
    found = set()
    for name in {name for each in files.values() for name in each}:
        facts = [each.get(name) for each in files.values()]
        there = [fact for fact in facts if fact is not None]
        digests = {fact[1] for fact in there if fact[1] is not None}
        if len(there) < len(facts) or len({fact[0] for fact in there}) > 1 or len(digests) > 1:
            found.add(name)
    return found


def _missing(wanted: Mapping[str, str], host: str, found: Mapping[str, Any]) -> Finding:
    named = f"{wanted['key']} {wanted['path']}"
    if "folder" not in found:
        return Finding(
            CHECK, host, "failure", f"{named}: {found['missing']}", "each rank reads it on its own host",
            "copy it there, to the same path, or put it on a disk that all hosts share",
        )  # fmt: skip
    if found["offline"]:
        return Finding(
            CHECK, host, "failure", f"{named} is not in {found['folder']}, and HF_HUB_OFFLINE is set",
            "it cannot be downloaded", "download it there once, or copy the cache",
        )  # fmt: skip
    return Finding(
        CHECK, host, "warning", f"{named} is not in the cache there", "each host downloads it at the start",
        "download it ahead, or share HF_HOME between the hosts",
    )  # fmt: skip


def _other(wanted: Mapping[str, str], value: str) -> Finding:
    return Finding(
        CHECK, None, "failure", f"{wanted['key']} {wanted['path']}: {value}",
        "ranks would train on other rows, or from other weights, than each other",
        "copy one host's to all, or put it on a disk that they share",
    )  # fmt: skip
