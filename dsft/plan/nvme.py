"""How DeepSpeed swaps to a disk (offload to NVMe): takes a spec, gives the keys of its JSON. Pure.

File and line of what DeepSpeed does are those of version 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsft.spec.schema import Spec

STATE_BUFFERS = 4
"""A sub-group's value, two moments and gradient are in memory at a time."""

PARAMETER_BUFFERS = 5
"""Parameters read at a time, from their reading until they are released after their use; a module of the
architectures that dsft knows has at most three that are large."""

PARAMETER_BUFFER = 100_000_000
"""Elements of one of them, where the model is not known."""

AIO: Mapping[str, Any] = {
    "block_size": 1_048_576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}

AIO_REASONS = {
    "block_size": "bytes of a request; also the least that is swapped",
    "queue_depth": "requests at a time",
    "intra_op_parallelism": "threads per read or write",
    "single_submit": "requests are handed over together",
    "overlap_events": "some are waited for while others are handed over",
    "use_gds": "through the host's memory: GPUDirect Storage is not offered",
}


def swap_keys(spec: Spec) -> list[str]:
    """The keys of the spec whose device is nvme."""
    return [key for key in KEYS if getattr(spec.parallel, key).device == "nvme"]


KEYS = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
"""Of `parallel`, and what DeepSpeed calls them."""


def aio_rows(spec: Spec) -> Iterator[tuple[str, Any, str]]:
    """Fixed in generated files; a run measures its disks and writes its own into its deepspeed.json."""
    if swap_keys(spec):
        for key, value in AIO.items():
            yield f"aio.{key}", value, f"{AIO_REASONS[key]}; the run measures its disks and takes the fastest"


def optimizer_rows() -> Iterator[tuple[str, Any, str]]:
    """Of offload_optimizer, without the section's name."""
    reason = "value, two moments and gradient of the sub-group that is being updated"
    yield "buffer_count", STATE_BUFFERS, reason
    yield "pipeline_read", False, "a sub-group is read when it is updated: no second set of buffers"
    yield "pipeline_write", False, "it is written before the next is read: the files are whole after a step"


def parameter_rows() -> Iterator[tuple[str, Any, str]]:
    """Of offload_param, without the section's name."""
    yield "buffer_count", PARAMETER_BUFFERS, "parameters that are in host memory at a time"
    reason = "elements of a buffer; the run takes the largest parameter's part"
    yield "buffer_size", PARAMETER_BUFFER, reason
    yield "max_in_cpu", 0, "elements that stay in host memory beside what is below 1 MiB"
