from typing import Any

import pytest

from dsft.plan.census import Census, Parameter
from dsft.plan.traffic import Flow, bubble, traffic
from dsft.spec.layout import layout_of

LAYER, EMBEDDING = 1_000_000, 2_000_000
NORM = 100


def census(tied: bool = False) -> Census:
    embed = Parameter("embed", (2000, 1000), None, True, ("head",) if tied else ())
    head = () if tied else (Parameter("head", (2000, 1000), None, False, ()),)
    layers = [Parameter(f"layers.{i}.w", (1000, 1000), i, False, ()) for i in range(4)]
    norms = [Parameter(f"layers.{i}.n", (NORM,), i, False, ()) for i in range(4)]
    return Census("X", 4, None, (embed, *layers, *norms, *head))


TRAINED = 4 * LAYER + 2 * EMBEDDING + 4 * NORM
SHARDED = TRAINED - 4 * NORM


@pytest.fixture
def flows(make_spec: Any) -> Any:
    def run(hosts: dict[str, int], *, tied: bool = False, **sections: Any) -> dict[str, Flow]:
        spec = make_spec(**sections)
        found = traffic(census(tied), spec, layout_of(spec.parallel, sum(hosts.values())), hosts, tokens=10)
        return {f"{flow.what}, {flow.link}": flow for flow in found}

    return run


def test_the_bubble_is_the_papers() -> None:
    assert bubble(4, 8) == pytest.approx(3 / 11)
    assert bubble(1, 1) == 0


@pytest.mark.parametrize(
    ("zero", "times", "gradients", "width", "gathered"),
    [  # gradients: bytes a micro-batch on two ranks; gathered: bytes of weights, once or each micro-batch
        (0, 1, 4 * TRAINED, 0, 0),
        (1, 1, 4 * TRAINED, 1, 2 * TRAINED // 2),
        (2, 3, 4 * TRAINED // 2, 1, 2 * TRAINED // 2),
        (3, 3, 4 * TRAINED // 2, 3, 2 * SHARDED // 2),
    ],
)
def test_what_deepspeed_was_counted_to_send(
    flows: Any, zero: int, times: int, gradients: int, width: int, gathered: int
) -> None:
    """Bytes at torch.distributed of two ranks, DeepSpeed 0.19.8, bf16 with fp32 gradients: an all-reduce at
    0 and 1, reductions to their owners at 2, and a reduce-scatter at 3; a gather per step at 1 and 2, and at
    3 one per micro-batch for a model of fewer than 5e8 elements."""
    found = flows({"a": 2}, train={"precision": "bf16"}, parallel={"zero_stage": zero})
    sent = found["gradients, within a host"]
    assert (sent.times, sent.bytes_each, sent.bytes) == (times, gradients, times * gradients)
    weights = [flow for what, flow in found.items() if "parameters" in what]
    assert [(flow.times, flow.bytes_each) for flow in weights] == ([(width, gathered)] if width else [])


def test_a_single_rank_sends_nothing(flows: Any) -> None:
    for zero in range(4):
        assert flows({"a": 1}, parallel={"zero_stage": zero}) == {}


def test_a_ring_that_leaves_the_host_goes_through_the_network(flows: Any) -> None:
    whole = 2 * 4 * TRAINED * 3 // 4  # an all-reduce of four ranks
    found = flows({"a": 2, "b": 2}, parallel={"zero_stage": 0})
    assert {what: flow.bytes for what, flow in found.items()} == {
        "gradients, within a host": whole // 2,
        "gradients, between hosts": whole // 2,  # each second rank's neighbour is on the other host
    }
    staged = flows({"a": 2, "b": 2}, parallel={"zero_stage": 0, "pipeline_stages": 2})
    assert set(staged) == {
        "gradients, within a host",  # both copies of a stage are on one host
        "hidden states, between hosts",
        "gradients of hidden states, between hosts",
    }
    assert staged["hidden states, between hosts"].bytes_each == 10 * 1000 * 4
    assert staged["gradients of hidden states, between hosts"].times == 3


def test_tied_gradients_are_all_reduced_over_both_ends(flows: Any) -> None:
    parallel = {"zero_stage": 0, "pipeline_stages": 2}
    found = flows({"a": 2}, tied=True, parallel=parallel)
    assert found["tied gradients, within a host"].bytes == 4 * EMBEDDING
    assert "tied gradients, within a host" not in flows({"a": 2}, parallel=parallel)
    whole = 2 * 4 * EMBEDDING * 3 // 4  # of four ranks
    together = flows({"a": 4}, tied=True, parallel=parallel)
    assert together["tied gradients, within a host"].bytes == whole
    apart = flows({"a": 2, "b": 2}, tied=True, parallel=parallel)  # a stage on each host
    for link in ("within a host", "between hosts"):
        assert apart[f"tied gradients, {link}"].bytes == whole // 2
    ends = flows({"a": 6}, tied=True, parallel={"zero_stage": 0, "pipeline_stages": 3})
    assert ends["tied gradients, within a host"].bytes == whole


def test_offload_is_traffic_to_the_host_and_to_the_disk(flows: Any) -> None:
    share = TRAINED // 2
    cpu = flows({"a": 2}, parallel={"zero_stage": 1, "offload_optimizer": {"device": "cpu"}})
    assert cpu["gradients, host memory"].bytes == 4 * share
    assert cpu["updated parameters, host memory"].bytes == 4 * share
    disk = {"device": "nvme", "nvme_path": "/local"}
    nvme = flows({"a": 2}, parallel={"zero_stage": 3, "offload_optimizer": disk, "offload_parameters": disk})
    assert (nvme["gradients, host memory"].times, nvme["gradients, host memory"].bytes) == (1, 4 * share)
    adding = nvme["gradients that add up, host memory"]
    assert (adding.times, adding.bytes_each) == (3, 8 * share)
    assert nvme["optimizer states, disk"].bytes == 2 * (4 + 8 + 4) * share
    assert nvme["parameters for use, disk"].bytes == 3 * 4 * SHARDED // 2
    accelerator = {"hosts": {"a": 2}, "accelerator": {"name": "cpu"}}
    parallel = {"zero_stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert not any("memory" in what for what in flows({"a": 2}, cluster=accelerator, parallel=parallel))


def test_recomputing_brings_more_parameters_back_at_zero_3(
    flows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsft.plan.traffic.LIVE", 3 * LAYER)
    kept = {}
    for checkpointing in (False, True):
        model = {"gradient_checkpointing": checkpointing}
        found = flows({"a": 2}, model=model, parallel={"zero_stage": 3})
        kept[checkpointing] = 2 * SHARDED - found["parameters for use, within a host"].bytes_each * 2 // 4
    assert kept == {False: 3 * LAYER // 2, True: LAYER}


def test_copies_of_the_parameters_are_gathered_within_a_host(flows: Any) -> None:
    hosts, sections = {"a": 2, "b": 2}, {"task": "dpo", "dpo": {"reference": "live"}}
    plain = flows(hosts, parallel={"zero_stage": 3}, **sections)
    found = flows(hosts, parallel={"zero_stage": 3, "zero_hpz_partition_size": 2}, **sections)
    assert found["updated parameters, between hosts"].bytes == 4 * SHARDED * 3 // 4 // 2  # once a step
    for what, kept in (("parameters for use", 2 / 3), ("reference's parameters", 1.0)):
        assert f"{what}, between hosts" in plain and f"{what}, between hosts" not in found
        sent = found[f"{what}, within a host"]  # the first of three micro-batches gathers the updated ones
        assert (sent.times, sent.bytes) == (3, pytest.approx(3 * kept * 4 * SHARDED / 2, rel=1e-6))
    assert found["gradients, between hosts"] == plain["gradients, between hosts"]


def test_a_live_reference_that_is_sharded_is_gathered_too(flows: Any) -> None:
    parallel = {"zero_stage": 3}
    assert not any("reference" in what for what in flows({"a": 2}, task="dpo", parallel=parallel))
    found = flows({"a": 2}, task="dpo", dpo={"reference": "live"}, parallel=parallel)
    assert found["reference's parameters, within a host"].bytes_each == 4 * SHARDED // 2


def test_an_estimate_before_the_step_gathers_policy_and_reference_once_more(flows: Any) -> None:
    parallel, where = {"zero_stage": 3}, ", within a host"
    found = flows({"a": 2}, task="kto", kto={"reference": "live"}, parallel=parallel)
    estimate = found[f"parameters to estimate the divergence{where}"]
    reference = found[f"reference's parameters{where}"]
    assert estimate.bytes_each == reference.bytes_each == 4 * SHARDED // 2
    assert reference.times == 2 * estimate.times
    stages = flows({"a": 2}, task="kto", parallel={"pipeline_stages": 2, "zero_stage": 0})
    plain = flows({"a": 2}, task="dpo", parallel={"pipeline_stages": 2, "zero_stage": 0})
    assert stages[f"hidden states{where}"].times == 2 * plain[f"hidden states{where}"].times


def test_counting_the_tokens_of_experts_gathers_and_sends_once_more(flows: Any) -> None:
    model = {"experts": {"balance": "global_batch", "balance_weight": 0.1}}
    found = flows({"a": 2}, model=model, parallel={"zero_stage": 3})
    assert found["parameters to count tokens, within a host"].bytes_each == 4 * SHARDED // 2
    parallel = {"pipeline_stages": 2}
    sent = [flows({"a": 2}, model=m, parallel=parallel)["hidden states, within a host"] for m in ({}, model)]
    assert sent[1].times == 2 * sent[0].times
