"""Find and describe the device of this process, or refuse to start with the reason, before any rank meets
another.

Where torch sees no GPU, DeepSpeed takes the CPU (accelerator/real_accelerator.py of 0.19.8): under a driver
that is too old for this torch, or in a container without the driver's files, a run would train on the CPU
without notice.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

from dsft.errors import WorldError
from dsft.plan.memory.offload import ALLOCATOR, OLDER
from dsft.rank.places import CPU, Device
from dsft.spec.schema import Accelerator

_DRIVER = Path("/sys/module/nvidia/version")
_NODE = Path("/dev/nvidiactl")  # exists where NVIDIA's driver is loaded
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")


def take_device(
    local_rank: int, expected: Accelerator | None, environ: MutableMapping[str, str]
) -> torch.device:
    """Make the device of this rank torch's current one and return it: number `local_rank`, or the only one
    that the process sees. `expected`: what cluster.accelerator names.

    LOCAL_RANK is set to the device's number in `environ`, since DeepSpeed reads that from it
    (runtime/engine.py:1941 local_rank, runtime/zero/partition_parameters.py:1138 local_device).

    Raises WorldError where the process sees too few devices, where it sees none but should, and where torch
    cannot allocate memory on its device.
    """
    accelerator = get_accelerator()
    kind = accelerator.device_name()
    if kind == "cpu":
        _check_cpu_is_meant(expected, environ)
        return torch.device("cpu")
    count = accelerator.device_count()
    if count == 0:
        raise _no_gpu(f"DS_ACCELERATOR={environ.get('DS_ACCELERATOR')} asks for one")
    number = 0 if count == 1 else local_rank
    if number >= count:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise WorldError(
            f"LOCAL_RANK={local_rank}, but this process sees {count} GPUs{shown}: each process of a host "
            "needs its own GPU, and must see either all of them or only its own. Start fewer processes "
            "there, or make more GPUs visible to them."
        )
    for name in _LOCAL_RANK:
        if name in environ:
            environ[name] = str(number)
    device = torch.device(kind, number)
    try:
        accelerator.set_device(number)
        _allocate(device)
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise WorldError(f"torch cannot use {device}: {line}. {_way_out(line, environ)}") from None
    return device


def _allocate(device: torch.device) -> None:
    torch.empty(1, device=device)


def _way_out(error: str, environ: Mapping[str, str]) -> str:
    """Return what to do where a device's first allocation fails. Under WSL2 that may be because of expandable
    segments (pytorch/pytorch#192330), which torch asks the driver for itself."""
    if "driver error" in error and any(
        "expandable_segments:True" in environ.get(name, "") for name in (ALLOCATOR, OLDER)
    ):
        return (
            "If the driver refuses expandable segments, start with PYTORCH_ALLOC_CONF= (empty) in the "
            "environment, or in cluster.env."
        )
    return "nvidia-smi shows the device's state and the processes that use it."


def _check_cpu_is_meant(expected: Accelerator | None, environ: MutableMapping[str, str]) -> None:
    if environ.get("DS_ACCELERATOR") == "cpu" or (expected is not None and expected.name.lower() == "cpu"):
        return
    built_for = torch.version.cuda or torch.version.hip
    if expected is not None:
        why = f"cluster.accelerator names {expected.name}"
    elif built_for:
        why = f"torch {torch.__version__} is built for GPUs"
    elif _NODE.exists():
        why = "this host has NVIDIA's driver"
    else:
        return
    raise _no_gpu(why)


def _no_gpu(why: str) -> WorldError:
    """Return the error. why: a clause that says why a GPU is expected."""
    return WorldError(
        f"torch sees no GPU: {_reason()}; and {why}. Correct that (dsft doctor SPEC examines each host), or "
        "set DS_ACCELERATOR=cpu to train on the CPU."
    )


def _reason() -> str:
    """Return torch's own reason, in one line."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split()).rstrip(".")
    return "it gives no reason"


def describe_device(device: torch.device) -> Device:
    if device.type != "cuda":
        return CPU if device.type == "cpu" else Device(device.type, device.type)
    found = torch.cuda.get_device_properties(device)
    try:
        driver = _DRIVER.read_text(encoding="ascii").strip()
    except OSError:
        driver = None
    return Device(
        "cuda", found.name, found.total_memory, f"sm_{found.major}{found.minor}", driver, str(found.uuid)
    )
