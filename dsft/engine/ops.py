"""The compiled operations that a run needs: takes a spec and its DeepSpeed configuration, loads them on every
rank before anything of the model is built.

    deepspeed_shm_comm      on CPUs: ranks of a host add up in shared memory (comm/torch.py:47 build_shm_op)
    cpu_adam                AdamW in the host's memory (ops/adam/cpu_adam.py:93 CPUAdamBuilder)
    pin_memory, async_io    anything on NVMe (ops/op_builder/async_io.py)

AdamW on a GPU is torch's own fused kernel, which comes compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, PinMemoryBuilder

from dsft.engine.op import load_everywhere
from dsft.engine.op_turn import Say
from dsft.engine.world import World
from dsft.errors import BuildError, StorageError
from dsft.spec.schema import Spec

CPU_ADAM = "zero_force_ds_cpu_optimizer"
"""The key that says which Adam steps what is on the CPU: true: DeepSpeed's."""


def prepare_ops(spec: Spec, config: Mapping[str, Any], world: World, say: Say) -> dict[str, Any]:
    """A collective. The configuration, with `CPU_ADAM` as it turned out.

    Raises BuildError or StorageError where one cannot be had on some host. Where that is cpu_adam, of states
    that are in memory, and parallel.allow_torch_adam is set, all ranks step with torch's AdamW instead, and
    `say` is told why.
    """
    decided = dict(config)
    if needs_cpu_adam(spec, config):
        try:
            load_everywhere(CPUAdamBuilder(), world, say)
            decided[CPU_ADAM] = True
        except (BuildError, StorageError) as error:
            if _device(config, "offload_optimizer") == "nvme":
                raise
            reason = str(error).rstrip(".")
            if not spec.parallel.allow_torch_adam:
                raise type(error)(f"{reason}; {_WAY_OUT}") from None
            say(f"warning: {reason}; by parallel.allow_torch_adam torch's AdamW steps on the CPU instead")
            decided[CPU_ADAM] = False
    if _is_on_nvme(config):
        for builder in (PinMemoryBuilder, AsyncIOBuilder):  # in this order: async_io loads the other
            load_everywhere(builder(), world, say)
    return decided


_WAY_OUT = "or set parallel.allow_torch_adam: true, and torch's AdamW steps on the CPU instead."


def needs_cpu_adam(spec: Spec, config: Mapping[str, Any]) -> bool:
    """Whether AdamW steps in the host's memory."""
    return spec.optim.name == "adamw" and _device(config, "offload_optimizer") != "none"


def _is_on_nvme(config: Mapping[str, Any]) -> bool:
    return "nvme" in (_device(config, "offload_optimizer"), _device(config, "offload_param"))


def _device(config: Mapping[str, Any], part: str) -> str:
    device: str = config["zero_optimization"].get(part, {}).get("device", "none")
    return device
