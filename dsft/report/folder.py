"""Document in a run's folder how it was made: write spec.yaml (resolved), deepspeed.json and the reasons for
its keys, hostfile, versions.json, command.txt, data.json (the ledger of the rows) and the reference's JSON.

Secrets are removed (`dsft.system.redact`) from all of them. Raises StorageError where the disk is full or
fails.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsft.errors import LockedError
from dsft.plan.ds_entries import CONFIG, REASONS, ConfigEntry, nested, reasons
from dsft.system.files import write_error
from dsft.system.redact import redact, redact_command, redact_tree
from dsft.system.software import version_of

MARKER = "versions.json"
PACKAGES = (
    "dsft", "torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "peft", "pydantic",
    "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """The origin of a run. spec: resolved, as YAML; deepspeed: the keys of the DeepSpeed JSON; hostfile: its
    text, None for a run without one; command: argv; data: the ledger, None where no rows are read; reference:
    the DeepSpeed JSON of the reference's own engine, None where it has none."""

    spec: str
    deepspeed: Sequence[ConfigEntry]
    hostfile: str | None
    command: Sequence[str]
    data: Mapping[str, Any] | None = None
    reference: Mapping[str, Any] | None = None


def check_folder(run_dir: Path) -> None:
    """Check that no file is overwritten that no run wrote, such as a spec that stands where the resolved one
    goes. Raises LockedError."""
    names = ("spec.yaml", "deepspeed.json", "hostfile", "data.json", "metrics.jsonl", "memory.json")
    found = [name for name in names if (run_dir / name).exists()]
    if found and not (run_dir / MARKER).exists():
        raise LockedError(
            f"{run_dir}, the folder of this run, has files that no run wrote and that it would overwrite "
            f"({', '.join(found)}); choose another name for this run, or move them away."
        )


def write_folder(run_dir: Path, origin: Provenance) -> None:
    """Write the files. Each is replaced as a whole, except that command.txt gets one more line at each
    start."""
    contents = {
        MARKER: versions(),  # the first, by which a later start knows the folder
        CONFIG: nested(origin.deepspeed),
        REASONS: reasons(origin.deepspeed),
        "reference.deepspeed.json": origin.reference,
        "data.json": origin.data,
    }
    texts = {
        name: json.dumps(redact_tree(content, os.environ), indent=2, ensure_ascii=False) + "\n"
        for name, content in contents.items()
        if content is not None
    }
    texts["spec.yaml"] = redact(origin.spec, os.environ)
    if origin.hostfile is not None:
        texts["hostfile"] = redact(origin.hostfile, os.environ)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    command = shlex.join(redact_command(origin.command, os.environ))
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            aside = run_dir / f".{name}.tmp"
            aside.write_text(text, encoding="utf-8")
            aside.replace(run_dir / name)
        with (run_dir / "command.txt").open("a", encoding="utf-8") as file:
            file.write(f"{now}  {command}\n")
    except OSError as error:
        raise write_error(run_dir, error) from error


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, the system and the packages that decide numbers, and the commit if dsft
    is a checkout; those of the first call, since a process keeps the code that it has imported."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    commit = _commit()
    if commit is not None:
        found["commit"] = commit
    return found | {package: version_of(package) or "not installed" for package in PACKAGES}


def _commit() -> str | None:
    """Return the commit, with + where files differ from it; None outside a checkout or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
