"""Measure the peak memory of this process in each phase of a run, and compare that of all ranks with the plan
in runs/NAME/memory.json. Sizes are in bytes or GiB (2^30 bytes).

Reads counters of the kernel and of torch's allocator, and resets their peaks.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import psutil
import torch

from dsft.plan.memory.sizes import GIB
from dsft.system.files import atomic_write, write_error

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Phase = Literal["start", "reference", "load", "first_step", "steady", "evaluation", "save"]
"""start: imports and data, before the model; reference: scoring the pairs; load: building model and engine;
first_step: the memory probe before step 1."""

PHASES: tuple[Phase, ...] = get_args(Phase)[2:]  # those that the plan has values for

Peaks = dict[str, int]
"""host_rss, and on a GPU device_allocated (by torch) and device_reserved (from the driver), in bytes."""

RESET = "the kernel's peak of resident memory (VmHWM), set back at the start of each phase"
SAMPLED = "the largest resident memory at a phase's ends and when metrics were logged"


class MemoryMeter:
    """A meter of peak memory by phase. One phase is always running; if a phase is entered again, its larger
    peak counts.

    Where a process cannot reset the kernel's peak (a container without /proc/self/clear_refs), the host's
    peak is the largest of samples; `method` says which of the two is used.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.device = device
        self.phase: Phase = "start"  # the running one
        self._largest: Peaks = {}  # over all phases that have ended
        self._sampled = 0
        self.peaks: dict[Phase, Peaks] = {}
        self.method = RESET if _reset_host_peak() else SAMPLED

    def enter(self, phase: Phase) -> None:
        """End the running phase and begin this one."""
        ended = self.running()
        _keep_larger(self.peaks.setdefault(self.phase, {}), ended)
        _keep_larger(self._largest, ended)
        self.phase, self._sampled = phase, 0
        if self.method == RESET:
            _reset_host_peak()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def running(self) -> Peaks:
        """Return the peaks of the running phase so far, in bytes."""
        now = _status("VmRSS")
        self._sampled = max(self._sampled, now)
        peaks = {"host_rss": _status("VmHWM") if self.method == RESET else self._sampled}
        if self._on_gpu:
            peaks["device_allocated"] = torch.cuda.max_memory_allocated(self.device)
            peaks["device_reserved"] = torch.cuda.max_memory_reserved(self.device)
        return peaks

    def used(self) -> int:
        """Return the bytes in use now: on the GPU if there is one, else resident in host memory."""
        return torch.cuda.memory_allocated(self.device) if self._on_gpu else resident()

    def peak(self) -> int:
        """Return the running phase's peak of what `used` measures, in bytes."""
        peaks = self.running()
        return peaks["device_allocated"] if self._on_gpu else peaks["host_rss"]

    def record(self) -> dict[str, float]:
        """Return for a logged step, in GiB: resident memory now, and the peaks since the process began."""
        peaks = dict(self._largest)
        _keep_larger(peaks, self.running())
        record = {
            "memory/host_rss_gib": _status("VmRSS") / GIB,
            "memory/host_peak_rss_gib": peaks["host_rss"] / GIB,
        }
        if self._on_gpu:
            record["memory/peak_allocated_gib"] = peaks["device_allocated"] / GIB
            record["memory/peak_reserved_gib"] = peaks["device_reserved"] / GIB
        return record


def resident() -> int:
    """Return the bytes of host memory that are resident for this process."""
    return _status("VmRSS")


def room(device: torch.device) -> int:
    """Return the bytes that this process can still allocate: on a GPU what the driver and torch's allocator
    have free; else what is available of host memory or of the limit on the address space (RLIMIT_AS),
    whichever is less."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    available = int(psutil.virtual_memory().available)
    return available if limit == resource.RLIM_INFINITY else min(available, limit - _status("VmSize"))


SIGNS = (
    "out of memory",  # torch's allocator; CUDA's error 2, which NCCL's messages end with too
    "DefaultCPUAllocator",
    "can't allocate memory",
    "bad_alloc",
    "STATUS_ALLOC_FAILED",  # cuBLAS, cuSOLVER, cuSPARSE, cuDNN 8
    "DEVICE_ALLOCATION_FAILED",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    "Failed to CUDA",  # NCCL: "Failed to CUDA calloc 4194304 bytes", "… host alloc …" (nccl, alloc.h)
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: torch's allocators, CUDA's libraries, numpy's or Python's own."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in SIGNS)


def _keep_larger(peaks: Peaks, new: Mapping[str, int]) -> None:
    for name, size in new.items():
        peaks[name] = max(size, peaks.get(name, 0))


def _reset_host_peak() -> bool:
    """Reset VmHWM to the present resident memory by writing 5 (proc(5), clear_refs). Return whether that
    worked."""
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status(key: str) -> int:
    """Return VmRSS, VmHWM or VmSize in bytes; proc(5) gives kB of 1,024 bytes."""
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no {key}")


Gather = Callable[[Any], list[Any]]
"""A collective that returns every rank's value."""


class MemoryFile:
    """memory.json, rewritten by rank 0 at the end of each phase, which costs one small collective.

    folder: the run's, on rank 0; planned: bytes per rank by phase and by the names of `Peaks`. Before
    measured host memory is compared with the plan, what the process used before the model was loaded is
    subtracted: the plan does not count imports and data.
    """

    def __init__(
        self, folder: Path | None, meter: MemoryMeter, gather: Gather, planned: Mapping[Phase, Peaks]
    ) -> None:
        self._path = folder / "memory.json" if folder is not None else None
        self.meter, self._gather, self._planned = meter, gather, planned
        self._pending: dict[str, float] = {}

    def enter(self, phase: Phase) -> None:
        """Begin a phase and write the file. A collective. Raises StorageError on the rank that writes."""
        self.meter.enter(phase)
        ranks: list[Mapping[Phase, Peaks]] = self._gather(self.meter.peaks)
        found: dict[Phase, Peaks] = {}  # the largest over the ranks
        for peaks in ranks:
            for ended, sizes in peaks.items():
                _keep_larger(found.setdefault(ended, {}), sizes)
        self._pending = {
            f"memory/{ended}/{name}_gib": size / GIB for ended in found for name, size in found[ended].items()
        }
        if self._path is None:
            return
        try:
            with atomic_write(self._path) as file:
                content = json.dumps(self._content(found, ranks), indent=2, ensure_ascii=False)
                file.write(content.encode() + b"\n")
        except OSError as error:
            raise write_error(self._path, error) from error

    def record(self) -> dict[str, float]:
        """Return for a logged step: this rank's memory, and the peaks of phases that ended since the last
        record."""
        pending, self._pending = self._pending, {}
        return self.meter.record() | pending

    def _content(
        self, found: Mapping[Phase, Peaks], ranks: Sequence[Mapping[Phase, Peaks]]
    ) -> dict[str, Any]:
        before = found["start"]["host_rss"]
        return {
            "unit": f"bytes; each figure is the largest over {len(ranks)} rank(s)",
            "host_rss": self.meter.method,
            "phases": {
                phase: {
                    name: size
                    if phase == "start"
                    else compared(size, self._planned.get(phase, {}).get(name), before * (name == "host_rss"))
                    for name, size in peaks.items()
                }
                for phase, peaks in found.items()
            },
            "ranks": list(ranks),
        }


def compared(measured: int, planned: int | None, before: int) -> dict[str, float]:
    """Compare with the plan. error: measured ÷ planned − 1, after `before` is subtracted from the measured
    value."""
    figures: dict[str, float] = {"measured": measured}
    if before:
        figures["above_start"] = measured - before
    if planned:
        figures |= {"planned": planned, "error": round((measured - before) / planned - 1, 4)}
    return figures
