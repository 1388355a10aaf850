"""Compute the memory of a run, allocation by allocation, as one version of DeepSpeed makes them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

WRITTEN_FOR = "0.19.8"
"""Version of DeepSpeed whose files and lines are cited (scripts/citations)."""


def other_version() -> Iterator[str]:
    """Yield a warning if another version of DeepSpeed is installed."""
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        return
    if installed.partition("+")[0] != WRITTEN_FOR:
        yield (
            f"memory was modelled for DeepSpeed {WRITTEN_FOR}, and {installed} is installed: the figures may "
            "be off (scripts/citations lists what has moved)"
        )
