"""The command `dsft doctor`, and its quick part, which `dsft launch` runs first. Takes a spec's path; starts
a program on each host (`dsft.doctor.probe`), prints what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dsft.doctor.finding import Finding

PORT = 29500
"""Where rank 0 listens unless MASTER_PORT or the launcher says otherwise: as deepspeed and torchrun."""


def quick(
    spec: Path | str,
    overrides: Sequence[str] = (),
    *,
    hosts: Mapping[str, int] | None = None,
    port: int | None = None,
) -> Sequence[Finding]:
    """All checks but those of the network's speed, within 10 seconds for two hosts. What they find is given,
    not raised.

    hosts: host -> slots, in place of the spec's (those of a hostfile); port: where rank 0 will listen, by
    default MASTER_PORT or 29500. Raises SpecError and MissingInputError as `dsft.plan.promised.load`.
    """
    return ()
