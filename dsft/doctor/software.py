"""Check that versions are the same on all hosts: `look` reads package metadata, torch's version.py and dsft's
own files without importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dsft.doctor.results import CheckResult, passed
from dsft.engine.toolchain import package_file
from dsft.system.software import SINKS, decisive_versions, outside, version_of

if TYPE_CHECKING:
    from dsft.doctor.results import ProbeResults

ALSO = ("safetensors", "peft", "pydantic")
"""Packages beside DECISIVE that affect messages and files."""
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|\"([^\"]*)\"|None)", re.MULTILINE)
CHECK = "versions"
MILD = ("peft", "pydantic", "safetensors", "driver")
"""Packages whose versions may differ without changing numbers that hosts exchange."""
NEEDED = ("torch", "deepspeed", "transformers")


def look() -> dict[str, Any]:
    """Return versions (name -> version, None if not installed), the path of this Python (executable), and
    which packages of SINKS are absent."""
    versions = decisive_versions() | {name: version_of(name) for name in ALSO}
    versions["CUDA of torch"] = cuda_of_torch()
    versions["NCCL"] = next(filter(None, map(version_of, NCCL)), None)
    absent = [name for name in SINKS if version_of(name) is None]
    return {"versions": versions, "executable": sys.executable, "absent": absent}


def cuda_of_torch() -> str | None:
    """Return the CUDA version that torch was built for; None for a CPU build or without torch."""
    file = package_file("torch", "version.py")
    if file is None:
        return None
    found = _CUDA.search(file.read_text(encoding="utf-8"))
    return (found[1] or found[2]) if found else None


def table(probed: ProbeResults) -> dict[str, dict[str, str]]:
    """Return package -> host -> version for all hosts that answered."""
    found: dict[str, dict[str, str]] = {}
    for host, part in probed.part("software"):
        for name, version in part["versions"].items():
            found.setdefault(name, {})[host] = version or "none"
    for host, part in probed.part("devices"):
        if part.get("gpus"):
            found.setdefault("driver", {})[host] = part["gpus"][0]["driver"]
    return found


def differing(versions: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    return {name: by_host for name, by_host in versions.items() if len(set(by_host.values())) > 1}


def check(probed: ProbeResults) -> Iterator[CheckResult]:
    from dsft.report.packages import missing, packages  # they import pydantic, which a probe does without

    found = table(probed)
    different = differing(found)
    for name, by_host in different.items():
        values = ", ".join(f"{host} {version}" for host, version in by_host.items())
        kinds = {version.rpartition(".")[0] if name == "python" else version for version in by_host.values()}
        why = "ranks that compute or communicate differently hang, or silently train another model"
        if name in MILD or name == "python":
            why = "one host may not be able to read what another writes"
        yield CheckResult(
            CHECK, None, "warning" if name in MILD or len(kinds) == 1 else "failure",
            f"{name} differs: {values}", why,
            "install the same on every host (docs/install.md), or use one environment on a shared disk",
        )  # fmt: skip
    for name in NEEDED:
        if name not in different and "none" in found.get(name, {}).values():
            yield CheckResult(
                CHECK, None, "failure", f"{name} is not installed", "no run works without it",
                "install it (docs/install.md)",
            )  # fmt: skip
    for host, part in probed.part("software"):
        if host == probed.needs.first:  # rank 0 records
            for name in (one for one in packages(probed.needs.spec) if one in part["absent"]):
                what, _, way = missing(name).partition("; ")
                yield CheckResult(CHECK, host, "failure", what, "the run would stop at its start", way)
    if found and not different:
        alike = {name: next(iter(by_host.values())) for name, by_host in found.items()}
        for line in outside({name: version for name, version in alike.items() if version != "none"}):
            yield CheckResult(
                CHECK, None, "warning", line, "dsft was not tested with it",
                "install a supported version (docs/install.md)",
            )  # fmt: skip
        shown = ("python", "torch", "deepspeed", "transformers")
        summary = ", ".join(f"{name} {alike[name]}" for name in shown if name in alike)
        yield passed(CHECK, None, f"{summary}{' everywhere' if len(probed.slots) > 1 else ''}")
