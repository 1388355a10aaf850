"""Split the rows of a micro-batch over the ranks of a group, and put their log-probabilities together
again."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.split import part_of
from dsft.dist.world import TIMEOUT, World
from dsft.model.attention_split import SPLIT


class RankExchange:
    """The `Exchange` of this rank's group. number: of this rank in it."""

    def __init__(self, group: dist.ProcessGroup, number: int, size: int) -> None:
        self.group, self.number, self.size = group, number, size

    def to_heads(self, *tokens: Tensor) -> list[Tensor]:
        """See `Exchange.to_heads`."""
        length = tokens[0].shape[2]
        by_rank = [x.squeeze(0).transpose(0, 1).reshape(length, self.size, -1) for x in tokens]
        whole: Tensor = _AllToAll.apply(torch.cat(by_rank, 2).transpose(0, 1), self.group)
        parts = whole.view(self.size * length, -1).split([x.shape[2] for x in by_rank], 1)
        return [
            part.unflatten(1, (-1, x.shape[3])).transpose(0, 1)[None]
            for part, x in zip(parts, tokens, strict=True)
        ]

    def to_tokens(self, heads: Tensor) -> Tensor:
        """See `Exchange.to_tokens`."""
        _, length, share, width = heads.shape
        by_rank = heads.reshape(self.size, length // self.size, share, width)
        mine: Tensor = _AllToAll.apply(by_rank, self.group)
        tokens = mine.transpose(0, 1).reshape(1, length // self.size, self.size * share, width)
        return tokens.contiguous()  # as attention returns it: some models take a view

    def sum(self, tensor: Tensor) -> Tensor:
        """See `Exchange.sum`."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


class _AllToAll(torch.autograd.Function):
    """Sends row i of (size, …) to rank i and returns what the ranks have sent, row by row; the gradients take
    the same way back."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(by_rank, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = by_rank.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Gather(torch.autograd.Function):
    """Gathers the parts (1, n) of all ranks as (size × n,). Each rank computes the same loss from them, and
    the gradients of all ranks are added up, so each takes the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, exchange: RankExchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, part.shape
        whole = part.new_empty(exchange.size * part.numel())
        dist.all_gather_into_tensor(whole, part.flatten(), group=exchange.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].view(ctx.exchange.size, *ctx.shape)[ctx.exchange.number], None


def exchange_of(world: World) -> RankExchange | None:
    """Return the exchange of this rank's group; None where rows are not split. A collective."""
    size = world.layout.sequence_parallel
    return _exchange(world.rank, world.world_size, size) if size > 1 else None


@cache  # a process is in one world
def _exchange(rank: int, world_size: int, size: int) -> RankExchange:
    starts = range(0, world_size, size)
    groups = [dist.new_group(list(range(start, start + size)), timeout=TIMEOUT) for start in starts]
    return RankExchange(groups[rank // size], rank % size, size)


class RowSplit:
    """Splits the rows of one policy's micro-batches. Does nothing where rows are not split, and while the
    model's attention is the architecture's own."""

    def __init__(self, causal_lm: PreTrainedModel, world: World) -> None:
        """A collective."""
        self._config, self._exchange = causal_lm.config, exchange_of(world)

    def part(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of a micro-batch that is on the device."""
        exchange = self._active()
        return batch if exchange is None else part_of(batch, exchange.number, exchange.size)

    def whole(self, logps: Tensor, batch: MicroBatch) -> Tensor:
        """Return the log-probabilities of a whole micro-batch, on every rank of the group, as in
        `PolicyOutput`, from those of this rank's part. A collective of the group."""
        exchange = self._active()
        if exchange is None:
            return logps
        targets = batch.tokens.targets
        whole: Tensor = _Gather.apply(logps, exchange)
        each = logps.shape[2:]
        return whole.view(-1, *each)[: targets.numel()].view(*targets.shape, *each)

    def reported(self, sums: Tensor) -> Tensor:
        """Return sums over micro-batches, which all ranks of a group have, on its first rank; zeros on the
        others."""
        return sums if self._exchange is None or self._exchange.number == 0 else torch.zeros_like(sums)

    def _active(self) -> RankExchange | None:
        return self._exchange if self._config._attn_implementation.endswith(SPLIT) else None
