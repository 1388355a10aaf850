"""Report what a run is doing (`dsft status RUN`): its state and the reason for it, step, loss and speed, the
last checkpoint, and each rank's last heartbeat; or list the runs of a folder (`dsft status`). Reads files and
processes of this host; writes nothing and takes no lock.

Sources: logs/status.json, which `dsft launch` writes every two seconds (dsft/launcher/output.py);
metrics.jsonl, logs/train.log and checkpoints of any run; the text of the run's lock, whoever started it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import nan
from pathlib import Path
from typing import Any

import psutil

from dsft.errors import MissingInputError, printable
from dsft.plan.tables import printed, table
from dsft.report.jsonl import STEP, parse_record
from dsft.system.json_file import open_file, read_json
from dsft.system.run_folder import LOCK, named_run, newest_checkpoint, runs_below

STALE = 15.0
"""Seconds after which status.json, normally two seconds old, is stale."""

SILENT = 60.0
"""Seconds without output after which another host's process is not taken to run any more."""

LONGEST = 1e9
"""Seconds, 30 years: a step or a run that takes longer was not recorded by dsft."""

TAIL = 2**18  # bytes read from the end of a log or of the metrics
RECENT = 20  # number of records over which the step time is averaged

ENDED = {0: "finished", 75: "stopped"}
_HOLDER = re.compile(r"process (\d{1,10}) on (\S+)")
_PROGRESS = re.compile(r"step (\d+)/(\d{1,18})\b")


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    state         starting, running, stopping, ending, silent, stopped, failed or finished
    why           the reason for that state, in a sentence
    seconds_left  estimated from the last records
    exit_code     of `dsft launch`
    command       of `dsft launch`
    ranks         each with rank, host, pid, step, phase, and the seconds since its last heartbeat
                  (pulse_age) and its last progress (progress_age); None for what is not known yet
    """

    run: str
    folder: str
    state: str
    why: str
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    held_out_loss: float | None = None
    tokens_per_second: float | None = None
    step_time: float | None = None
    seconds_left: float | None = None
    checkpoint: str | None = None
    exit_code: int | None = None
    command: str | None = None
    ranks: Sequence[Mapping[str, Any]] = ()


def print_status(run: str | None, *, as_json: bool) -> None:
    """Print the run's status, or a table of the runs in a folder, by default runs/. Raises MissingInputError
    if there is no such run."""
    runs = runs_below(Path(run or "runs"))
    if not runs and run is None:
        raise MissingInputError(
            "there is no run in runs/ of the current folder; name another folder of runs."
        )
    if not runs:
        status = status_of(named_run(str(run)))
        print(json.dumps(asdict(status), indent=2) if as_json else printable("\n".join(lines(status))))
        return
    found = [status_of(folder) for folder in sorted(runs, key=_last_change, reverse=True)]
    if as_json:
        print(json.dumps([asdict(status) for status in found], indent=2))
    else:
        print(printed([table(("run", "state", "step", "loss", "tokens/s", "left"), list(map(_row, found)))]))


def _last_change(run: Path) -> float:
    ages = (_age(run / name) for name in ("metrics.jsonl", "logs/train.log", "logs/status.json", "."))
    return -min(age for age in ages if age is not None)


def _row(status: RunStatus) -> tuple[str, ...]:
    """Return the row of a run in the table of all runs."""
    of = f"/{status.total_steps}" if status.total_steps else ""
    loss, speed = status.loss, status.tokens_per_second
    return (
        printable(status.run),
        status.state,
        "" if status.step is None else f"{status.step}{of}",
        "" if loss is None else f"{loss:.4f}",
        "" if speed is None else f"{speed:,.0f}",
        _left(status),
    )


def _left(status: RunStatus) -> str:
    """Return the time that a run still takes; "" if it does not run, or that is not known."""
    if status.state not in {"running", "starting"} or not status.seconds_left:
        return ""
    return str(timedelta(seconds=round(status.seconds_left)))


def status_of(folder: Path) -> RunStatus:
    """Return the status according to the folder's files and this host's processes."""
    status, log_age = _with_progress(RunStatus(folder.resolve().name, str(folder), "", ""), folder)
    holder = lock_holder(folder / LOCK, log_age)
    path = folder / "logs" / "status.json"
    launched, age = _read_status_json(path), _age(path)
    if launched is not None and age is not None:
        ended_before = holder is not None or (log_age is not None and log_age + STALE < age)
        if launched["state"] != "ended" or not ended_before:  # else it was started by hand after that
            return _launched(status, launched, age, holder)
    if holder is not None:
        return replace(status, state="running", why=f"started by hand: {holder}")
    return _not_running(status, folder)


def _with_progress(status: RunStatus, folder: Path) -> tuple[RunStatus, float | None]:
    """Return the status with what the run's own files show, and the seconds since its last output."""
    records = [record for record in map(parse_record, _tail(folder / "metrics.jsonl")) if record]
    trained = [record for record in records if "train/loss" in record]
    last = trained[-1] if trained else {}
    log = folder / "logs" / "train.log"
    steps = [match for line in _tail(log) for match in _PROGRESS.finditer(line)]
    total = int(steps[-1][2]) if steps else None
    step = int(records[-1][STEP]) if records else None
    times = [record.get("perf/step_time", nan) for record in trained[-RECENT:]]
    times = [seconds for seconds in times if 0 <= seconds < LONGEST]
    step_time = sum(times) / len(times) if times else None
    held_out = [record["eval/loss"] for record in records if "eval/loss" in record]
    left = None
    if step is not None and total is not None and step_time is not None:
        seconds = (total - step) * step_time
        left = seconds if 0 <= seconds < LONGEST else None
    newest = newest_checkpoint(folder)
    status = replace(
        status,
        step=step,
        total_steps=total,
        loss=last.get("train/loss"),
        held_out_loss=held_out[-1] if held_out else None,
        tokens_per_second=last.get("perf/tokens_per_second"),
        step_time=step_time,
        seconds_left=left,
        checkpoint=newest.name if newest else None,
    )
    return status, _age(log)


def lock_holder(lock: Path, log_age: float | None) -> str | None:
    """Return the process that the lock names, if it still runs; else None. A process of another host is taken
    to run as long as the run writes output."""
    age = _age(lock)
    try:
        with open_file(lock) as file:
            named = file.read(TAIL).decode("utf-8", "replace").strip()
    except OSError:  # there is none, or it is another user's
        return None
    match = _HOLDER.fullmatch(named)
    if match is None or age is None:
        return None
    if match[2] == socket.gethostname():
        return named if _runs(match[1], age) else None
    return named if log_age is not None and log_age < SILENT else None


def _launched(status: RunStatus, launched: Mapping[str, Any], age: float, holder: str | None) -> RunStatus:
    """Return the status of a run that `dsft launch` started. age: seconds since it wrote status.json."""
    host, pid = str(launched.get("host")), launched.get("pid")
    supervisor = f"its supervisor (dsft launch, process {pid} on {host})"
    status = replace(status, exit_code=launched.get("exit_code"), command=launched.get("command"))
    if launched["state"] == "ended":
        code, error = status.exit_code, launched.get("error")
        why = f"dsft launch ended with exit code {code}" + (f": {error}" if error else "")
        state = "failed" if code is None else ENDED.get(code, "failed")
        return replace(status, state=state, why=why, seconds_left=None)
    status = replace(status, ranks=_ranks(launched, age))
    if host == socket.gethostname() and not _runs(pid, age):
        rest = f"{holder} still has the run's lock" if holder else _next_start(status)
        why = f"{supervisor} has ended without recording its end (killed, or out of memory); {rest}"
        return replace(status, state="failed", why=why)
    if age > STALE:
        why = f"status.json is {age:.0f} seconds old, but {supervisor} should write it every 2 seconds"
        return replace(status, state="silent", why=f"{why}; it or the disk does not respond")
    start = f", start {launched['attempt']}" if launched["attempt"] > 1 else ""
    why = f"dsft launch by {launched.get('launcher')}: process {pid} on {host}{start}"
    return replace(status, state=str(launched["state"]), why=why)


def _not_running(status: RunStatus, folder: Path) -> RunStatus:
    """Return the status of a run that nobody runs now and whose end was not recorded."""
    is_done = status.step is not None and status.total_steps is not None and status.step >= status.total_steps
    if is_done and (folder / "export" / "config.json").exists():
        return replace(status, state="finished", why="all steps are done and the model is exported")
    if status.step is None and status.checkpoint is None:
        return replace(status, state="failed", why="it is not running, and ended before its first step")
    why = f"it is not running; {_next_start(status)}"
    return replace(status, state="stopped", why=why, seconds_left=None)


def _next_start(status: RunStatus) -> str:
    if status.checkpoint:
        return f"the same command resumes from {status.checkpoint}"
    return "the same command starts at step 0, since there is no checkpoint"


def _ranks(launched: Mapping[str, Any], age: float) -> list[dict[str, Any]]:
    """Parse the ranks. Ages are as of now: the recorded age plus that of status.json."""
    found = []
    for number, rank in sorted((launched.get("ranks") or {}).items(), key=lambda item: int(item[0])):
        one = {"rank": int(number), "host": str(rank["host"])}
        one |= {key: rank.get(key) for key in ("pid", "step", "phase")}
        for key in ("pulse_age", "progress_age"):
            one[key] = None if rank.get(key) is None else round(rank[key] + age, 1)
        found.append(one)
    return found


def _runs(pid: Any, age: float) -> bool:
    """Return whether the process that ran `age` seconds ago still runs; a later process with the same pid
    does not count."""
    try:
        return psutil.Process(int(pid)).create_time() <= time.time() - age + 1
    except (psutil.NoSuchProcess, TypeError, ValueError):
        return False
    except psutil.Error:
        return True


def _age(path: Path) -> float | None:
    """Return the seconds since the file was written; None if there is no file."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _read_status_json(path: Path) -> dict[str, Any] | None:
    """Return the content of status.json; None if it is missing, incomplete or not in this format."""
    try:
        content: dict[str, Any] = {"state": None, "attempt": 1, "exit_code": None, **read_json(path)}
        _ranks(content, 0.0)
        is_ours = isinstance(content["attempt"], int) and isinstance(content["exit_code"], int | None)
        return content if is_ours else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # another version's, or edited
        return None


def _tail(path: Path) -> list[str]:
    """Return the lines of the file's last TAIL bytes; none if there is no file."""
    try:
        with open_file(path) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def lines(status: RunStatus) -> Iterator[str]:
    """Yield the lines that a terminal shows."""
    yield f"{status.run}: {status.state} ({status.why})"
    if status.step is not None:
        of = f" of {status.total_steps}" if status.total_steps else ""
        left = _left(status)
        yield f"  step        {status.step}{of}{left and f', {left} left'}"
    if status.loss is not None:
        held_out = "" if status.held_out_loss is None else f", held-out {status.held_out_loss:.4f}"
        yield f"  loss        {status.loss:.4f}{held_out}"
    if status.tokens_per_second is not None and status.step_time is not None:
        yield f"  speed       {status.tokens_per_second:,.0f} tokens/s, {status.step_time:.3g} s per step"
    yield f"  checkpoint  {status.checkpoint or 'none yet'}"
    if status.command is not None:
        yield f"  command     {status.command}"
    if status.ranks:
        yield "  rank  host              process  step    phase     heartbeat  last progress"
    for rank in status.ranks:
        pid, step, phase = ("-" if rank[key] is None else str(rank[key]) for key in ("pid", "step", "phase"))
        beat, progress = (
            "none" if rank[key] is None else f"{rank[key]:.0f} s ago" for key in ("pulse_age", "progress_age")
        )
        row = f"  {rank['rank']:<4}  {rank['host']:<16}  {pid:<7}  {step:<6}  {phase:<8}"
        yield f"{row}  {beat:<9}  {progress}"
