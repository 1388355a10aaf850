"""Count the parameters that ZeRO 3 has gathered at once. Takes a `RankSetup` of `dsft.plan.memory.phases`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsft.plan.ds_config import LIVE, PERSIST_BELOW
from dsft.plan.memory.tensors import NONE, Tensors, held, one

if TYPE_CHECKING:  # it imports this module
    from dsft.plan.memory.phases import RankSetup


def gathered(rank: RankSetup, ahead: int, *, kept: bool = True) -> Tensors:
    """Return the gathered parameters at ZeRO 3: those that are whole at once, and the buffer into which
    `ahead` elements of them are gathered (partition_parameters.py:1343 flat_tensor; gloo copies it). kept: by
    the end of the forward; under adapters a module more than LIVE elements then stays for its next use
    (partitioned_param_coordinator.py:653 max_reuse_dist_in_numel). With one rank nothing is gathered: its
    shard is the whole parameter (_no_gather_coalesced)."""
    whole = [tensor for tensor in rank.stored if tensor.numel > PERSIST_BELOW]
    if rank.ranks == 1 or not whole:
        return NONE
    total = sum(tensor.numel for tensor in whole)

    def size(elements: int) -> int:
        return min(elements, total) * sum(tensor.bytes for tensor in whole) // total

    at_once = live_elements(rank.module, rank.matrix, rank.gathered)
    if kept and rank.frozen:
        at_once = max(at_once, LIVE + rank.module)
    live = held(whole) if total <= at_once else Tensors(0, size(at_once))
    return live + (one(size(ahead)) + rank.gathering(size(ahead)) if ahead else NONE)


def live_elements(module: int, matrix: int, bucket: int, limit: int = LIVE) -> int:
    """Return the most elements that ZeRO 3 has whole at once, in a model with more than these.

    The parameters of a module that is about to be used are gathered whatever the limit is. Those of later
    modules follow as long as the limit leaves room, up to a bucket; the last may be larger than the room
    (partitioned_param_coordinator.py:453 max_params_to_prefetch).

    module, matrix: as in RankSetup; bucket: elements that are gathered ahead; limit:
    stage3_max_live_parameters.
    """
    room = min(limit - module, bucket)
    return max(limit, module + room + matrix) if room > 0 else module
