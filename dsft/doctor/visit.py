"""Asks all hosts at once: starts `dsft.doctor.probe` on each, gives it orders, takes its facts, and then asks
what one host sees of the others. Leaves no process behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import IO, Any

from dsft.doctor.probe import MARKER
from dsft.errors import WorldError
from dsft.remote import ROOT, module_command

PROBE = "dsft.doctor.probe"
ANSWER = 30.0
"""Seconds that a host which lets itself be reached may take: a disk or a name service that hangs."""
KEPT = 4096  # bytes of what a host said besides

Facts = Mapping[str, Any]
Command = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Silence:
    """Why a host gave no facts. code: the exit code of what was started, None where it had to be ended; said:
    on its standard error, and what came before the marker."""

    code: int | None
    said: str


@dataclass(frozen=True)
class Visits:
    """first and second: answers by host; silent: hosts that gave none, or no second one."""

    first: Mapping[str, Facts]
    second: Mapping[str, Facts]
    silent: Mapping[str, Silence]


def commands(host: str, environ: Mapping[str, str] = os.environ) -> Sequence[str]:
    """Here, or through ssh."""
    return module_command(host, PROBE, environ=environ)


def slurm_command(host: str, module: str = PROBE) -> Sequence[str]:
    """One task on the host, beside what else runs in this allocation."""
    python = module_command("localhost", module)
    options = ("--overlap", "--nodes=1", "--ntasks=1", "--quiet", f"--chdir={ROOT}", f"--nodelist={host}")
    return [shutil.which("srun") or "srun", *options, *python]


def visit(
    orders: Mapping[str, Facts],
    wanted: Callable[[Mapping[str, Facts]], Mapping[str, Facts]],
    command: Command = commands,
    answered: Callable[[str], None] = lambda host: None,
) -> Visits:
    """orders: host -> what the probe is told; wanted: from all first answers, host -> what it is told second.
    answered: is told each host that gave its first answer."""
    talks = {host: _Talk(host) for host in orders}
    threads = [
        threading.Thread(target=_talk, args=(talk, orders[host], command), daemon=True)
        for host, talk in talks.items()
    ]
    for thread in threads:
        thread.start()
    try:
        first = _collected(talks, answered)
        second_orders = wanted(first)
        for host in first:
            talks[host].orders.put(second_orders[host])
        second = _collected({host: talks[host] for host in first}, lambda host: None)
    finally:
        for talk in talks.values():
            talk.orders.put(None)  # its input is closed, and it ends
        end = time.monotonic() + 2.0
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        for talk in talks.values():
            talk.kill()
    silent = {host: talk.silence for host, talk in talks.items() if host not in second}
    return Visits(first, second, {host: silence or Silence(None, "") for host, silence in silent.items()})


@dataclass
class _Talk:
    """answers: facts, or None where there is no more to come."""

    host: str
    orders: SimpleQueue[Facts | None] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[Facts | None] = field(default_factory=SimpleQueue)
    process: subprocess.Popen[bytes] | None = None
    silence: Silence | None = None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _collected(talks: Mapping[str, _Talk], answered: Callable[[str], None]) -> dict[str, Facts]:
    found, waiting = {}, dict(talks)
    end = time.monotonic() + ANSWER
    while waiting and time.monotonic() < end:
        for host, talk in list(waiting.items()):
            if not talk.answers.empty():
                answer = talk.answers.get()
                del waiting[host]
                if answer is not None:
                    found[host] = answer
                    answered(host)
        time.sleep(0.02)
    return {host: found[host] for host in talks if host in found}


def _talk(talk: _Talk, first: Facts, command: Command) -> None:
    said: list[str] = []
    with tempfile.TemporaryFile() as errors:
        try:
            talk.process = subprocess.Popen(
                command(talk.host), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        except (OSError, WorldError) as error:  # no such program; no host's name
            said = [f"{error.filename}: {error.strerror}"] if isinstance(error, OSError) else [str(error)]
            talk.silence = Silence(127 if isinstance(error, OSError) else 1, said[0])
            talk.answers.put(None)
            return
        _exchange(talk, talk.process, first, said)
        if talk.process.stdin is not None:
            with suppress(OSError):
                talk.process.stdin.close()
        talk.process.wait()
        if talk.process.stdout is not None:
            talk.process.stdout.close()
        errors.seek(0)
        told = errors.read(KEPT).decode(errors="replace")
    talk.silence = Silence(talk.process.returncode, "\n".join([told.strip(), *said]).strip())
    talk.answers.put(None)


def _exchange(talk: _Talk, process: subprocess.Popen[bytes], first: Facts, said: list[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    orders: Facts | None = first
    while orders is not None:
        with suppress(OSError):  # it has ended, and has said why
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            process.stdin.flush()
        answer = _answer(process.stdout, said)
        if answer is None:
            return
        talk.answers.put(answer)
        orders = talk.orders.get()


def _answer(stdout: IO[bytes], said: list[str]) -> Facts | None:
    for line in stdout:
        before, marker, after = line.decode(errors="replace").partition(MARKER)
        if marker:
            try:
                found: Facts = json.loads(after)
            except ValueError:  # it was cut off
                said.append(after.strip()[:200])
                return None
            return found
        if before.strip() and len(said) < 5:
            said.append(before.strip()[:200])
    return None
