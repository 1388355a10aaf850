"""Join the process group and hand it to DeepSpeed."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

from dsft.dist.world import TIMEOUT, World, backend, join_group
from dsft.engine.ops import Log, load_everywhere, silent
from dsft.rank.environment import Launched
from dsft.spec.layout import Layout
from dsft.spec.schema import Accelerator


def join(
    launched: Launched,
    layout: Layout,
    log: Log = silent,
    identity: Mapping[str, Any] | None = None,
    expected: Accelerator | None = None,
) -> World:
    """Join the process group, as `join_group` does, and have DeepSpeed take it over. On CPUs the
    ranks of a host reduce in shared memory by an op of DeepSpeed that is compiled first (`log` gets the
    progress).

    Raises what that function does; BuildError or StorageError where the op cannot be built.
    """
    # DeepSpeed 0.19.8 calls collectives by the names that torch 2.13 renames; not ours to change or show.
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\..* is deprecated", category=FutureWarning
    )
    world = join_group(launched, layout, identity, expected)
    is_cpu = world.device.type == "cpu"
    if is_cpu:  # DeepSpeed finds its op loaded
        load_everywhere(ShareMemCommBuilder(), world, log)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a message about its op, on every rank
        deepspeed.init_distributed(
            dist_backend=backend(world.device), auto_mpi_discovery=False, timeout=TIMEOUT, verbose=False
        )
    if is_cpu:
        _unname_shared_memory(world)
    return world


def _unname_shared_memory(world: World) -> None:
    """Remove this rank's shared memory file, 69 MB in memory, in which ranks of a host reduce under
    DeepSpeed's own launcher (ops/csrc/cpu/comm/shm.cpp:350 snprintf), and which DeepSpeed never removes. By
    now all ranks have mapped all files and need the names no more."""
    world.gather(None)
    place = f"{os.getuid()}_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_{world.rank}"
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{place}").unlink(missing_ok=True)
