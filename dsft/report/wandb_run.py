"""Report to Weights & Biases. Writes wandb.json and wandb/ in the run's folder.

Whatever wandb does (start, reach a server, fail) happens in a thread (`dsft.report.sinks`). No command line,
code or metadata of the machine is sent, and wandb is not imported where the mode is disabled.
"""

from __future__ import annotations

import json
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsft.report.jsonl import STEP, Record
from dsft.spec.schema import Wandb
from dsft.system.files import atomic_write
from dsft.system.json_file import read_json
from dsft.system.redact import one_line

SERVER = "https://api.wandb.ai"
ANSWER_SECONDS = 10.0  # for a server to answer at the start, before the run is recorded offline
FINISH_SECONDS = 20.0  # for the last uploads at the end


class WandbSink:
    """A W&B run, online or offline. log takes one line of text."""

    def __init__(
        self, section: Wandb, run_dir: Path, config: dict[str, Any], mode: str, log: Callable[[str], None]
    ) -> None:
        self._run = _start(section, run_dir, config, mode, log)

    def write(self, record: Record) -> None:
        if record[STEP] >= self._run.step:  # a resumed run already has the earlier ones
            self._run.log(record, step=int(record[STEP]))

    def close(self, summary: Mapping[str, float]) -> None:
        self._run.summary.update(summary)
        self._run.finish()


def section_of(section: Wandb | None, environ: Mapping[str, str]) -> Wandb | None:
    """Return the spec's section; without one, the project of WANDB_PROJECT if there is a key too. None: the
    run is not recorded."""
    project = environ.get("WANDB_PROJECT", "").strip()
    if section is not None or not project or not _has_key(environ):
        return section
    return Wandb(project=project, entity=environ.get("WANDB_ENTITY", "").strip() or None)


def mode_of(section: Wandb, environ: Mapping[str, str]) -> str:
    """Return online, offline or disabled. With mode auto, WANDB_MODE decides where it is set; else the mode
    is online if there is a key."""
    wanted = section.mode
    if wanted == "auto" and environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
        wanted = environ["WANDB_MODE"]  # type: ignore[assignment]
    if wanted in ("offline", "disabled"):
        return wanted
    return "online" if _has_key(environ) else "offline"


def run_id_of(run_dir: Path) -> str:
    """Return the id of the W&B run of a folder, from its wandb.json, which the first start writes; all starts
    share it. It has a random part, so that a folder that is deleted and created again is another run."""
    path = run_dir / "wandb.json"
    try:
        return str(read_json(path)["id"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or cut off by a kill
        run_id = f"{run_dir.name[:50]}-{secrets.token_hex(4)}"
        with atomic_write(path) as file:
            file.write(json.dumps({"id": run_id}).encode() + b"\n")
    return run_id


def _has_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or SERVER).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # no such file, or one that wandb could not read either
        return False


def _start(
    section: Wandb, run_dir: Path, config: dict[str, Any], mode: str, log: Callable[[str], None]
) -> Any:
    """Start a wandb run, offline where the server does not answer or rejects it."""
    run_id = run_id_of(run_dir)
    if mode == "online":
        try:
            run = _init(section, run_dir, config, run_id, "online")
            log(f"W&B: {run.url}")
            return run
        except Exception as error:  # noqa: B902  no network, no right to the project, quota, …
            log(f"W&B: recording offline, {one_line(error)}.")
            import wandb

            wandb.teardown()  # its own process treats the id of a failed start as still in use
    run = _init(section, run_dir, config, run_id, "offline")
    log(f"W&B: recorded offline; to send it: wandb sync --id {run_id} {run_dir}/wandb/offline-run-*")
    return run


def _init(section: Wandb, run_dir: Path, config: dict[str, Any], run_id: str, mode: str) -> Any:
    import wandb

    quiet = {"silent": True, "console": "off", "stop_on_fatal_error": False}
    private = {
        "disable_code": True,
        "save_code": False,
        "disable_git": True,
        "x_disable_meta": True,  # it contains the command line
        "x_save_requirements": False,  # versions.json has them
    }
    answer = float(os.environ.get("WANDB_INIT_TIMEOUT") or ANSWER_SECONDS)
    bounded = {"init_timeout": answer, "finish_timeout": FINISH_SECONDS}
    settings = wandb.Settings(**quiet, **private, **bounded)  # type: ignore[arg-type]
    wandb.setup(settings)  # init alone would print before it reads `silent`
    run = wandb.init(
        project=section.project,
        entity=section.entity,
        group=section.group,
        tags=list(section.tags),
        name=run_dir.name,
        id=run_id,
        job_type=config.get("task"),
        resume="allow" if mode == "online" else None,  # offline every start has a folder of its own
        mode=mode,  # type: ignore[arg-type]
        dir=str(run_dir),
        config=config,
        settings=settings,
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run
