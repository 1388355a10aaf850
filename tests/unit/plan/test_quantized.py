"""The plan of a model whose frozen linear weights are stored in 4 bits."""

from dataclasses import replace
from typing import Any

import pytest

from dsft.plan.census import Census, Parameter
from dsft.plan.memory.layer import activations, dequantized, of_norms
from dsft.plan.memory.ranks import memory
from dsft.plan.memory.reference import with_reference
from dsft.plan.storage import Stored
from dsft.plan.traffic import traffic
from dsft.spec.layout import layout_of

NUMEL = 1024 * 1024
LINEAR = Parameter("layers.0.up.weight", (1024, 1024), 0, False, (), trained=False, form="nf4")
ADAPTER = Parameter("layers.0.up.lora_A.weight", (2, 1024), 0, False, ())
HEAD = Parameter("head.weight", (64, 1024), None, False, (), trained=False)
EMBEDDING = replace(HEAD, name="embed.weight", embedding=True)
QUANTIZED = Census("X", 1, None, (EMBEDDING, LINEAR, ADAPTER, HEAD))
PLAIN = replace(QUANTIZED, parameters=(EMBEDDING, replace(LINEAR, form="plain"), ADAPTER, HEAD))
BYTES = NUMEL // 2 + NUMEL // 64 + 4 * (NUMEL // 64 // 256) + 4
"""Of values, of their scales, of the scales' scales and of their offset; aligned without padding."""


def test_a_weight_in_4_bits_is_one_tensor_in_the_type_of_the_model() -> None:
    assert LINEAR.stored("bf16") == (Stored(BYTES // 2, 2),)
    assert LINEAR.stored("fp32") == (Stored(BYTES // 4, 4),)


@pytest.mark.parametrize("zero", [0, 3])
def test_less_is_stored_and_gathered(zero: int, make_spec: Any) -> None:
    spec = make_spec(parallel={"zero_stage": zero}, train={"precision": "bf16"}, cluster={"hosts": {"a": 2}})
    layout = layout_of(spec.parallel, 2)
    plain, quantized = (memory(one, spec, layout, {"a": 2}).stages[0] for one in (PLAIN, QUANTIZED))
    ranks = 2 if zero == 3 else 1
    assert plain.parameters - quantized.parameters == (2 * NUMEL - BYTES) // ranks
    assert (plain.elements, plain.master) == (quantized.elements, quantized.master)
    flows = [
        sum(flow.bytes for flow in traffic(one, spec, layout, {"a": 2}) if "for use" in flow.what)
        for one in (PLAIN, QUANTIZED)
    ]
    assert flows[1] == 0 if zero == 0 else flows[1] < flows[0]


def test_a_weight_is_whole_while_its_product_is_computed(make_spec: Any) -> None:
    """And not beside the logits, which take more than it where there are many."""
    spec = make_spec(parallel={"zero_stage": 0}, train={"precision": "bf16"})
    whole = dequantized([LINEAR, ADAPTER, HEAD], spec)
    assert whole == 2 * NUMEL + NUMEL // 64 * 4 and dequantized(PLAIN.parameters, spec) == 0
    one, many = (
        memory(QUANTIZED, spec, layout_of(spec.parallel, 1), {"a": 1}, tokens).stages[0].buffers
        for tokens in (1, 4096)
    )
    assert 0.99 * whole < one <= whole and many == 0


EXPERTS = Parameter(
    "layers.0.experts.up", (128, 1024, 1024), 0, False, (), trained=False, experts=128, top_k=8
)


@pytest.mark.parametrize(("how", "whole", "at_once"), [("auto", 128, 64), ("eager", 1, 1)])
def test_experts_are_whole_while_their_product_is_computed(
    how: str, whole: int, at_once: int, make_spec: Any
) -> None:
    """With the bytes of those that are dequantized by one call, unless these are all."""
    spec = make_spec(train={"precision": "bf16"}, model={"experts": {"implementation": how}})
    copied = at_once * NUMEL // 2 if at_once < whole else 0
    found = dequantized([replace(EXPERTS, form="nf4")], spec)
    assert found == 2 * whole * NUMEL + at_once * NUMEL // 64 * 4 + copied


def test_frozen_experts_keep_no_inputs_for_the_backward(make_spec: Any) -> None:
    spec = make_spec(train={"precision": "bf16"})
    own = [replace(EXPERTS, form="nf4")]
    adapters = [replace(EXPERTS, name=f"{EXPERTS.name}_{n}.lora_A", shape=(128, 2, 1024)) for n in "ab"]
    frozen, adapted = (activations(one, 1024, spec, 16, 1).total for one in (own, own + adapters))
    token = 16 * 2 * 8  # of the copies for eight experts, in bf16
    assert (frozen, adapted) == (token * 2 * 1024, token * (3 * 1024 + 2 * 2))


def test_dora_needs_its_norms_and_keeps_both_outputs(make_spec: Any) -> None:
    """The identity (1024, 1024), and four matrices of the weight's shape, one of them dequantized."""
    spec = make_spec(train={"precision": "bf16"})
    wide = replace(LINEAR, shape=(3072, 1024))
    magnitude = replace(ADAPTER, name="layers.0.up.lora_magnitude_vector", shape=(3072,))
    assert of_norms([wide, ADAPTER], spec, trains=True) == 0
    assert of_norms([wide, magnitude], spec, trains=True) == 2 * (NUMEL + 4 * 3 * NUMEL)
    plain = [replace(wide, form="plain"), magnitude]
    assert of_norms(plain, spec, trains=False) == 2 * 3 * 3 * NUMEL
    without, kept = (activations(own, 1024, spec, 16, 1).total for own in ([wide], [wide, magnitude]))
    assert kept - without == 16 * 2 * 2 * 3072


def test_a_live_reference_is_in_4_bits_too(make_spec: Any) -> None:
    lora = {"lora": {"rank": 2}, "quantize": "nf4"}
    spec = make_spec(task="dpo", dpo={"reference": "live"}, model=lora, train={"precision": "bf16"})
    layout = layout_of(spec.parallel, 1)
    plain, quantized = (
        with_reference(memory(one, spec, layout, {"a": 1}), one, spec, layout, {"a": 1})[0]
        .stages[0]
        .reference
        for one in (PLAIN, QUANTIZED)
    )
    assert plain == 2 * (NUMEL + 2 * 64 * 1024) and plain - quantized == 2 * NUMEL - BYTES
    other = make_spec(task="dpo", dpo={"reference": "live", "reference_model": "a/b"}, model=lora)
    other = other.model_copy(update={"train": spec.train})
    sizes = memory(QUANTIZED, other, layout, {"a": 1})
    assert with_reference(sizes, QUANTIZED, other, layout, {"a": 1})[0].stages[0].reference == plain
    asked = other.model_copy(update={"dpo": other.dpo.model_copy(update={"reference_quantize": "nf4"})})
    assert with_reference(sizes, QUANTIZED, asked, layout, {"a": 1})[0].stages[0].reference == quantized
