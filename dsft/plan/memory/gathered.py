"""Count the parameters that ZeRO 3 has gathered at once."""

from __future__ import annotations

from typing import Literal

from dsft.plan.ds_config import LIVE, PERSIST_BELOW
from dsft.plan.memory.setup import RankSetup
from dsft.plan.memory.tensors import NONE, Tensors, held, one


def gathered(rank: RankSetup, where: Literal["layers", "ends", "kept", "backward"] = "layers") -> Tensors:
    """Return the gathered parameters at ZeRO 3: in the layers (in their backward), at the embedding or the
    head, or those that an evaluation leaves.

    In the layers there is also the buffer into which a bucket and one matrix more are gathered, at most a
    module (gloo copies it), and the shards that are sent (partition_parameters.py:1343 flat_tensor). Beside
    frozen parameters a module more than LIVE elements stays by the end of the forward for its next use
    (partitioned_param_coordinator.py:653 max_reuse_dist_in_numel), and a bucket with the head's weight behind
    it is gathered at the ends, as the stand-in GPU shows; rehearsals of full training show neither. With one
    rank nothing is gathered: its shard is the whole parameter (_no_gather_coalesced)."""
    whole = [tensor for tensor in rank.stored if tensor.numel > PERSIST_BELOW]
    if rank.ranks == 1 or not whole:
        return NONE
    total = sum(tensor.numel for tensor in whole)

    def size(elements: int) -> int:
        return elements * sum(tensor.bytes for tensor in whole) // total

    beside_frozen = bool(rank.frozen)
    module = 0 if where == "kept" and rank.module >= LIVE and not beside_frozen else rank.module
    last = rank.embedding if where == "ends" and not beside_frozen else rank.matrix
    at_once = max(live_elements(module, last, rank.gathered), rank.embedding)
    if beside_frozen and where != "backward":
        at_once = max(at_once, LIVE + rank.module)
    live = held(whole) if total <= at_once else Tensors(0, size(min(at_once, total)))
    if where == "kept" or (where == "ends" and not beside_frozen):
        return live
    ahead = max(rank.gathered, min(rank.module, rank.gathered + rank.matrix))
    ahead = min(rank.gathered + rank.embedding if where == "ends" else ahead, total)
    senders = rank.ranks if rank.copied == 1 else rank.copied
    sent = 0 if beside_frozen else size(-(-ahead // senders))
    return live + one(size(ahead)) + rank.gathering(size(ahead)) + one(sent)


def live_elements(module: int, last: int, bucket: int, limit: int = LIVE) -> int:
    """Return the most elements that ZeRO 3 has whole at once, in a model with more than these.

    The parameters of a module that is about to be used are gathered whatever the limit is. Those of later
    modules follow as long as the limit leaves room, up to a bucket; the last may be larger than the room
    (partitioned_param_coordinator.py:453 max_params_to_prefetch).

    module: as in RankSetup; last: elements of the last parameter; bucket: elements that are gathered ahead;
    limit: stage3_max_live_parameters.
    """
    room = min(limit - module, bucket)
    return max(limit, module + room) + last if room > 0 else module
