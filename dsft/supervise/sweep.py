"""Ends what a host that was lost still runs of a job: a second agent, that only kills. Takes hosts; gives
what is not known to have ended, in words.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from dsft.remote import ROOT
from dsft.supervise.parts import World
from dsft.supervise.wire import SILENCE

PATIENCE = 12.0  # seconds, of which ssh may take 5 to connect


def sweep(world: World, hosts: Iterable[str], commands: Mapping[str, list[str]]) -> list[str]:
    """What may be left on the hosts."""
    jobs = {host: f"{world.job}.{node}" for node, host in enumerate(world.hosts) if host in set(hosts)}
    left = _swept({host: (commands[host], job) for host, job in jobs.items()})
    unknown = (
        "cannot be asked whether processes are left; they end themselves "
        f"{SILENCE:.0f} seconds after they heard of us last"
    )
    told = {None: unknown} | {
        count: f"{count} process(es) could not be killed" for count in left.values() if count
    }
    return [f"{host}: {told[count]}" for host, count in left.items() if count != 0]


def absent(commands: Mapping[str, list[str]]) -> list[str]:
    """Hosts whose agent does not answer."""
    left = _swept({host: (argv, "none") for host, argv in commands.items()})
    return [host for host, count in left.items() if count is None]


def _swept(asked: Mapping[str, tuple[list[str], str]]) -> dict[str, int | None]:
    """Host -> processes that are left; None where nobody answers."""
    with ThreadPoolExecutor(max_workers=max(len(asked), 1)) as pool:
        return dict(zip(asked, pool.map(lambda each: _left(*each), asked.values()), strict=True))


def _left(argv: list[str], job: str) -> int | None:
    try:
        done = subprocess.run(
            argv, cwd=ROOT, input=json.dumps({"sweep": job}) + "\n", timeout=PATIENCE,
            capture_output=True, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    ends = [line for line in done.stdout.splitlines() if line.startswith('{"end"')]
    return int(json.loads(ends[-1])["end"]) if ends else None
