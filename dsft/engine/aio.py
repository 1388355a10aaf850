"""Measure how fast this host's disk is past the page cache (libaio), as DeepSpeed swaps, with several
settings.

Rates are measured once per host and disk and cached in the cache folder; every run uses the settings that are
fastest on the slowest of its disks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import Tensor

from dsft.engine.ops import load_op
from dsft.errors import StorageError
from dsft.plan.memory.offload import AIO
from dsft.system.files import cache_folder, cache_json, cached_json

MEBI = 2**20

MEASURED = 128 * MEBI
"""Bytes that are written and read with each of the settings."""

SETTINGS: tuple[Mapping[str, Any], ...] = tuple(
    {**AIO, "queue_depth": depth, "intra_op_parallelism": threads}
    for depth, threads in ((8, 1), (32, 1), (8, 2), (32, 2), (32, 4), (32, 8))
)
"""From DeepSpeed's own settings to what arrays of disks need (its blogs/deepnvme). All use its block size,
below which it swaps nothing: a larger one would keep more in memory."""

Rates = tuple[float, float]
"""Bytes per second: read, written."""


def rates(folder: Path) -> tuple[list[Rates], bool]:
    """Return the rates with each of SETTINGS, and whether they were measured now. folder: on the disk, with
    at least MEASURED bytes free."""
    place = cache_folder() / "aio" / f"{_disk(folder)}.json"
    cached = _cached(place)
    if cached is not None:
        return cached, False
    found = measure(folder)
    cache_json(place, {"settings": list(SETTINGS), "rates": found})
    return found, True


def measure(folder: Path) -> list[Rates]:
    """Measure the rates with each of SETTINGS. Raises StorageError where the disk does not support such reads
    and writes."""
    path = folder / "measured.swp"
    aio = load_op(AsyncIOBuilder(), lambda line: None)
    try:
        return [_rate(aio, path, settings) for settings in SETTINGS]
    finally:
        path.unlink(missing_ok=True)


def fastest(all_rates: Sequence[Sequence[Rates]]) -> int:
    """Return the index of the settings that write and read back a byte in the least time on the slowest disk;
    the first of equal ones. all_rates: for each host, the rates with SETTINGS."""
    return min(range(len(SETTINGS)), key=lambda i: max(1 / one[i][0] + 1 / one[i][1] for one in all_rates))


def _disk(folder: Path) -> str:
    """Return a name for all that rates depend on: host, disk and DeepSpeed's version."""
    return f"{socket.gethostname()}-{os.stat(folder).st_dev}-deepspeed-{deepspeed.__version__}"


def _cached(place: Path) -> list[Rates] | None:
    try:
        stored = cached_json(place)
        found = [(float(read), float(written)) for read, written in stored["rates"]]
    except (ValueError, KeyError, TypeError):
        return None
    return found if stored["settings"] == list(SETTINGS) else None


def _rate(aio: Any, path: Path, settings: Mapping[str, Any]) -> Rates:
    names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
    handle = aio.aio_handle(**{name: settings[name] for name in names})
    buffer = handle.new_cpu_locked_tensor(MEASURED, torch.zeros(1, dtype=torch.uint8))
    try:
        buffer.zero_()
        written = _seconds(handle.sync_pwrite, buffer, path)
        return MEASURED / _seconds(handle.sync_pread, buffer, path), MEASURED / written
    finally:
        handle.free_cpu_locked_tensor(buffer)


def _seconds(work: Any, buffer: Tensor, path: Path) -> float:
    start = time.perf_counter()
    if work(buffer, str(path), 0) < 0:
        raise StorageError(
            f"{path.parent}: this disk does not support direct reads and writes; set another nvme_path."
        )
    return time.perf_counter() - start
