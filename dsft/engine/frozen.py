"""Score micro-batches with a model that is not trained.

The model is whole on every rank, sharded by ZeRO 3, or in pipeline stages. Without an optimizer DeepSpeed
only gathers and releases parameters. Its pipeline engine is not used, since a forward pass alone sends one
tensor to the next stage.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import inspect
import io
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor

from dsft.data.steps.batch import MicroBatch, Tokens
from dsft.dist.sequence import RowSplit
from dsft.dist.world import World
from dsft.engine.api import ScoreOutput, log_probabilities
from dsft.engine.partition import drop_copies, place_buffers
from dsft.model.policy import Policy, PolicyOutput


class FrozenEngine:
    """An engine that only scores, as `Scorer.score`; parameters are all that it stores."""

    def __init__(self, policy: Policy, module: Any, world: World) -> None:
        """module: `policy`, or DeepSpeed's engine around it."""
        self._policy, self._module, self._world = policy, module, world
        self._split = RowSplit(policy.causal_lm, world)

    @torch.no_grad()
    def score(
        self,
        micro_batches: Sequence[MicroBatch],
        output: ScoreOutput = log_probabilities,
        *,
        training: bool = False,
    ) -> tuple[Tensor, ...]:
        """See `Scorer.score`."""
        self._module.train(training)
        batches = (micro_batch.to(self._world.device) for micro_batch in micro_batches)
        scored = ((self._forward(batch), batch) for batch in batches)
        return tuple(output(logps, batch) for logps, batch in scored if logps is not None)

    def close(self) -> None:
        """Free the parameters and return their memory; the engine cannot score afterwards. The module is
        removed from DeepSpeed too, which otherwise keeps every module under ZeRO 3: in a list of the running
        modules, and in a cache of what each one releases (partitioned_param_coordinator.py:634
        __params_to_release)."""
        if self._module is not self._policy:
            self._module.destroy()
            stack = parameter_offload.FWD_MODULE_STACK
            stack[:] = [module for module in stack if module is not self._policy]
            cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
            inspect.getclosurevars(cached).nonlocals["func"].cache_clear()
        for tensor in (*self._policy.parameters(), *self._policy.buffers()):
            tensor.data = tensor.new_empty(0)
            if hasattr(tensor, "ds_tensor"):
                tensor.ds_tensor = None
        drop_copies(self._policy.parameters())
        del self._module, self._policy
        gc.collect()  # an engine and its hooks refer to each other
        give_back_memory()

    def _forward(self, batch: MicroBatch) -> Tensor | None:
        """Return the log-probabilities (B, T); None where this rank does not have the last stage."""
        part = self._split.part(batch)
        tokens = part.tokens._replace(noise_scale=None)
        inputs = tokens.input_ids if self._policy.is_first else self._received(tokens)
        output: Tensor | PolicyOutput = self._module(inputs, tokens, part.segments, part.num_targets)
        if isinstance(output, PolicyOutput):
            return self._split.whole(output.logps, batch)
        dist.send(output.contiguous(), self._world.rank + self._world.layout.shards)
        return None

    def _received(self, tokens: Tokens) -> Tensor:
        """Receive (B, T, hidden) from the previous stage. Every stage has the micro-batch, and so its
        shape."""
        width = self._policy.causal_lm.config.get_text_config().hidden_size
        dtype = next(self._policy.parameters()).dtype
        hidden = torch.empty(*tokens.input_ids.shape, width, dtype=dtype, device=self._world.device)
        dist.recv(hidden, self._world.rank - self._world.layout.shards)
        return hidden


def give_back_memory() -> None:
    """Return freed memory to the device and to the host: cached GPU memory and pinned memory of torch's
    allocators, and glibc's free small blocks (malloc_trim(3))."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def build_frozen_engine(policy: Policy, config: Mapping[str, Any], world: World) -> FrozenEngine:
    """Build the engine of a model that is not trained. A collective. `policy`: the stage `world.stage` of
    `world.layout.pipeline_stages`, filled with `sharding_for(config, world)`. Its parameters are frozen from
    here on."""
    policy.requires_grad_(False)
    policy.eval()
    place_buffers(policy, world.device)
    if world.layout.pipeline_stages > 1:
        return FrozenEngine(policy, policy.to(world.device), world)
    own = copy.deepcopy(dict(config))  # DeepSpeed writes into it
    with contextlib.redirect_stdout(io.StringIO()):  # it prints memory and topology at any log level
        engine, *_ = deepspeed.initialize(model=policy, config=own, dist_init_required=False)
    return FrozenEngine(policy, engine, world)
