"""Takes a device, gives what this process has used of its memory and of the host's, in GiB (2^30 bytes).

Reads counters only. Peaks are those since the process began.
"""

from __future__ import annotations

import resource

import psutil
import torch

GIB = 2**30


def memory_record(device: torch.device) -> dict[str, float]:
    """Resident memory of this process now and at its peak, and where `device` is a CUDA device the peak that
    torch allocated on it and the peak that it reserved from the driver."""
    record = {
        "memory/host_rss_gib": psutil.Process().memory_info().rss / GIB,
        # KiB on Linux: getrusage(2)
        "memory/host_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }
    if device.type == "cuda":
        record["memory/peak_allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        record["memory/peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return record
