"""Experts whose weights are stored in 4 bits, or have adapters: each expert's matrix is quantized as by
bitsandbytes, and computed with as transformers computes with what that gives."""

import copy
from pathlib import Path
from typing import Any

import bitsandbytes.functional as reference
import pytest
import torch
from torch import Tensor, nn

from dsft.errors import SpecError
from dsft.model import quantize, read
from dsft.model.build import Part, build_model
from dsft.model.census import take_census
from dsft.model.config import TokenFacts
from dsft.model.experts import computed_alike, expert_layers, stacks
from dsft.model.quantize import dequantized, packed
from dsft.model.quantize_model import EXPERTS, put_packed, quantize_loaded
from dsft.model.stacked import StackedExperts, stack
from dsft.model.weights import Sharding
from dsft.plan.census import census_from
from dsft.spec.schema import Experts, Lora, Model
from tests.architectures.cases import MIXTURES, VOCABULARY, keys_of, small_model

FACTS = TokenFacts(VOCABULARY, None, None, None)
OWN_PRODUCTS = {"aria_text", "gpt_oss"}


def by_bitsandbytes(matrices: Tensor, form: Any) -> Tensor:
    pairs = [reference.quantize_4bit(one, compress_statistics=True, quant_type=form) for one in matrices]
    return torch.stack([reference.dequantize_4bit(*pair) for pair in pairs])


@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(5, 128, 256), (3, 100, 72), (2, 33, 5)])
def test_each_experts_matrix_is_bitsandbytes_own(
    shape: tuple[int, ...], form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full blocks two experts at once, then the last; else one after the other."""
    monkeypatch.setattr(quantize, "IN_CACHE", 2 * 128 * 256)
    matrices = torch.randn(shape, dtype=torch.bfloat16)
    expected = by_bitsandbytes(matrices, form)
    stored = packed(matrices, form)
    assert torch.equal(dequantized(stored, form, shape), expected)
    for one, bytes, alone in zip(matrices, stored.view(shape[0], -1), expected, strict=True):
        assert torch.equal(bytes.view(torch.uint8), packed(one, form).view(torch.uint8))
        assert torch.equal(dequantized(bytes, form, shape[1:]), alone)


def stacked_weights(model: Any) -> list[str]:
    modules = [layer.experts for layer in expert_layers(model)]
    return [f"{name}.{own}" for name in modules for own in stacks(model.get_submodule(name))]


def logits_and_gradient(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the embedded inputs."""
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=inputs, use_cache=False).logits
    logits.square().sum().backward()
    return logits.detach(), inputs.grad


@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
def test_the_experts_of_each_architecture_compute_with_what_bitsandbytes_gives(how: str) -> None:
    wrong, own, ids = {}, set(), torch.arange(24).view(2, 12)
    for kind in MIXTURES:
        model = small_model(kind).requires_grad_(False)
        names = stacked_weights(model)
        if not all(computed_alike(model.get_submodule(name.rpartition(".")[0])) for name in names):
            own.add(kind)
            continue
        model.set_experts_implementation(how)
        ours = copy.deepcopy(model)
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        quantize_loaded(
            ours, {"bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": linears, EXPERTS: names}
        )
        for name in names:
            assert ours.get_parameter(name).ndim == 1, (kind, name)
            weight = model.get_parameter(name)
            weight.copy_(by_bitsandbytes(weight, "nf4"))
        pairs = zip(logits_and_gradient(model, ids), logits_and_gradient(ours, ids), strict=True)
        apart = [float((theirs - our).abs().max() / theirs.abs().max()) for theirs, our in pairs]
        if max(apart) > 1e-5:
            wrong[kind] = apart
    assert not wrong
    assert own == {"aria_text", "gpt_oss"}


@pytest.mark.parametrize("form", [None, "nf4"])
@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize("rank", [8, 3])
def test_adapters_of_experts_have_the_gradients_of_a_plain_loop(how: str, rank: int, form: Any) -> None:
    """W x + s B A x of each token's experts, of which the last one gets no token."""
    torch.manual_seed(0)
    model = small_model("qwen3_moe")
    model.set_experts_implementation(how)
    experts = model.get_submodule("model.layers.1.mlp.experts").requires_grad_(False)
    weights = {name: experts.get_parameter(name).detach().clone() for name in stacks(experts)}
    if form:
        weights = {name: by_bitsandbytes(weight, form) for name, weight in weights.items()}
    stacked = stack(experts)
    stacked.adapt(weights, rank, 0.7)
    for name in weights:
        for factor in (f"{name}_lora_A", f"{name}_lora_B"):
            shape = stacked.get_parameter(factor).shape
            setattr(stacked, factor, nn.Parameter(torch.randn(shape)))
        if form:
            stacked.forms[name] = form
            put_packed(stacked, name, form)
    hidden = torch.randn(20, weights["down_proj"].shape[1], requires_grad=True)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(20)])
    scores = torch.rand(20, 2, requires_grad=True)
    factors = {n: p for n, p in stacked.named_parameters() if p.requires_grad}
    upstream = torch.randn(20, hidden.shape[1])
    found = (stacked(hidden, chosen, scores), hidden, scores, *factors.values())
    gradients = torch.autograd.grad(found[0], found[1:], upstream)

    def adapted(name: str, expert: int, inputs: Tensor) -> Tensor:
        a, b = (factors[f"{name}_lora_{one}"][expert] for one in "AB")
        return inputs @ weights[name][expert].T + 0.7 * (inputs @ a.T) @ b.T

    rows = []
    for token in range(20):
        parts = []
        for place in range(2):
            expert = int(chosen[token, place])
            gate, up = adapted("gate_up_proj", expert, hidden[token]).chunk(2)
            parts.append(adapted("down_proj", expert, experts.act_fn(gate) * up) * scores[token, place])
        rows.append(sum(parts))
    expected = torch.stack(rows)
    plain = expected.detach(), *torch.autograd.grad(expected, found[1:], upstream)
    for ours, theirs in zip((found[0].detach(), *gradients), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-6 * float(theirs.abs().max()))
    assert not any(gradient[3].any() for gradient in gradients[2:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixture")
    small_model("qwen3_moe").save_pretrained(made)
    return made


def quantized(folder: Path, *skip: str) -> Model:
    return Model(name_or_path=str(folder), lora=Lora(rank=2), quantize="nf4", quantize_skip=skip)


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_the_ranges_of_ranks_are_the_same_bytes(
    folder: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each rank quantizes only the experts of which it has a part."""
    name, made, parts = "causal_lm.model.layers.1.mlp.experts.gate_up_proj", [], []
    monkeypatch.setattr(read, "packed", lambda *own: made.append(own) or packed(*own))
    whole = build_model(quantized(folder), FACTS, 0, torch.bfloat16)
    stacked, experts = len(stacked_weights(small_model("qwen3_moe"))), 4
    linears = len(made) - stacked * experts
    for rank in range(ranks):

        def span(numel: int, rank: int = rank) -> tuple[int, int]:
            size = -(-numel // ranks)
            return min(size * rank, numel), min(size * (rank + 1), numel)

        made.clear()
        taken: list[Any] = []
        keep = Sharding(span, lambda parameter, part, taken=taken: taken.append((parameter, part)))
        policy = build_model(quantized(folder), FACTS, 0, torch.bfloat16, Part(sharding=keep))
        own = policy.get_parameter(name)
        parts += [part for parameter, part in taken if parameter is own]
        assert len(made) <= linears + stacked * (-(-experts // ranks) + 1)
    assert torch.equal(torch.cat(parts).view(torch.uint8), whole.get_parameter(name).view(torch.uint8))


def test_the_census_has_their_form_and_their_bytes(folder: Path) -> None:
    rows = census_from(take_census(quantized(folder, "*layers.0*down_proj"), FACTS)).parameters
    stored = {row.name: row.stored("bf16") for row in rows if row.experts > 1 and row.form == "nf4"}
    policy = build_model(quantized(folder, "*layers.0*down_proj"), FACTS, 0, torch.bfloat16)
    built = {
        f"{name}.{own}".removeprefix("causal_lm."): parameter
        for name, module in policy.named_modules()
        if isinstance(module, StackedExperts)
        for own, parameter in module.named_parameters(recurse=False)
    }
    assert stored.keys() == {name for name in built if "layers.0.mlp.experts.down_proj" not in name}
    assert len(stored) == 3
    for name, [tensor] in stored.items():
        assert tensor.numel == built[name].numel() and built[name].dtype == torch.bfloat16, name
    assert built["model.layers.0.mlp.experts.down_proj"].ndim == 3
    assert policy.causal_lm(torch.arange(8)[None]).logits.isfinite().all()


@pytest.mark.parametrize(("more", "key"), [
    ({"compile": True}, "model.compile"),
    ({"experts": Experts(implementation="batched_mm")}, "model.experts.implementation"),
])  # fmt: skip
def test_what_would_not_compute_them_is_refused(more: dict[str, Any], key: str) -> None:
    config = {"model_type": "qwen3_moe"} | keys_of("qwen3_moe")
    lora = Lora(rank=2, target_modules=("experts",))
    with pytest.raises(SpecError, match=rf"{key}: is not supported for experts in 4 bits or with adapters"):
        take_census(Model(from_config=config, lora=lora, **more), FACTS, cuts=False)


def test_transposed_experts_are_refused_and_can_stay_in_16_bits() -> None:
    def counted(*skip: str) -> Any:
        config = {"model_type": "gpt_oss"} | keys_of("gpt_oss")
        model = Model(from_config=config, lora=Lora(rank=2), quantize="nf4", quantize_skip=skip)
        return take_census(model, FACTS, cuts=False)

    with pytest.raises(SpecError, match=r"class GptOssExperts; .*quantize_skip: \['\*\.experts\.\*'\]"):
        counted()
    rows = census_from(counted("*.experts.*")).parameters
    assert {row.form for row in rows if row.experts > 1} == {"plain"}
    assert any(row.form == "nf4" for row in rows)
