"""Report to Weights & Biases from a thread of its own. Writes wandb.json and wandb/ in the run's folder.

W&B never slows or stops a run: whatever wandb does (start, reach a server, fail) happens in that thread, and
an error is reported in one line. metrics.jsonl has everything in any case. No command line, code or metadata
of the machine is sent, and wandb is not imported where the mode is disabled.
"""

from __future__ import annotations

import json
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsft.report.jsonl import STEP, Record
from dsft.report.redact import redact, redact_tree
from dsft.spec.schema import Wandb
from dsft.system.files import atomic_write

SERVER = "https://api.wandb.ai"
ANSWER_SECONDS = 4.0  # for a server to answer at the start, before the run is recorded offline
FINISH_SECONDS = 20.0  # for the last uploads at the end


@dataclass(frozen=True)
class Identity:
    """The W&B run of a folder. name is the folder's; run_id stays the same over all its starts."""

    name: str
    run_id: str
    job_type: str | None


class WandbRun:
    """A W&B run that records in its own thread. warn takes one line of text, from any thread."""

    def __init__(
        self, section: Wandb, run_dir: Path, config: Mapping[str, Any], warn: Callable[[str], None]
    ) -> None:
        self._warn = warn
        self._work: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._summary: Mapping[str, float] = {}
        self._left_behind = False
        self._thread: threading.Thread | None = None
        mode = mode_of(section, os.environ)
        if mode == "disabled":
            return
        if mode == "offline" and section.mode == "online":
            warn("W&B: wandb.mode is online but there is no key (WANDB_API_KEY, wandb login); going offline.")
        start = (section, run_dir, redact_tree(config, os.environ), mode)
        self._thread = threading.Thread(target=self._work_off, args=start, name="wandb", daemon=True)
        self._thread.start()

    def metrics(self, record: Record) -> None:
        """Queue a record, and return at once."""
        if self._thread is not None:
            self._work.put(dict(record))

    def close(self, summary: Mapping[str, float]) -> None:
        """Wait for the last records and uploads, for FINISH_SECONDS at most."""
        if self._thread is None:
            return
        self._summary = dict(summary)
        self._work.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._left_behind = True
            self._warn(
                f"W&B: not done after {FINISH_SECONDS:.0f} s, left behind; metrics.jsonl has everything, and "
                "`wandb sync` sends what lies in the run's wandb folder."
            )

    def _work_off(self, section: Wandb, run_dir: Path, config: dict[str, Any], mode: str) -> None:
        try:
            run = _start(section, run_dir, config, mode, self._say)
            while (record := self._work.get()) is not None:
                if record[STEP] >= run.step:  # a resumed run already has the earlier ones
                    run.log(record, step=int(record[STEP]))
            run.summary.update(self._summary)
            run.finish()
        except Exception as error:  # noqa: B902  no error here may stop training
            self._say(f"W&B: stopped, {_reason(error)}; metrics.jsonl has everything.")

    def _say(self, text: str) -> None:
        if not self._left_behind:  # after close the report is gone
            self._warn(text)


def mode_of(section: Wandb, environ: Mapping[str, str]) -> str:
    """Return online, offline or disabled. With mode auto, WANDB_MODE decides where it is set; else the mode
    is online if there is a key."""
    wanted = section.mode
    if wanted == "auto" and environ.get("WANDB_MODE") in ("online", "offline", "disabled"):
        wanted = environ["WANDB_MODE"]  # type: ignore[assignment]
    if wanted in ("offline", "disabled"):
        return wanted
    return "online" if _has_key(environ) else "offline"


def identity(run_dir: Path, job_type: str | None) -> Identity:
    """Return the identity from wandb.json in the run's folder, which the first start writes. The id has a
    random part, so that a folder that is deleted and created again is another run."""
    path = run_dir / "wandb.json"
    try:
        run_id = str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):  # absent, or cut off by a kill
        run_id = f"{run_dir.name[:50]}-{secrets.token_hex(4)}"
        with atomic_write(path) as file:
            file.write(json.dumps({"id": run_id}).encode() + b"\n")
    return Identity(run_dir.name, run_id, job_type)


def _has_key(environ: Mapping[str, str]) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(environ.get("WANDB_BASE_URL") or SERVER).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC") or None).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):  # no such file, or one that wandb could not read either
        return False


def _start(
    section: Wandb, run_dir: Path, config: dict[str, Any], mode: str, warn: Callable[[str], None]
) -> Any:
    """Start a wandb run, offline where the server does not answer or rejects it."""
    who = identity(run_dir, config.get("task"))
    if mode == "online":
        try:
            _ask_server(os.environ)
            run = _init(section, run_dir, config, who, "online")
            warn(f"W&B: {run.url}")
            return run
        except Exception as error:  # noqa: B902  no network, no right to the project, quota, …
            warn(f"W&B: recording offline, {_reason(error)}.")
            _forget_failed_start()
    run = _init(section, run_dir, config, who, "offline")
    warn(f"W&B: recorded offline; to send it: wandb sync --id {who.run_id} {run_dir}/wandb/offline-run-*")
    return run


def _ask_server(environ: Mapping[str, str]) -> None:
    """Raise within seconds where the server does not answer or rejects the key: wandb.init would wait half a
    minute, whatever its init_timeout."""
    import requests  # comes with wandb; uses the environment's proxies and netrc file

    address = (environ.get("WANDB_BASE_URL") or SERVER).rstrip("/")
    key = environ.get("WANDB_API_KEY")
    try:
        answer = requests.post(
            f"{address}/graphql",
            json={"query": "query { viewer { id } }"},
            auth=("api", key) if key else None,
            timeout=ANSWER_SECONDS,
        )
    except requests.RequestException as error:
        raise ConnectionError(f"{address} cannot be reached ({type(error).__name__})") from error
    if not answer.ok:
        raise ConnectionError(f"{address} answered {answer.status_code} {answer.reason}")


def _forget_failed_start() -> None:
    """Reset wandb's own process, which treats the id of a run that failed to start as still in use."""
    import wandb

    wandb.teardown()


def _init(section: Wandb, run_dir: Path, config: dict[str, Any], who: Identity, mode: str) -> Any:
    import wandb

    quiet = {"silent": True, "console": "off", "stop_on_fatal_error": False}
    private = {
        "disable_code": True,
        "save_code": False,
        "disable_git": True,
        "x_disable_meta": True,  # it contains the command line
        "x_save_requirements": False,  # versions.json has them
    }
    bounded = {"init_timeout": 20.0, "finish_timeout": FINISH_SECONDS}
    settings = wandb.Settings(**quiet, **private, **bounded)  # type: ignore[arg-type]
    wandb.setup(settings)  # init alone would print before it reads `silent`
    run = wandb.init(
        project=section.project,
        entity=section.entity,
        group=section.group,
        tags=list(section.tags),
        name=who.name,
        id=who.run_id,
        job_type=who.job_type,
        resume="allow" if mode == "online" else None,  # offline every start has a folder of its own
        mode=mode,  # type: ignore[arg-type]
        dir=str(run_dir),
        config=config,
        settings=settings,
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def _reason(error: Exception) -> str:
    """Return the text of an error in one line, without secrets."""
    words = " ".join(str(error).split()) or type(error).__name__
    return redact(words if len(words) <= 200 else f"{words[:199]}…", os.environ)
