"""Which ranks share rows, and which of them reports sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsft.engine import split
from dsft.engine.split import RowSplit
from dsft.plan.layout import Layout
from tests.in_threads import Threads


def test_consecutive_ranks_share_rows_and_the_first_of_them_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split.dist, "new_group", lambda ranks, timeout: tuple(ranks))
    monkeypatch.setattr(split, "_exchange", split._exchange.__wrapped__)  # without its cache
    model: Any = SimpleNamespace(config=None)
    sums = torch.ones(2)
    for rank in range(4):
        world: Any = SimpleNamespace(rank=rank, world_size=4, layout=Layout(4, 1, 2))
        exchange = split.exchange_of(world)
        assert exchange is not None
        first = rank // 2 * 2
        assert (exchange.group, exchange.number, exchange.size) == ((first, first + 1), rank - first, 2)
        assert RowSplit(model, world).reported(sums).tolist() == [1 - rank % 2] * 2
        world.layout = Layout(4, 1)
        assert split.exchange_of(world) is None
        assert RowSplit(model, world).reported(sums) is sums


def test_a_rank_gets_its_share_of_the_heads_for_all_tokens_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks, two of four heads each, three tokens each."""
    ranks, parts = Threads(2, monkeypatch), torch.randn(2, 1, 4, 3, 5)
    whole = torch.cat(list(parts), 2)  # (1, heads, tokens, width)

    def exchanged(number: int) -> None:
        own = ranks.to_heads(parts[number])
        assert torch.equal(own, whole[:, 2 * number : 2 * number + 2])
        assert torch.equal(ranks.to_tokens(own.transpose(1, 2)), parts[number].transpose(1, 2))

    ranks.run(exchanged)
