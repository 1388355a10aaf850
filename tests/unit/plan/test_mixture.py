"""Plans of mixtures of experts: published shapes, counted on the meta device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsft.plan.build import Plan, build_plan
from dsft.plan.census import Census, Parameter, census_from
from dsft.plan.compare import compare
from dsft.plan.cost import HALF_TOKENS, cost
from dsft.plan.flops import work
from dsft.plan.memory.gathered import Use, gathered_at_once
from dsft.plan.memory.layer import activations
from dsft.plan.show import as_mapping, parts
from dsft.plan.show_compare import comparison_parts
from dsft.plan.tables import rendered
from dsft.spec.batch import batch_sizes
from dsft.spec.load import load_spec
from dsft.spec.schema import Model

pytest.importorskip("transformers")

from dsft.model.census import take_census  # noqa: E402 - needs transformers

SPECS = Path(__file__).parent / "mixtures"
COUNTED: dict[str, Census] = {}


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count in this process, once for each model."""

    def census(model: Model, *_: Any) -> Census:
        key = model.model_dump_json()
        if key not in COUNTED:
            COUNTED[key] = census_from(take_census(model))
        return COUNTED[key]

    monkeypatch.setattr("dsft.plan.build.census", census)
    yield


def plan_of(name: str, *overrides: str) -> Plan:
    return build_plan(load_spec(SPECS / f"{name}.yaml", overrides, check_files=False))


def text_of(plan: Plan) -> str:
    return " ".join(rendered(comparison_parts(plan, compare(plan)), terminal=False, width=1000).split())


def test_the_published_counts_come_out() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.3 of them activated. DeepSeek-V3: 671 and 37."""
    qwen, deepseek = (plan_of(name).census for name in ("qwen3_30b_a3b", "deepseek_v3"))
    assert (round(qwen.numel / 1e9, 1), round(qwen.active / 1e9, 2)) == (30.5, 3.35)
    assert (round(deepseek.numel / 1e9), int(deepseek.active / 1e9)) == (671, 37)
    embedding, attention = 151936 * 2048, 2 * (4096 + 512) * 2048 + 2 * 128
    layer = attention + 2 * 2048 + 128 * 2048
    assert qwen.active == 2 * embedding + 2048 + 48 * (layer + 8 * 3 * 768 * 2048)


def test_qwen3_30b_a3b_on_one_host_fits_at_zero_3_or_in_a_pipeline() -> None:
    plan = plan_of("qwen3_30b_a3b")
    found = compare(plan)
    assert {one.keys.zero_stage for one in found.fitting if one.keys.pipeline_stages == 1} == {3}
    assert found.advice is not None and found.advice.keys.checkpointing
    text = text_of(plan)
    assert (
        "A token uses 3,353,032,704 of them (11.0%): it passes through 8 of 128 experts in 48 of 48" in text
    )
    assert "ZeRO 3 gathers all experts of a layer at once, on any number of ranks: 603,979,776" in text


def test_deepseek_v3_on_sixteen_hosts_hardly_fits_for_a_reason() -> None:
    text = text_of(plan_of("deepseek_v3"))
    assert "it takes 98% of the memory of a GPU" in text
    assert (
        "gathers all experts of a layer at once, on any number of ranks: 11,274,289,152 parameters, 21.0 GiB"
        in text
    )
    assert "GiB of it gathered parameters and buffers" in text
    assert "Only expert parallelism, which dsft does not offer, would divide them" in text


def test_a_plan_at_zero_3_names_the_gather_and_what_is_active() -> None:
    plan = plan_of("qwen3_30b_a3b", "parallel.zero_stage=3")
    text = " ".join(rendered(parts(plan, explain=False), terminal=False, width=1000).split())
    assert "1.1 GiB, and as much again while they arrive" in text
    assert as_mapping(plan)["model"]["active"] == 3_353_032_704
    head, layer = 311_164_928, 603_979_776 + 128 * 2048 + 18_874_368
    attention = 9 * 18_874_368 + 2048 * 4096  # of the layers before, up to LIVE and a parameter more
    assert plan.memory.stages[0].kept == 2 * (head + layer + attention)


def test_parameters_are_gathered_ahead_up_to_the_limit() -> None:
    """Modules of 40, 20 + 30 and 50 elements, their backward, a bucket of 30 and a limit of 100: when the
    parameters of a module have arrived, while it is computed, the last gather, and what is left."""
    sizes = {0: 40, 1: 20, 2: 30, 3: 50}
    uses = [Use(own, own) for own in ((0,), (1, 2), (3,))]
    found = [*gathered_at_once([*uses, *uses[::-1]], sizes, 30, 100)]
    assert found == [
        (40, 90, 50, 50),  # the second module's are in a buffer
        (100, 100, 50, 50),  # and were copied; the third's is not
        (50, 100, 50, 100),  # it stays; the second's arrive for the backward
        (100, 100, 0, 50),  # the limit leaves no room
        (100, 90, 40, 40),
        (40, 40, 0, 0),
    ]


@pytest.mark.parametrize(("leaf", "left"), [(False, 0), (True, 40)])
def test_elements_of_a_leaf_module_do_not_keep_others_from_staying(leaf: bool, left: int) -> None:
    uses = [Use((0,), (0,)), Use((1,), (1,), leaf), Use((0,), (0,))]
    found = [*gathered_at_once(uses, {0: 40, 1: 50}, 1, 45)]
    assert found[1][3] == left


EXPERTS = Parameter("layers.0.experts.up", (8, 30, 10), 0, False, (), experts=8, top_k=2)
GATE = Parameter("layers.0.gate.weight", (8, 10), 0, False, ())
HEAD = Parameter("head", (40, 10), None, False, ())
SMALL = Census("X", 1, None, (Parameter("embed", (40, 10), None, True, ()), EXPERTS, GATE, HEAD))


def test_work_and_activations_are_those_of_a_tokens_experts(make_spec: Any) -> None:
    active = 2 * 300 + 80 + 400  # two experts of eight, the router, the head
    assert work(SMALL, 0).per_token == 6 * active
    spec = make_spec(parallel={"zero_stage": 0})
    both = [activations(own, 10, spec, 100, 1).total for own in ((EXPERTS, GATE), (GATE,))]
    added = 100 * 4 * (2 * (30 + 10) + 2 * 30)  # tokens, fp32; input, output and activation of two experts
    assert both[0] - both[1] == added


def test_an_experts_few_rows_are_slow(make_spec: Any) -> None:
    spec = make_spec(data={"max_length": 128}, cluster={"hosts": {"a": 1}})
    batch = batch_sizes(spec.train, 1, spec.data, spec.task)
    tokens = batch.micro_batch_size * 128
    step = 6 * batch.global_batch_size * 128 / (312e12 * 0.55)
    slow = 600 * (1 + HALF_TOKENS / (tokens / 4)) + 480 * (1 + HALF_TOKENS / tokens)
    assert cost(SMALL, spec, batch, (), {"a": 1}).computing == pytest.approx(
        step * slow + 12 * 10 * 128 * batch.global_batch_size * 128 / (312e12 * 0.55) * slow / 1080
    )
