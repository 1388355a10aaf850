"""Run `dsft reference`: dsft/train.py --reference_only on a number of ranks of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsft.errors import WorldError
from dsft.plan.reference import check_precomputed, reference_parallel
from dsft.rank.environment import Launched
from dsft.remote import without_rank_variables
from dsft.spec.load import load_spec
from dsft.system.host import free_port
from dsft.system.process import die_with

SCRIPT = Path(__file__).parents[1] / "train.py"
GRACE = 10.0  # seconds in which the other ranks end by themselves after one has failed
KEPT = "the pairs scored so far are stored, and the same command continues from there."
_TICK = 0.1  # seconds
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(spec: Path, overrides: Sequence[str], ranks: int | None) -> int:
    """Start the ranks and return the exit code; a single rank replaces this process, which then does not
    return. ranks: by default one per GPU; where there is none, the fewest that can score. Raises SpecError
    where the spec has nothing to score, and as `run_ranks` does."""
    loaded = load_spec(spec, overrides)
    check_precomputed(loaded, "dsft reference")
    if ranks is None:
        import torch

        parts = reference_parallel(loaded)
        ranks = torch.cuda.device_count() or parts.pipeline_stages * parts.sequence_parallel
    argv = [sys.executable, str(SCRIPT), str(spec), *overrides, "--reference_only", "--any_ranks"]
    environ = without_rank_variables(os.environ)
    if ranks > 1:
        return run_ranks(argv, environ, ranks)
    os.execve(sys.executable, argv, environ)


def run_ranks(argv: Sequence[str], environ: Mapping[str, str], count: int, after: str = KEPT) -> int:
    """Run `argv` as `count` ranks of this host, which get the signals that this process gets and end with it.
    Return the exit code of the first that fails; the others are killed GRACE seconds later. Raises WorldError
    where a rank was killed by a signal that did not come through this process. after: what the message then
    adds."""
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
            processes.append(subprocess.Popen(argv, env=own, preexec_fn=lambda: die_with(parent)))
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
