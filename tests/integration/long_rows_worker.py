"""One rank of a step on one long row: prints the most bytes of activations that live tensors take, without
and with MLPs in chunks, and the bytes that it sends in all-to-alls, each beside the plan's. Started by
test_long_rows.py with as many ranks as split the row."""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.dist.sequence import exchange_of
from dsft.dist.world import World
from dsft.engine.build import build_engine
from dsft.engine.join import join
from dsft.engine.partition import sharding_for
from dsft.model.attention import attend_per_segment
from dsft.model.build import Part, build_model
from dsft.model.census import take_census
from dsft.model.config import TokenFacts
from dsft.objective.next_token import next_token
from dsft.plan.census import census_from
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import HostFacts
from dsft.plan.memory.ranks import memory
from dsft.plan.traffic import traffic
from dsft.rank.environment import detect
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec
from dsft.system.process import end
from tests.make import make_micro_batch
from tests.specs import llama, minimal_spec

VOCABULARY = 256
FACTS = TokenFacts(VOCABULARY, None, None, None)
LLAMA = llama(64, 256, 2, 4, 2)


class LivePeak(TorchDispatchMode):
    """The most bytes of the storages that operations of this thread have made and that still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return made

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def make_spec(split: int, tokens: int, chunks: int) -> Spec:
    return minimal_spec(
        model={
            "from_config": LLAMA | {"max_position_embeddings": tokens},
            "gradient_checkpointing": True,
            "mlp_chunks": chunks,
        },
        data={"packing": True, "max_length": tokens},
        parallel={"zero_stage": 1, "sequence_parallel": split},
        train={"precision": "fp32"},
        cluster={"hosts": {"here": split}, "accelerator": {"name": "cpu"}},
    )


def row(tokens: int, length: int) -> MicroBatch:
    """A packed row of segments of `length` tokens."""
    ids = torch.arange(tokens).mul(7).remainder(VOCABULARY)[None]
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = NO_TARGET
    positions = torch.arange(tokens).remainder(length)[None]
    return make_micro_batch(ids, positions, targets, lengths=(length,) * (tokens // length)).to(
        torch.device("cpu")
    )


def measure(world: World, tokens: int, length: int, chunks: int, sent: list[int]) -> dict[str, Any]:
    layout = world.layout
    spec = make_spec(layout.sequence_parallel, tokens, chunks)
    census = census_from(take_census(spec.model, FACTS, cuts=False))
    config = deepspeed_config(spec, batch_sizes(spec.train, 1), HostFacts(census.elements))
    policy = build_model(spec.model, FACTS, 1, torch.float32, Part(sharding=sharding_for(config, world)))
    attend_per_segment(policy.causal_lm, "auto", length, exchange=exchange_of(world))
    engine: Any = build_engine(policy, spec, config, world, next_token())
    batch, counts = row(tokens, length), {"tokens": tokens - 1, "sequences": 1}
    gc.collect()
    sent.clear()
    with LivePeak() as live:
        loss = float(world.sum(engine.step([batch], counts, 1e-3).sums))
    engine._engine.destroy()
    hosts = {"here": layout.world_size}
    planned = memory(census, spec, layout, hosts, tokens).stages[0]
    flows = [f for f in traffic(census, spec, layout, hosts, tokens) if f.what.startswith("all-to-alls")]
    return {
        "peak": live.peak,
        "planned": planned.activations + planned.head,
        "sent": sum(sent),
        "to_send": sum(flow.bytes for flow in flows),
        "loss": loss / counts["tokens"],
    }


def count_exchanges(size: int) -> list[int]:
    """Return where each later all-to-all adds the bytes that this rank sends to the others."""
    sent: list[int] = []
    plain = torch.distributed.all_to_all_single

    def counted(output: torch.Tensor, given: torch.Tensor, **keywords: Any) -> Any:
        sent.append(given.nbytes * (size - 1) // size)
        return plain(output, given, **keywords)

    torch.distributed.all_to_all_single = counted
    return sent


def main(tokens: int, length: int) -> None:
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    world = join(detect(os.environ), Layout(size, 1, size))
    sent = count_exchanges(size)
    for chunks in (1, 8):
        found = world.gather(measure(world, tokens, length, chunks, sent))
        if world.rank == 0:
            print("FOUND " + json.dumps({"chunks": chunks, "ranks": found}), flush=True)
    world.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    end(0)
