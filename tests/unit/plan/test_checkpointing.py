"""The share of layers that recompute their activations: what `auto` chooses, and what `dsft plan` shows."""

from typing import Any

import pytest

from dsft.plan.build import Plan, build_plan
from dsft.plan.census import Census, Parameter
from dsft.plan.checkpointing import ROOMY
from dsft.plan.memory.attention import BACKWARD
from dsft.plan.memory.layer import activations
from dsft.plan.memory.sizes import GIB
from dsft.plan.show import as_mapping, parts
from dsft.plan.tables import rendered

LAYERS = 8
CENSUS = Census(
    "LlamaForCausalLM",
    LAYERS,
    None,
    (Parameter("embed", (50, 1000), None, True, ("head",)),
     *(Parameter(f"layer.{number}", (1000, 1000), number, False, ()) for number in range(LAYERS))),
)  # fmt: skip


@pytest.fixture
def plan(make_spec: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: CENSUS)

    def of(value: Any, memory: float | None = None, **sections: Any) -> Plan:
        accelerator = {"name": "A GPU", **({"memory_gib": memory} if memory else {})}
        made = make_spec(
            model={"gradient_checkpointing": value},
            cluster={"hosts": {"a": 2}, "accelerator": accelerator},
            data={"max_length": 2**16},
            **sections,
        )
        return build_plan(made)

    return of


def gpu(plan: Plan) -> int:
    return max(rank.gpu for rank in plan.memory.stages)


def recomputed(plan: Plan) -> int:
    return sum(map(plan.spec.model.checkpoints, range(LAYERS)))


def test_auto_takes_the_fewest_layers_that_fit(plan: Any) -> None:
    sizes = [gpu(plan(number / LAYERS or False)) for number in range(LAYERS)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1] * 1.8
    for number, size in enumerate(sizes):
        assert recomputed(plan("auto", size / ROOMY / GIB * 1.001)) == number
        assert recomputed(plan("auto", size / ROOMY / GIB * 0.999)) == number + 1
    assert plan("auto", 0.5).spec.model.gradient_checkpointing is True  # nothing fits
    assert plan("auto").spec.model.gradient_checkpointing is True  # the GPU's memory is not known


def test_a_plan_shows_what_other_choices_cost(plan: Any) -> None:
    found = plan(0.5)
    shown = [(one.value, one.layers) for one in found.recomputation]
    assert shown == [(False, 0), (0.25, 2), (0.5, 4), (0.75, 6), (True, 8)]
    assert {one.value: one.gpu for one in found.recomputation}[0.5] == gpu(found)
    whole = next(one.work for one in found.recomputation if one.value is True)
    half = next(one.work for one in found.recomputation if one.value == 0.5)
    assert half - 1 == pytest.approx((whole - 1) / 2) and 1.1 < whole < 4 / 3
    text = rendered(parts(found, explain=False), terminal=False)
    assert "0.5  (this plan)" in text and "Gradient checkpointing" in text
    assert as_mapping(found)["recomputation"][0]["value"] is False
    assert "Gradient checkpointing" not in rendered(parts(plan(False), explain=False), terminal=False)


def test_stored_layers_after_the_last_recomputed_one_are_freed_before_it(plan: Any) -> None:
    """With 0.5 and 0.875 the last layer is stored, so recomputing the one before it adds nothing, and most is
    needed beside the logits, with the last layer's output and its norm."""
    tokens = 2 * 2**16
    hidden = 1000 * 4 * tokens  # input of a layer, fp32
    one = activations(CENSUS.parameters[1:2], 1000, plan(False).spec, tokens, 1).total
    for value, stored, inputs in ((False, 8, 2), (0.5, 4, 4 + 2), (0.875, 1, 7 + 2)):
        assert plan(value).memory.stages[0].activations == stored * one + inputs * hidden, value
    assert plan(True).memory.stages[0].activations == one + 8 * hidden + int(one * BACKWARD)
