"""Digests of replicated tensors, and the messages where ranks differ."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dsft.dist.world import World
from dsft.engine import replicas
from dsft.engine.partition import share_buffers
from dsft.engine.replicas import Replicas, digest, replicated
from dsft.errors import WorldError
from dsft.spec.layout import Layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_each_flipped_bit_changes_the_digest(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(replicas, "BLOCK", 7)
    tensor = torch.randn(5, 6).to(dtype)
    usual = int(digest(tensor))
    assert usual == int(digest(tensor.clone())) == int(digest(tensor.T.contiguous().T))
    bits = tensor.view(-1).view(torch.uint8)
    for byte in range(len(bits)):
        for bit in range(1 if dtype == torch.bool else 8):
            bits[byte] ^= 1 << bit
            assert int(digest(tensor)) != usual
            bits[byte] ^= 1 << bit


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))
        self.rotary = nn.Module()
        self.rotary.rope_type = "dynamic"
        self.rotary.register_buffer("inv_freq", torch.ones(2))


def compared(models: list[Model]) -> list[str]:
    """Return what each data-parallel rank raises after a step, "" for none; `models`: by rank."""
    return raised_by([replicated(model, []) for model in models])


def raised_by(held: list[dict[str, Tensor]], stages: int = 1) -> list[str]:
    """Return what each rank raises; `held`: its tensors, by rank."""
    layout = Layout(len(held), stages)
    digests = [
        (f"node{rank}", {name: int(digest(value)) for name, value in tensors.items()})
        for rank, tensors in enumerate(held)
    ]

    def rank_of(rank: int, gathered: list[Any]) -> World:
        world = World(rank, len(held), rank, layout, torch.device("cpu"))
        return cast(World, SimpleNamespace(**vars(world), gather=lambda mine: gathered))

    names = [sorted(tensors) for tensors in held]
    ranks = [Replicas(lambda t=tensors: t, rank_of(r, names), 1) for r, tensors in enumerate(held)]  # type: ignore[misc]
    total: Tensor = sum((one.mine(1, saves=False) for one in ranks), torch.zeros(()))
    raised = []
    for rank, one in enumerate(ranks):
        one._world = rank_of(rank, digests)
        try:
            one.check(total, 1)
            raised.append("")
        except WorldError as error:
            raised.append(str(error))
    return raised


def test_stages_compare_tied_weights() -> None:
    """Four ranks, two of each stage: what a stage's ranks hold, what all hold, and what two stages tie."""

    def of_stage(own: str) -> dict[str, Tensor]:
        return {
            own: torch.full((3,), 2.0 if own == "first" else 5.0),
            "table": torch.ones(2),
            "tied": torch.ones(4),
        }

    held = [of_stage("first"), of_stage("first"), of_stage("last"), of_stage("last")]
    assert raised_by(held, stages=2) == [""] * 4
    held[3]["last"] = held[3]["last"] + 1
    held[2]["tied"] = held[2]["tied"] + 1
    raised = raised_by(held, stages=2)
    assert raised[0].startswith(
        "step 1: rank 2 (node2) has values of tied that differ from those of the other ranks; "
        "ranks 2 (node2), 3 (node3) have values of last that differ from each other, and they must be"
    )
    assert len(set(raised)) == 1


def test_equal_replicas_pass() -> None:
    models = [Model(), Model(), Model()]
    models[1].rotary.inv_freq += 1  # follows the rows that a rank has seen
    assert compared(models) == ["", "", ""]


def test_differing_rank_and_tensors_are_named_on_every_rank() -> None:
    models = [Model(), Model(), Model()]
    with torch.no_grad():
        models[2].second.weight[0, 0] += 1e-3
        models[2].table[1] = 7
    raised = compared(models)
    assert raised[0].startswith(
        "step 1: rank 2 (node2) has values of table, second.weight that differ from those of the "
        "other ranks, and they must be"
    )
    assert len(set(raised)) == 1


def test_two_differing_ranks_are_both_named() -> None:
    models = [Model(), Model()]
    with torch.no_grad():
        models[0].first.bias[0] += 1
    assert compared(models)[1].startswith(
        "step 1: ranks 0 (node0), 1 (node1) have values of first.bias that differ from each other,"
    )


def test_swapped_tensors_are_found() -> None:
    models = [Model(), Model()]
    with torch.no_grad():
        for model, values in zip(models, ((1.0, 2.0), (2.0, 1.0)), strict=True):
            model.first.bias.fill_(values[0])
            model.second.bias.fill_(values[1])
    assert "first.bias, second.bias" in compared(models)[0]


def test_comparison_is_due_every_n_steps_and_before_a_save() -> None:
    world = cast(
        World, SimpleNamespace(rank=0, world_size=2, layout=Layout(2, 1), device=torch.device("cpu"))
    )
    one = Replicas(lambda: replicated(Model(), []), world, 3)
    sizes = [one.mine(step, saves=step == 5).numel() for step in range(1, 10)]
    assert [size > 0 for size in sizes] == [False, False, True, False, True, False, False, True, False]
    never = Replicas(lambda: replicated(Model(), []), world, None)
    assert [never.mine(step, saves=step == 5).numel() > 0 for step in (4, 5, 500)] == [False, True, False]


def test_ranks_have_the_buffers_of_rank_0() -> None:
    """A table that hosts of other processors computed may differ in the last bit."""
    models: list[Any] = [Model(), Model()]
    models[1].table[2] += 1e-6
    first = {name: buffer.clone() for name, buffer in models[0].named_buffers()}
    world = cast(World, SimpleNamespace(broadcast=lambda mine: first))
    share_buffers(models[1], world)
    assert compared(models) == ["", ""]
    assert torch.equal(models[1].table, torch.arange(4.0))
