"""Measure the network between hosts: start `dsft.engine.links` on every slot of every host, as a run's ranks
are started, and return what it prints."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from dsft.errors import WorldError
from dsft.launcher.attempt import Attempt, AttemptSettings, Requests
from dsft.launcher.launch_plan import LaunchPlan
from dsft.remote import ROOT

LIMIT = 300.0  # seconds for everything


def measure(
    hosts: Mapping[str, int],
    environ: Mapping[str, str],
    interface: str | None,
    through: Literal["ssh", "srun"],
) -> Mapping[str, Any]:
    """Return the measurement. hosts: host -> slots; environ: variables of the ranks; interface: rank 0's.
    Raises WorldError with the first cause if the ranks do not meet or one of them fails."""
    plan = LaunchPlan(through, hosts, ("-m", "dsft.engine.links"), str(ROOT), "", secrets.token_hex(8))
    lines: list[str] = []
    attempt = Attempt(plan, AttemptSettings(environ, interface=interface), Requests(), lines.append)
    try:
        outcome = asyncio.run(asyncio.wait_for(attempt.run(), LIMIT))
    except TimeoutError:
        raise WorldError(f"the ranks have not measured it within {LIMIT:.0f} seconds") from None
    if outcome.error is not None:
        raise WorldError(outcome.error)
    printed = next((line for line in lines if line.startswith('{"backend"')), None)
    if printed is None:
        raise WorldError("the ranks have ended without a result; start it again")
    found: Mapping[str, Any] = json.loads(printed)
    return found
