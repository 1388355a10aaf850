"""What a run's folder says of how it was made: takes the resolved spec, the DeepSpeed JSON, versions, the
command and the account of its rows; writes spec.yaml, deepspeed.json, hostfile, versions.json, command.txt
and data.json into the run's folder.

Secrets are taken out of everything (`dsft.report.redact`). Raises StorageError where the disk refuses.
"""

from __future__ import annotations

import importlib.metadata
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

from dsft.report.redact import redact, redact_command, redact_tree
from dsft.system.files import write_error

PACKAGES = (
    "dsft", "torch", "deepspeed", "transformers", "tokenizers", "safetensors", "numpy", "peft", "pydantic",
    "wandb",
)  # fmt: skip


@dataclass(frozen=True)
class Origin:
    """spec: resolved, as YAML; hostfile: its text, None for a run without one; command: argv; data: what
    became of every row, None where none is read; reference: the DeepSpeed JSON of the reference's own engine,
    None where it has none."""

    spec: str
    deepspeed: Mapping[str, Any]
    hostfile: str | None
    command: Sequence[str]
    data: Mapping[str, Any] | None = None
    reference: Mapping[str, Any] | None = None


def write_folder(run_dir: Path, origin: Origin) -> None:
    """Each file is replaced whole; command.txt gets one line for each start."""
    texts = {
        "spec.yaml": redact(origin.spec, os.environ),
        "deepspeed.json": _json(redact_tree(origin.deepspeed, os.environ)),
        "versions.json": _json(versions()),
    }
    if origin.reference is not None:
        texts["reference.deepspeed.json"] = _json(origin.reference)
    if origin.data is not None:
        texts["data.json"] = _json(redact_tree(origin.data, os.environ))
    if origin.hostfile is not None:
        texts["hostfile"] = origin.hostfile
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


def versions() -> dict[str, str]:
    """Python, the system, the commit where dsft is a checkout, and the packages that decide numbers."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    commit = _commit()
    if commit is not None:
        found["commit"] = commit
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _commit() -> str | None:
    """The commit, with + where files differ from it; None outside a checkout or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
