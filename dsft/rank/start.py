"""Run a command as several ranks of this host, without the launcher's supervision."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from dsft.errors import WorldError
from dsft.rank.launched import Launched
from dsft.system.host import free_port
from dsft.system.process import die_with

GRACE = 10.0  # seconds in which the other ranks end by themselves after one has failed
_TICK = 0.1  # seconds
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_ranks(
    argv: Sequence[str], environ: Mapping[str, str], count: int, after: str, stdout: int | None = None
) -> int:
    """Run `argv` as `count` ranks of this host, which get the signals that this process gets and end with it.
    Return the exit code of the first that fails; the others are killed GRACE seconds later. Raises WorldError
    where a rank was killed by a signal that did not come through this process. after: what the message then
    adds; stdout: file descriptor of their standard output, by default this process's."""
    port, parent, passed_on = free_port(), os.getpid(), False
    processes: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        nonlocal passed_on
        passed_on = True
        for process in processes:
            process.send_signal(number)

    before = {number: signal.getsignal(number) for number in _PASSED_ON}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as by nohup
                signal.signal(number, pass_on)
        for rank in range(count):
            own = {**environ, "LOCAL_WORLD_SIZE": str(count), "GROUP_WORLD_SIZE": "1"}
            Launched("dsft", rank, count, rank, "127.0.0.1", port).export(own)
            process = subprocess.Popen(argv, env=own, stdout=stdout, preexec_fn=lambda: die_with(parent))
            processes.append(process)
        rank, code = _first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0 and not passed_on:
        why = " (as the system does when its memory is full)" if code == -signal.SIGKILL else ""
        raise WorldError(f"rank {rank} was killed by signal {-code}{why}; {after}")
    return 128 - code if code < 0 else code


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    """Wait until all have ended, or until GRACE seconds after one has failed. Return the rank and the code of
    the first that failed, or 0 and 0."""
    first, until = (0, 0), float("inf")
    while True:
        codes = [process.poll() for process in processes]
        if first[1] == 0 and any(codes):
            first = next((rank, code) for rank, code in enumerate(codes) if code)
            until = time.monotonic() + GRACE
        if None not in codes or time.monotonic() > until:
            return first
        time.sleep(_TICK)
