"""What the plan counts where ranks split rows (parallel.sequence_parallel): tokens, memory, traffic."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dsft.errors import SpecError
from dsft.model.attention_loop import KEYWORD, segment_attention
from dsft.plan.build import build_plan
from dsft.plan.census import Census, Heads, Parameter
from dsft.plan.memory.attention import BACKWARD, BYTES_PER_SCORE
from dsft.plan.memory.ranks import RankMemory, memory
from dsft.plan.memory.reference import with_reference
from dsft.plan.traffic import Flow, traffic
from dsft.spec.layout import hosts_of_ranks, layout_of

HIDDEN, LAYERS, TOKENS = 1000, 4, 1_000_002
HEADS = Heads(queries=8, keys=2, width=50, values=40)


def census(heads: Heads | None = HEADS) -> Census:
    layers = [Parameter(f"layers.{i}.w", (HIDDEN, HIDDEN), i, False, ()) for i in range(LAYERS)]
    embed = Parameter("embed", (2000, HIDDEN), None, True, ())
    head = Parameter("head", (2000, HIDDEN), None, False, ())
    return Census("X", LAYERS, None, (embed, *layers, head), heads=heads)


@pytest.fixture
def rank(make_spec: Any) -> Any:
    def run(size: int, heads: Heads | None = HEADS, **sections: Any) -> RankMemory:
        sections.setdefault("cluster", {"hosts": {"a": 4}, "accelerator": {"name": "H100"}})
        spec = make_spec(parallel={"zero_stage": 1, "sequence_parallel": size}, **sections)
        return memory(census(heads), spec, layout_of(spec.parallel, 4), {"a": 4}, TOKENS).stages[0]

    return run


def part(size: int) -> int:
    return -(-TOKENS // size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_has_the_activations_of_its_tokens_and_the_shards_of_all_ranks(rank: Any, size: int) -> None:
    """Of one matrix input, output and the widest once more; of attention with fewer key heads than ranks the
    output for its heads, and the keys and values that are added. Beside the logits the last layer's output
    and its norm."""
    split, whole = rank(size), rank(1)
    repeated = {1: 0, 2: 0, 4: 2}[size]  # to lcm(2, ranks) heads
    own = 3 * HIDDEN + (size > 1) * (8 * 40 + repeated * (50 + 40))
    layer = 4 * part(size) * own
    assert split.activations == LAYERS * layer + 4 * part(size) * 2 * HIDDEN
    assert split.one_layer == layer + 4 * part(size) * 4 * HIDDEN
    for field in ("parameters", "gradients", "master", "moments", "buffers"):
        assert getattr(split, field) == getattr(whole, field)
    assert split.head <= whole.head


def test_checkpointed_inputs_and_scored_logits_are_divided_too(rank: Any) -> None:
    model = {"gradient_checkpointing": True}
    inputs = [rank(size, None, model=model).activations for size in (1, 2)]
    assert inputs[1] == pytest.approx(inputs[0] / 2, abs=100)
    layer = 4 * part(2) * 3 * HIDDEN
    assert inputs[1] == 4 * part(2) * LAYERS * HIDDEN + layer + int(layer * BACKWARD)


def test_the_reference_has_its_tokens_of_each_row(make_spec: Any) -> None:
    found = []
    for size in (1, 2):
        spec = make_spec(
            task="dpo",
            dpo={"reference": "precomputed"},
            parallel={"sequence_parallel": size, "zero_stage": 1},
        )
        layout = layout_of(spec.parallel, 4)
        alone = memory(census(), spec, layout, {"a": 4}, TOKENS)
        _, reference = with_reference(alone, census(), spec, layout, {"a": 4}, TOKENS)
        found.append(reference.stages[0].activations)
    assert found == [4 * part(1) * 7 * HIDDEN, 4 * part(2) * (7 * HIDDEN + 8 * 40)]


def test_soft_capped_scores_are_those_of_a_share_of_the_heads(rank: Any) -> None:
    capped = replace(HEADS, softcap=True)
    for size in (1, 2):
        added = rank(size, capped).one_layer - rank(size).one_layer
        assert added == BYTES_PER_SCORE * 8 * part(size) * 2048  # data.max_length
    flash = {"attention": "flash_attention_2"}
    assert rank(1, capped, model=flash).one_layer == rank(1, model=flash).one_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_capped_score_keeps_as_many_bytes_as_counted(dtype: torch.dtype) -> None:
    """What autograd saves of the loop, in one block of queries."""
    query, key, value = (torch.randn(1, 4, 64, 2, dtype=dtype, requires_grad=True) for _ in range(3))
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    keywords: dict[str, Any] = {KEYWORD: ((64, 0),), "softcap": 5.0, "sliding_window": None}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = segment_attention(nn.Module(), query, key, value, None, **keywords)
    assert output.requires_grad
    scores = 4 * 64 * 64
    small = 64 * 64 + 8 * 4 * 64 * 2 * 4  # the mask; queries, keys, values, shares of them
    assert BYTES_PER_SCORE * scores <= sum(saved.values()) <= BYTES_PER_SCORE * scores + small


@pytest.fixture
def flows(make_spec: Any) -> Any:
    def run(hosts: dict[str, int], size: int, **sections: Any) -> dict[str, Flow]:
        parallel = {"sequence_parallel": size} | sections.pop("parallel", {})
        spec = make_spec(parallel=parallel, **sections)
        found = traffic(census(), spec, layout_of(spec.parallel, sum(hosts.values())), hosts, TOKENS)
        return {f"{flow.what}, {flow.link}": flow for flow in found}

    return run


WITHIN = "all-to-alls of attention, within a host"


def test_a_rank_sends_each_other_rank_its_tokens_of_that_ranks_heads(flows: Any) -> None:
    """The law: (N - 1)/N × T/N × (query heads + key heads × D, and as much with the size of values)."""
    assert not any("all-to-all" in name or "log-prob" in name for name in flows({"a": 4}, 1))
    two = flows({"a": 4}, 2)[WITHIN]
    assert two.times == 2 * LAYERS * 3  # forward and backward, 3 micro-batches
    assert two.bytes_each == pytest.approx(1 / 2 * TOKENS / 2 * (8 + 2) * (50 + 40) * 4, rel=1e-5)
    four = flows({"a": 4}, 4)[WITHIN]  # two key heads are repeated
    assert four.bytes_each == pytest.approx(3 / 4 * TOKENS / 4 * (8 + 4) * (50 + 40) * 4, rel=1e-5)
    again = flows({"a": 4}, 2, model={"gradient_checkpointing": True}, train={"precision": "bf16"})[WITHIN]
    assert (again.times, again.bytes_each) == (3 * LAYERS * 3, two.bytes_each // 2)
    assert flows({"a": 4}, 2, task="dpo", dpo={"reference": "live"})[WITHIN].times == 3 * LAYERS * 3
    logps = flows({"a": 4}, 2)["log-probabilities, within a host"]
    assert (logps.times, logps.bytes_each) == (3, 4 * TOKENS // 2)


def test_each_stage_of_a_pipeline_exchanges_for_its_own_layers(flows: Any) -> None:
    staged = flows({"a": 4}, 2, parallel={"pipeline_stages": 2, "zero_stage": 0})
    assert staged[WITHIN].times == 2 * (LAYERS // 2) * 3
    assert staged["hidden states, within a host"].bytes_each == part(2) * HIDDEN * 4


def test_a_group_on_two_hosts_sends_over_the_network(flows: Any) -> None:
    """The rank that is alone on its host sends to all three others there."""
    across = flows({"a": 1, "b": 3}, 4)
    one = flows({"a": 4}, 4)[WITHIN].bytes_each // 3
    assert across["all-to-alls of attention, between hosts"].bytes_each == pytest.approx(3 * one, abs=3)
    assert across[WITHIN].bytes_each == pytest.approx(2 * one, abs=3)
    even = flows({"a": 2, "b": 2}, 2)
    assert not any("all-to-alls" in name and "between" in name for name in even)
    assert hosts_of_ranks({"a": 1, "b": 2}) == ["a", "b", "b"]


def test_all_ranks_average_the_gradients(flows: Any) -> None:
    parallel = {"zero_stage": 1}
    alone, split = flows({"a": 4}, 1, parallel=parallel), flows({"a": 4}, 4, parallel=parallel)
    for name, flow in alone.items():
        assert split[name] == flow


def test_heads_that_the_ranks_cannot_share_are_named(monkeypatch: Any, make_spec: Any) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: census())
    with pytest.raises(SpecError, match="3 does not divide the model's 8 attention heads.*set 2"):
        build_plan(make_spec(parallel={"sequence_parallel": 3}))


def test_rows_that_cannot_be_split_are_refused_by_name(monkeypatch: Any, make_spec: Any) -> None:
    reason = "its layers of type conv mix tokens outside of the attention"
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: replace(census(None), unsplittable=reason))
    with pytest.raises(SpecError, match=f"{reason}; set it to 1"):
        build_plan(make_spec(parallel={"sequence_parallel": 2}))
    build_plan(make_spec())
    other = replace(census(), heads=replace(HEADS, queries=9))  # of another model as the reference
    monkeypatch.setattr("dsft.plan.build.census", lambda model, _: other if model.name_or_path else census())
    dpo = {"reference": "live", "reference_model": "other"}
    with pytest.raises(SpecError, match=r"2 does not divide the model's 9 .* \(of dpo.reference_model\)"):
        build_plan(make_spec(task="dpo", dpo=dpo, parallel={"sequence_parallel": 2}))
