"""The estimate's parts, each against a formula with numbers of its own: those that docs/plan.md and
docs/internals/memory.md name."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dsft.engine.muon import orthogonal
from dsft.plan.census import Census, Parameter
from dsft.plan.cost import Cost, cost, step_flops
from dsft.plan.traffic import bubble, traffic
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import layout_of

LAYER = 10_000_000
CENSUS = Census("X", 4, None, tuple(Parameter(f"{i}", (LAYER, 1), i, False, ()) for i in range(4)))
ROW, GPU = 128, {"name": "X", "peak_tflops": 100.0}


@pytest.fixture
def costs(make_spec: Any) -> Any:
    """The cost on `ranks` GPUs of 100 TFLOP/s, with 3 micro-batches of 2 rows; without attention, since the
    census has no width."""

    def run(ranks: int, **sections: Any) -> Cost:
        hosts = {"a": ranks}
        sections.setdefault("cluster", {"hosts": hosts, "accelerator": GPU})
        spec = make_spec(data={"max_length": ROW}, **sections)
        places = layout_of(spec.parallel, ranks)
        batch = batch_sizes(spec.train, places.data_parallel, spec.data, spec.task)
        return cost(CENSUS, spec, batch, traffic(CENSUS, spec, places, hosts), hosts)

    return run


def seconds(flops: float, tokens: int = 2 * ROW) -> float:
    """On one GPU, of whose peak 55 % are reached, and half of that with micro-batches of 512 tokens."""
    return flops / (55e12 * tokens / (tokens + 512))


def test_computing_is_six_operations_and_two_more_where_recomputed(costs: Any) -> None:
    step = 3 * 2 * ROW * 4 * LAYER
    alone = costs(1)
    assert alone.computing == pytest.approx(seconds(6 * step))
    assert (alone.idle, alone.travelling, alone.updating) == (0, 0, 0)
    assert costs(1, model={"gradient_checkpointing": True}).computing == pytest.approx(seconds(8 * step))


def test_a_pipeline_waits_by_its_bubble_and_for_its_largest_stage(costs: Any) -> None:
    def idle(cut: list[int]) -> float:
        made = costs(2, parallel={"pipeline_stages": 2, "pipeline_cut": cut, "zero_stage": 0})
        return float(made.idle / made.computing)

    share = bubble(2, 3)
    assert idle([2, 2]) == pytest.approx(1 / (1 - share) - 1)
    assert idle([3, 1]) == pytest.approx(1.5 / (1 - share) - 1)


def test_traffic_takes_its_links_time(costs: Any) -> None:
    assert costs(2, parallel={"zero_stage": 0}).travelling == pytest.approx(4 * 4 * LAYER / 300e9)


def test_the_hosts_optimizer_reads_and_writes_what_its_ranks_own(costs: Any) -> None:
    offloaded = costs(2, parallel={"zero_stage": 2, "offload_optimizer": {"device": "cpu"}})
    assert offloaded.updating == pytest.approx(4 * LAYER * 28 / 200e9)


def test_a_reference_costs_its_forward_where_it_is_made(costs: Any) -> None:
    def computing(reference: str) -> float:
        train = {"num_train_epochs": 2.0}
        return float(costs(1, task="dpo", dpo={"reference": reference}, train=train).computing)

    step = 3 * 2 * 2 * ROW * 4 * LAYER
    assert computing("live") == pytest.approx(seconds(8 * step, tokens=4 * ROW))
    assert computing("precomputed") == pytest.approx(seconds(7 * step, tokens=4 * ROW))


def test_the_update_of_muon_costs_its_products_on_each_rank_that_is_not_sharded(make_spec: Any) -> None:
    """As torch counts them."""
    shapes = ((40, 60), (60, 40), (3, 10, 20))
    layers = (Parameter(f"layers.{i}.experts.x", shape, i, False, ()) for i, shape in enumerate(shapes))
    census = Census("X", 3, None, (*layers, Parameter("norm.weight", (40,), None, False, ())))
    with FlopCounterMode(display=False) as counted:
        for shape in shapes:
            orthogonal(torch.ones(shape), torch.float32)
    for zero, sharing in ((0, 1), (1, 2)):
        muon = {"name": "muon", "learning_rate": 1e-3}
        spec = make_spec(
            cluster={"hosts": {"a": 2}, "accelerator": GPU}, parallel={"zero_stage": zero}, optim=muon
        )
        batch = batch_sizes(spec.train, 2, spec.data, spec.task)
        found = cost(census, spec, batch, (), {"a": 2}).updating
        assert found == pytest.approx(counted.get_total_flops() / 55e12 / sharing)


def test_scoring_several_tokens_costs_the_heads_product_again(make_spec: Any) -> None:
    head = Parameter("lm_head.weight", (1000, 10), None, False, ())
    census = Census("X", 4, None, (*CENSUS.parameters, head))
    teacher = make_spec(task="distill", distill={"reference_model": "t", "reference": "live"})
    assert step_flops(census, teacher) - step_flops(census, make_spec()) == pytest.approx(
        2 * 10_000 + 2 * (4 * LAYER + 10_000)
    )


def test_an_estimate_before_the_step_costs_a_forward_of_the_policy_and_of_the_reference(costs: Any) -> None:
    def computing(**kto: str) -> float:
        return float(costs(1, task="kto", kto=kto, train={"num_train_epochs": 2.0}).computing)

    step = 3 * 2 * ROW * 4 * LAYER  # a forward is 2 operations of it, forward and backward 6
    assert computing(reference="live") == pytest.approx(seconds(12 * step))
    assert computing() == pytest.approx(seconds(11 * step))
    assert computing(loss_type="apo_zero_unpaired") == pytest.approx(seconds(7 * step))


def test_counting_the_tokens_of_experts_costs_a_forward_pass(costs: Any) -> None:
    balanced = {"experts": {"balance": "global_batch", "balance_weight": 0.1}}
    assert costs(1, model=balanced).computing == pytest.approx(costs(1).computing * 8 / 6)


def test_a_cpu_computes_slower(costs: Any) -> None:
    on_cpu = costs(1, cluster={"hosts": {"a": 1}, "accelerator": {"name": "cpu"}})
    assert on_cpu.seconds > 100 * costs(1).seconds
