"""Ends what a host that was lost still runs of a job: a second agent, that only kills. Takes hosts; gives
what is not known to have ended, in words.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from dsft.launch.remote import ROOT
from dsft.supervise.parts import World
from dsft.supervise.wire import SILENCE

PATIENCE = 12.0  # seconds, of which ssh may take 5 to connect


def sweep(world: World, hosts: Iterable[str], commands: Mapping[str, list[str]]) -> list[str]:
    numbers = {host: node for node, host in enumerate(world.hosts)}
    asked = [(host, commands[host], f"{world.job}.{numbers[host]}") for host in hosts]
    with ThreadPoolExecutor(max_workers=max(len(asked), 1)) as pool:
        return [text for text in pool.map(lambda each: _swept(*each), asked) if text is not None]


def _swept(host: str, argv: list[str], job: str) -> str | None:
    unknown = (
        f"{host} cannot be asked whether processes are left; they end themselves {SILENCE:.0f} seconds after "
        "they heard of us last"
    )
    try:
        done = subprocess.run(
            argv, cwd=ROOT, input=json.dumps({"sweep": job}) + "\n", timeout=PATIENCE,
            capture_output=True, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return unknown
    ends = [line for line in done.stdout.splitlines() if line.startswith('{"end"')]
    if not ends:
        return unknown
    left = int(json.loads(ends[-1])["end"])
    return f"{host}: {left} process(es) could not be killed" if left else None
