"""Report what a run is doing (`dsft status RUN`): its state and the reason for it, step, loss and speed, the
last checkpoint, and each rank's last heartbeat. Reads files, locks and processes of this host; writes nothing
and takes no lock.

Sources: logs/status.json, which `dsft launch` writes every two seconds (dsft/launcher/output.py);
metrics.jsonl, logs/train.log and checkpoints of any run; the run's lock, whoever started it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psutil

from dsft.errors import MissingInputError, printable
from dsft.report.jsonl import STEP
from dsft.system.json_file import read_json
from dsft.system.lock import NAME as LOCK

STALE = 15.0
"""Seconds after which status.json, normally two seconds old, is stale."""

TAIL = 2**18  # bytes read from the end of a log or of the metrics
RECENT = 20  # number of records over which the step time is averaged

ENDED = {0: "finished", 75: "stopped"}
_HOLDER = re.compile(r"process (\d+) on (\S+)")
_PROGRESS = re.compile(r"step (\d+)/(\d+)\b")
_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class RankStatus:
    """One rank. pulse_age, progress_age: seconds since its last heartbeat and since its last progress; None
    before the first."""

    rank: int
    host: str
    pid: int | None
    step: int | None
    phase: str | None
    pulse_age: float | None
    progress_age: float | None


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    state         starting, running, stopping, ending, silent, stopped, failed or finished
    why           the reason for that state, in a sentence
    seconds_left  estimated from the last records
    exit_code     of `dsft launch`
    command       of `dsft launch`
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
    ranks: Sequence[RankStatus] = ()


def print_status(run: str, *, as_json: bool) -> None:
    """Print the run's status. Raises MissingInputError if there is no such run."""
    found = status_of(folder_of(run))
    print(json.dumps(asdict(found), indent=2) if as_json else printable("\n".join(lines(found))))


def folder_of(run: str) -> Path:
    """Return the folder of a run, given by its path or by its name in runs/."""
    for folder in (Path(run), Path("runs", run)):
        if any((folder / name).exists() for name in ("logs", "metrics.jsonl", "spec.yaml", LOCK)):
            return folder
    runs = sorted(path.parent.name for path in Path("runs").glob("*/logs"))
    there = f"runs/ has {', '.join(runs)}" if runs else "there is no run below runs/ here"
    raise MissingInputError(f"{run} is no run's folder, and no name of one; {there}.")


def status_of(folder: Path) -> RunStatus:
    """Return the status according to the folder's files and this host's processes."""
    found = with_progress(RunStatus(folder.resolve().name, str(folder), "", ""), folder)
    told = _json(folder / "logs" / "status.json")
    held = holder(folder / LOCK)
    if told is not None and not _is_older_start(told, folder, held):
        return _supervised(found, told, held)
    if held is not None:
        return replace(found, state="running", why=f"started by hand: {held}")
    return _alone(found, folder)


def with_progress(found: RunStatus, folder: Path) -> RunStatus:
    """Return `found` with the progress that the run's own files show."""
    records = [record for record in map(_record, _tail(folder / "metrics.jsonl")) if record]
    trained = [record for record in records if "train/loss" in record]
    last = trained[-1] if trained else {}
    steps = [match for line in _tail(folder / "logs" / "train.log") for match in _PROGRESS.finditer(line)]
    total = int(steps[-1][2]) if steps else None
    step = max((int(record[STEP]) for record in records[-1:]), default=None)
    times = [record["perf/step_time"] for record in trained[-RECENT:] if "perf/step_time" in record]
    pace = sum(times) / len(times) if times else None
    held_out = [record["eval/loss"] for record in records if "eval/loss" in record]
    return replace(
        found,
        step=step,
        total_steps=total,
        loss=last.get("train/loss"),
        held_out_loss=held_out[-1] if held_out else None,
        tokens_per_second=last.get("perf/tokens_per_second"),
        step_time=pace,
        seconds_left=None if None in (step, total, pace) else (total - step) * pace,  # type: ignore[operator]
        checkpoint=last_checkpoint(folder),
    )


def last_checkpoint(folder: Path) -> str | None:
    """Return the name of the newest committed checkpoint, unverified (see `dsft verify`); None if there is
    none."""
    found = [
        (int(match[1]), path.parent.name)
        for path in (folder / "checkpoints").glob("step-*/MANIFEST.json")
        if (match := _CHECKPOINT.fullmatch(path.parent.name))
    ]
    return max(found)[1] if found else None


def holder(lock: Path) -> str | None:
    """Return who has the lock, in words; None if nobody has. Locks of this host's processes are in
    /proc/locks. For another host's process, the lock file's text counts as long as the run's log keeps
    changing."""
    try:
        place = os.stat(lock)
        said = lock.read_text(errors="replace").strip()
    except OSError:
        return None
    key = f"{os.major(place.st_dev):02x}:{os.minor(place.st_dev):02x}:{place.st_ino}"
    with open("/proc/locks", encoding="ascii") as locks:
        if any(line.split()[5] == key for line in locks if "->" not in line):
            return said or "a process of this host"
    match = _HOLDER.fullmatch(said)
    if match is None:
        return None
    if match[2] == socket.gethostname():  # in a container /proc/locks may name another device
        return said if _lives(match[1], place.st_mtime) else None
    age = _seconds_since(lock.parent / "logs" / "train.log")
    return said if age is not None and age < STALE * 4 else None


def _is_older_start(told: Mapping[str, Any], folder: Path, held: str | None) -> bool:
    """Return whether status.json is from an earlier start than the last one, which was started by hand."""
    if told.get("state") != "ended":
        return False
    age, written = _seconds_since(folder / "logs" / "train.log"), _age(told)
    return held is not None or (age is not None and written is not None and age + STALE < written)


def _supervised(found: RunStatus, told: Mapping[str, Any], held: str | None) -> RunStatus:
    age, host, pid = _age(told), str(told.get("host")), told.get("pid")
    who = f"process {pid} on {host}"
    found = replace(found, exit_code=told.get("exit_code"), command=told.get("command"))
    state = str(told.get("state"))
    if state == "ended":
        code, error = found.exit_code, told.get("error")
        why = f"dsft launch ended with {code}" + (f": {error}" if error else "")
        ended = "failed" if code is None else ENDED.get(code, "failed")
        return replace(found, state=ended, why=why, seconds_left=None)
    found = replace(found, ranks=_ranks(told, age or 0.0))
    if host == socket.gethostname() and not _lives(pid, _time(told, "started")):
        rest = f"{held} still has the run's lock" if held else f"the same command {_goes_on(found)}"
        why = f"its supervisor, {who}, is gone without a last word (killed, or out of memory); {rest}"
        return replace(found, state="failed", why=why)
    if age is None or age > STALE:
        old = "has no time" if age is None else f"is {age:.0f} seconds old"
        why = f"status.json {old}, which should be 2 seconds: its supervisor, {who}, or the disk is silent"
        return replace(found, state="silent", why=why)
    start = f", start {told['attempt']}" if told.get("attempt", 1) > 1 else ""
    return replace(found, state=state, why=f"dsft launch by {told.get('launcher')}: {who}{start}")


def _alone(found: RunStatus, folder: Path) -> RunStatus:
    """Return the status of a run that nobody runs now and whose end was not recorded."""
    whole = found.step is not None and found.total_steps is not None and found.step >= found.total_steps
    if whole and (folder / "export" / "config.json").exists():
        return replace(found, state="finished", why="all steps are done and the model is exported")
    if found.step is None and found.checkpoint is None:
        return replace(found, state="failed", why="it is not running, and ended before its first step")
    why = f"it is not running; the same command {_goes_on(found)}"
    return replace(found, state="stopped", why=why, seconds_left=None)


def _goes_on(found: RunStatus) -> str:
    return f"goes on from {found.checkpoint}" if found.checkpoint else "starts anew: it has no checkpoint"


def _ranks(told: Mapping[str, Any], age: float) -> list[RankStatus]:
    """Parse the ranks. Ages are as of now: the recorded age plus that of status.json."""
    ranks = told.get("ranks") or {}
    found = []
    for number, each in sorted(ranks.items(), key=lambda item: int(item[0])):
        since = [None if each.get(key) is None else round(each[key] + age, 1) for key in _AGES]
        found.append(
            RankStatus(
                int(number), str(each["host"]), each.get("pid"), each.get("step"), each.get("phase"), *since
            )
        )
    return found


_AGES = ("pulse_age", "progress_age")


def _lives(pid: Any, seen: float | None) -> bool:
    """Return whether the process seen at that time still runs; a later process with the same pid does not
    count."""
    try:
        return seen is not None and psutil.Process(int(pid)).create_time() <= seen + 1
    except (psutil.NoSuchProcess, TypeError, ValueError):
        return False
    except psutil.Error:
        return True


def _age(told: Mapping[str, Any]) -> float | None:
    """Return seconds since status.json was written, by its own time stamp."""
    written = _time(told, "updated")
    return None if written is None else max(0.0, time.time() - written)


def _time(told: Mapping[str, Any], key: str) -> float | None:
    """Return a time stamp as seconds since the epoch; None if it is missing or invalid."""
    try:
        return datetime.fromisoformat(str(told[key])).timestamp()
    except (KeyError, ValueError):
        return None


def _seconds_since(path: Path) -> float | None:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None


def _json(path: Path) -> dict[str, Any] | None:
    """Return the content of status.json; None if it is missing, incomplete or not in this format."""
    try:
        found = read_json(path)
        if not isinstance(found, dict):
            return None
        _ranks(found, 0.0)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # another version's, or edited
        return None
    return found


def _tail(path: Path) -> list[str]:
    """Return the lines of the file's last TAIL bytes; none if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def _record(line: str) -> dict[str, float] | None:
    try:
        record = {name: float(value) for name, value in json.loads(line).items()}
    except (ValueError, AttributeError, TypeError, RecursionError):  # truncated at its beginning or end
        return None
    return record if STEP in record else None


def lines(found: RunStatus) -> Iterator[str]:
    """Yield the lines that a terminal shows."""
    yield f"{found.run}: {found.state} ({found.why})"
    if found.step is not None:
        of = f" of {found.total_steps}" if found.total_steps else ""
        left = ""
        if found.state in {"running", "starting"} and found.seconds_left:
            left = f", {timedelta(seconds=round(found.seconds_left))} left"
        yield f"  step        {found.step}{of}{left}"
    if found.loss is not None:
        held_out = "" if found.held_out_loss is None else f", held-out {found.held_out_loss:.4f}"
        yield f"  loss        {found.loss:.4f}{held_out}"
    if found.tokens_per_second is not None and found.step_time is not None:
        yield f"  speed       {found.tokens_per_second:,.0f} tokens/s, {found.step_time:.3g} s a step"
    yield f"  checkpoint  {found.checkpoint or 'none yet'}"
    if found.command is not None:
        yield f"  command     {found.command}"
    if found.ranks:
        yield "  rank  host              process  step    phase     last sign  last progress"
    for rank in found.ranks:
        sign, progress = (
            "none" if each is None else f"{each:.0f} s" for each in (rank.pulse_age, rank.progress_age)
        )
        pid, step, phase = (_or_dash(each) for each in (rank.pid, rank.step, rank.phase))
        yield f"  {rank.rank:<4}  {rank.host:<16}  {pid:<7}  {step:<6}  {phase:<8}  {sign:<9}  {progress}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
