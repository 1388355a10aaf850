"""Run on every rank of one launch of four: attention over rows that are split, in float64, against the same
attention over the whole row.

    python split_worker.py OUTPUT.json

Rank 0 writes {case name: {figure: largest |difference| over the ranks}}, for groups of two and of four.

output    of attention, this rank's tokens
gradient  of queries, keys and values, this rank's tokens
adjoint   |⟨A x, y⟩ − ⟨x, Aᵀ y⟩| ÷ |⟨A x, y⟩| over a group, of both exchanges A and their backward passes Aᵀ
gathered  tokens that are not at their place once the parts of a micro-batch are together again
pulled    what the gather's backward passes on, from the gradient of this rank's part
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dsft.data.steps.batch import NO_TARGET
from dsft.data.steps.split import part_of
from dsft.dist.sequence import RankExchange, RowSplit, exchange_of
from dsft.dist.world import World
from dsft.engine.join import join
from dsft.model.attention_loop import KEYWORD, segment_attention
from dsft.model.attention_split import SPLIT, split_attention
from dsft.rank.environment import detect
from dsft.spec.layout import Layout
from tests.make import make_micro_batch

RANKS, GROUPS_OF, SIZE = 4, (2, 4), 6
HEADS = ((4, 4), (4, 2), (4, 1), (12, 3), (8, 8), (12, 6))
"""Of queries, and of keys and values: as many, fewer than the ranks, and not divided by them."""
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 2.0, "scaling": 0.7},
    "both": {"softcap": 2.0, "sliding_window": 3},
}
ROWS: dict[str, tuple[tuple[int, int], ...]] = {
    "one": ((40, 0),),  # tokens, position of the first
    "packed": ((3, 0), (17, 0), (1, 0), (11, 0), (8, 0)),
    "shared": ((13, 0), (9, 7), (2, 0), (10, 2), (6, 0)),
    "blocks": ((300, 0), (20, 0)),  # longer than QUERY_BLOCK
}


def attention(exchange: RankExchange, segments: Any, heads: tuple[int, int], form: dict[str, Any]) -> Any:
    draw = torch.Generator().manual_seed(sum(heads))
    tokens = sum(length for length, _ in segments)
    shapes = [(1, number, tokens, SIZE) for number in (heads[0], heads[1], heads[1])]
    whole: Any = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    pull = torch.randn(1, tokens, heads[0], SIZE, generator=draw, dtype=torch.float64)
    mine: Any = [part(x, 2, exchange).detach().requires_grad_() for x in whole]
    given = {KEYWORD: segments, "sliding_window": None, **form}
    attend: Any = segment_attention
    expected = attend(nn.Module(), *whole, None, **given)[0]
    found = split_attention(attend, exchange)(nn.Module(), *mine, None, **given)[0]
    right = torch.autograd.grad(expected, whole, pull)
    gradients = torch.autograd.grad(found, mine, part(pull, 1, exchange))
    return {
        "output": apart(found, part(expected, 1, exchange)),
        "gradient": max(apart(a, part(b, 2, exchange)) for a, b in zip(gradients, right, strict=True)),
    }


def exchanges(exchange: RankExchange, world: World) -> float:
    """The backward pass of each exchange is its adjoint, over all ranks of the group together."""
    size = exchange.size
    steps: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
        (lambda x: exchange.to_heads(x)[0], (1, 2 * size, 3, SIZE)),
        (exchange.to_tokens, (1, 3 * size, 2, SIZE)),
    ]
    found = []
    draw = torch.Generator().manual_seed(world.rank)
    for step, shape in steps:
        x = torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
        output = step(x)
        y = torch.randn(output.shape, generator=draw, dtype=torch.float64)
        (back,) = torch.autograd.grad(output, x, y)
        there, here = world.sum(torch.stack([(output * y).sum(), (x * back).sum()]).detach())
        found.append(float((there - here).abs() / there.abs()))
    return max(found)


def cuts(exchange: RankExchange, world: World, rows: int, length: int, packed: bool) -> dict[str, float]:
    """Every tensor of a micro-batch at its place: part after part they are the whole."""
    tokens = rows * length
    ids = torch.arange(1, tokens + 1).view(rows, length)
    targets = torch.where(ids % 3 == 0, ids, NO_TARGET)
    positions = torch.arange(length).repeat(rows, 1)
    lengths = (length,) * rows if packed else None
    shape = (1, tokens) if packed else (rows, length)
    whole = make_micro_batch(
        ids.view(shape), positions.view(shape), targets.view(shape), lengths,
        noise_scale=ids.view(shape).float(), is_padding=(ids % 5 == 0).view(shape),
    ).to(torch.device("cpu"))  # fmt: skip
    config: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation=f"any{SPLIT}"))
    split = RowSplit(config, world)
    mine = split.part(whole)
    assert mine.num_targets == int((mine.tokens.targets != NO_TARGET).sum())
    assert mine.segments is not None and sum(mine.segments.lengths) == mine.shape.numel() * exchange.size
    at = torch.arange(mine.shape.numel()) + exchange.number * mine.shape.numel()
    assert mine.tokens.is_padding is not None and mine.tokens.is_padding[0, at >= tokens].all()
    fields = ("input_ids", "position_ids", "targets", "noise_scale", "is_padding")
    wrong, pulled = 0.0, 0.0
    for name in fields:
        value = getattr(whole.tokens, name)
        logps = getattr(mine.tokens, name).double().requires_grad_()
        together = split.whole(logps, whole)
        wrong += float((together != value).sum())
        draw = torch.Generator().manual_seed(tokens)
        pull = torch.randn(value.shape, generator=draw, dtype=torch.float64)
        (gradient,) = torch.autograd.grad(together, logps, pull)
        pulled_on = dataclasses.replace(whole, tokens=whole.tokens._replace(noise_scale=pull))
        expected = part_of(pulled_on, exchange.number, exchange.size)
        assert expected.tokens.noise_scale is not None
        pulled = max(pulled, apart(gradient, expected.tokens.noise_scale))
    return {"gathered": wrong, "pulled": pulled}


def part(whole: Tensor, dim: int, exchange: RankExchange) -> Tensor:
    return whole.chunk(exchange.size, dim)[exchange.number]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def main(output: Path) -> None:
    torch.set_num_threads(1)
    joined = join(detect(os.environ), Layout(RANKS, 1))
    found: dict[str, dict[str, float]] = {}
    for size in GROUPS_OF:
        world = dataclasses.replace(joined, layout=Layout(RANKS, 1, size))
        exchange = exchange_of(world)
        assert exchange is not None
        for heads, (row, form) in zip(itertools.cycle(HEADS), itertools.product(ROWS, FORMS)):
            name = f"{size} ranks, {heads[0]} and {heads[1]} heads, {row}, {form}"
            found[name] = attention(exchange, ROWS[row], heads, FORMS[form])
        found[f"{size} ranks"] = {"adjoint": exchanges(exchange, world)}
        for rows, length in ((1, 1), (1, 2), (1, 8), (3, 5), (2, 9), (5, 3)):
            for packed in (False, True):
                name = f"{size} ranks, {rows} rows of {length}" + ", packed" * packed
                found[name] = cuts(exchange, world, rows, length, packed)
    ranks = joined.gather(found)
    if joined.rank == 0:
        largest = {
            name: {figure: max(rank[name][figure] for rank in ranks) for figure in figures}
            for name, figures in found.items()
        }
        output.write_text(json.dumps(largest, indent=1))
    joined.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
