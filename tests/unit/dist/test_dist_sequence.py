"""Which ranks share rows, and which of them reports sums."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsft.dist import sequence
from dsft.dist.sequence import RowSplit
from dsft.model.attention_split import split_attention
from dsft.spec.layout import Layout
from tests.in_threads import Threads


def test_sequence_parallel_groups_are_consecutive_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence.dist, "new_group", lambda ranks, timeout: tuple(ranks))
    monkeypatch.setattr(sequence, "_exchange", sequence._exchange.__wrapped__)  # without its cache
    model: Any = SimpleNamespace(config=None)
    sums = torch.ones(2)
    for rank in range(4):
        world: Any = SimpleNamespace(rank=rank, world_size=4, layout=Layout(4, 1, 2))
        exchange = sequence.exchange_of(world)
        first = rank // 2 * 2
        assert (exchange.group, exchange.number, exchange.size) == ((first, first + 1), rank - first, 2)
        assert RowSplit(model, world).reported(sums).tolist() == [1 - rank % 2] * 2
        world.layout = Layout(4, 1)
        assert sequence.exchange_of(world) is None
        assert RowSplit(model, world).reported(sums) is sums


def test_all_to_all_exchanges_heads_for_tokens_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, three tokens each, of two tensors: two of four heads, and one of two heads of another
    size."""
    ranks, parts, keys = Threads(2, monkeypatch), torch.randn(2, 1, 4, 3, 5), torch.randn(2, 1, 2, 3, 7)
    whole, whole_keys = torch.cat(list(parts), 2), torch.cat(list(keys), 2)  # (1, heads, tokens, width)

    def exchanged(number: int) -> None:
        own, own_keys = ranks.to_heads(parts[number], keys[number])
        assert torch.equal(own, whole[:, 2 * number : 2 * number + 2])
        assert torch.equal(own_keys, whole_keys[:, number : number + 1])
        assert torch.equal(ranks.to_tokens(own.transpose(1, 2)), parts[number].transpose(1, 2))

    ranks.run(exchanged)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_a_layer_makes_two_exchanges_in_each_direction(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values go together, also where there are fewer heads of keys, of another size than
    those of values; output and gradients are those of the whole row, rounded to float64."""
    ranks, counts = Threads(2, monkeypatch), [0, 0]
    exchange = sequence.dist.all_to_all_single

    def counted(received: Tensor, sent: Tensor, group: Any) -> None:
        counts[ranks.number] += 1
        exchange(received, sent, group)

    monkeypatch.setattr(sequence.dist, "all_to_all_single", counted)
    number_of = {"query": heads[0], "key": heads[1], "value": heads[1]}
    widths = {"query": 8, "key": 8, "value": 6}
    rows = [torch.randn(1, number_of[x], 10, widths[x], dtype=torch.float64) for x in widths]
    whole = [row.requires_grad_() for row in rows]
    pull = torch.randn(1, 10, heads[0], 6, dtype=torch.float64)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, None]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return ((query @ key.mT).softmax(3) @ value).transpose(1, 2), None

    expected, _ = attend(nn.Module(), *whole, mask=None)
    gradients = torch.autograd.grad(expected, whole, pull)

    def one_rank(rank: int) -> None:
        own = slice(5 * rank, 5 * rank + 5)
        mine = [row.detach()[:, :, own].clone().requires_grad_() for row in whole]
        found, _ = split_attention(attend, ranks)(nn.Module(), *mine, None)
        assert counts[rank] == 2
        torch.testing.assert_close(found, expected[:, own], rtol=1e-12, atol=1e-14)
        found.backward(pull[:, own])  # type: ignore[no-untyped-call]
        assert counts[rank] == 4
        for part, gradient in zip(mine, gradients, strict=True):
            assert part.grad is not None
            torch.testing.assert_close(part.grad, gradient[:, :, own], rtol=1e-12, atol=1e-14)

    ranks.run(one_rank)
