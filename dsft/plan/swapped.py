"""What offload to NVMe takes: takes a census, a spec and the number of ranks, gives bytes on the disk and of
locked buffers. Pure. File and line of what DeepSpeed does are those of version 0.19.8.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsft.plan.census import Census
from dsft.plan.nvme import PARAMETER_BUFFERS, STATE_BUFFERS, swap_keys
from dsft.plan.units import FP32
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class Swapped:
    """Bytes of one rank, at most: what is below 1 MiB stays in memory.

    states      on the disk: fp32 values, moments and gradients of what is trained
    parameters  on the disk: in the type of forward and backward
    locked      buffers in host memory, locked
    """

    states: int
    parameters: int
    locked: int

    @property
    def on_disk(self) -> int:
        return self.states + self.parameters


def swapped(census: Census, spec: Spec, ranks: int, sub_group: int, moments: int, weight: int) -> Swapped:
    """ranks: that share the model; sub_group: elements updated at a time; moments, weight: bytes of an
    element's moments, and of a parameter."""
    keys = swap_keys(spec)
    trained = [parameter.numel for parameter in census.parameters if parameter.trained]
    share = sum(-(-numel // ranks) for numel in trained)
    updated = min(share, sub_group + -(-max(trained, default=0) // ranks))
    states = locked = parameters = 0
    if "offload_optimizer" in keys:
        states = share * (FP32 + moments + FP32)
        locked += STATE_BUFFERS * updated * FP32
    if "offload_parameters" in keys:
        parameters = sum(-(-parameter.numel // ranks) for parameter in census.parameters) * weight
        whole = min(sum(trained), updated * ranks)  # stage3.py:1015 takes whole sizes, not parts
        locked += (PARAMETER_BUFFERS * largest_part(census, ranks) + whole) * weight
    return Swapped(states, parameters, locked)


def largest_part(census: Census, ranks: int) -> int:
    """Elements of the largest parameter on one rank."""
    return max(-(-parameter.numel // ranks) for parameter in census.parameters)
