"""MLPs in chunks of tokens: the same logits and gradients, one gradient per parameter, the same dropout in
both passes, and less computed at once."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.errors import SpecError
from dsft.model.build import build_model
from dsft.model.census import take_census
from dsft.model.config import TokenFacts
from dsft.model.mlp_chunks import chunk_mlps, mlps_of
from dsft.model.older import checkpoint_activations
from dsft.plan.reference import reference_model
from dsft.spec.schema import Dpo, Lora, Model, Spec
from tests.architectures.cases import ARCHITECTURES, MIXTURES, USUAL, keys_of, small_model
from tests.make import logps_of

ROWS, TOKENS, CHUNKS = 2, 23, 3
WITHOUT = {"aria_text", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"} | {
    *("hunyuan_v1_moe", "kolibri1", "mellum", "minimax_m2", "mixtral", "olmoe", "opt", "qwen2_moe"),
    *("qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
}
"""Where no layer has an MLP of its own: mixtures without a dense layer, and OPT, whose layers have the
matrices themselves."""
FACTS = TokenFacts(64, bos_token_id=1, eos_token_id=2, pad_token_id=None)

Found = tuple[Tensor, dict[str, Tensor], dict[str, int]]


def trained(model: PreTrainedModel, chunks: int, rows: int = ROWS) -> Found:
    """Logits, gradients, and how often each parameter got one."""
    checkpoint_activations(model.train())
    if chunks > 1 and mlps_of(model):
        chunk_mlps(model, chunks)
    times: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: times.update({name: times.get(name, 0) + 1})
        )
    ids = torch.arange(rows * TOKENS).mul(7).remainder(100).view(rows, TOKENS)
    torch.manual_seed(1)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(1, 2, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, times


def apart(whole: Found, cut: Found) -> float:
    """Return the largest difference of a gradient, relative to its tensor's largest value."""
    assert whole[1].keys() == cut[1].keys()
    return max(
        float((cut[1][name] - one).abs().max() / one.abs().max().clamp(min=1e-9))
        for name, one in whole[1].items()
    )


@pytest.mark.parametrize(
    "kinds", [USUAL, pytest.param(tuple(ARCHITECTURES), marks=pytest.mark.long)], ids=len
)
def test_mlp_chunks_equal_the_whole(kinds: tuple[str, ...]) -> None:
    wrong = {}
    for kind in kinds:
        whole, cut = (trained(small_model(kind), chunks) for chunks in (1, CHUNKS))
        found = (torch.equal(whole[0], cut[0]), apart(whole, cut) < 3e-6, set(cut[2].values()) == {1})
        if not all(found) or bool(mlps_of(small_model(kind))) == (kind in WITHOUT):
            wrong[kind] = found
    assert wrong == {}


def test_the_backward_frees_the_inputs_of_layers_while_the_loss_is_kept() -> None:
    """As DeepSpeed's pipeline keeps the last one, with its graph, until the next step."""
    model, inputs = small_model("llama"), list[weakref.ref[Tensor]]()
    checkpoint_activations(model.train())
    chunk_mlps(model, CHUNKS)
    for layer in model.model.layers[1:]:  # the first one's is the output of the embeddings
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))
    loss = model(input_ids=torch.ones(ROWS, TOKENS, dtype=torch.long), use_cache=False).logits.sum()
    loss.backward()
    gc.collect()
    assert inputs and [one() for one in inputs] == [None] * len(inputs) and loss.grad_fn is not None


def test_single_matrix_is_not_an_mlp() -> None:
    model: Any = small_model("llama")
    model.model.layers[0].gate = nn.Linear(16, 16)
    assert model.config.hidden_size == 16
    assert set(mlps_of(model)) == {"model.layers.0.mlp", "model.layers.1.mlp"}


def test_experts_routers_and_attention_are_not_mlps() -> None:
    kinds = ("llama", "gemma3n_text", "glm4_moe", "lfm2")
    names = {kind: set(mlps_of(small_model(kind, hidden_size=24))) for kind in kinds}
    assert "glm4_moe" in MIXTURES
    assert names == {
        "llama": {"model.layers.0.mlp", "model.layers.1.mlp"},
        "gemma3n_text": {f"model.layers.{n}.{name}" for n in range(4) for name in ("mlp", "laurel")},
        "glm4_moe": {"model.layers.0.mlp"},
        "lfm2": {"model.layers.0.feed_forward", "model.layers.1.feed_forward"},
    }


@pytest.mark.parametrize("place", ["resid_pdrop", "lora"])
def test_dropout_masks_are_repeated_in_backward(place: str) -> None:
    """The gradient of a chunk whose dropout was drawn again otherwise would not be that of the output: the
    directional derivative shows it."""
    keys = {"model_type": "gpt2", **keys_of("gpt2"), "resid_pdrop": 0.3}
    lora = Lora(rank=2, dropout=0.3) if place == "lora" else None
    model = Model(from_config=keys, gradient_checkpointing=True, mlp_chunks=CHUNKS, lora=lora)
    policy = build_model(model, FACTS, 0, torch.float32)
    parameters = list(policy.double().named_trained().values())
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in parameters:  # a fresh adapter's second matrix is 0
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    ids = torch.arange(ROWS * TOKENS).remainder(60).view(ROWS, TOKENS)
    positions = torch.arange(TOKENS).expand(ROWS, -1)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return logps_of(policy.train(), ids, positions, ids.roll(-1, 1)).double().sum()

    loss().backward()
    way = [torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in parameters]
    slope = sum(float((p.grad * w).sum()) for p, w in zip(parameters, way, strict=True) if p.grad is not None)

    def moved(step: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, way, strict=True):
                parameter += step * direction
            return float(loss())

    step = 1e-5
    ahead, behind = moved(step), moved(-2 * step)
    assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-3)


def test_one_chunk_of_activations_exists_at_a_time() -> None:
    """In a Llama nothing after the MLP is saved, so a layer is recomputed up to it alone."""
    model, calls = small_model("llama"), list[int]()
    linear: Any = model.get_submodule("model.layers.1.mlp.gate_proj")
    linear.register_forward_hook(lambda module, inputs, output: calls.append(output.numel()))
    trained(model, CHUNKS)
    rows = -(-ROWS * TOKENS // CHUNKS)
    assert len(calls) == 2 * CHUNKS
    assert max(calls) == rows * linear.out_features


def test_scoring_runs_in_chunks() -> None:
    model, calls = small_model("llama"), list[int]()
    ids = torch.arange(TOKENS)[None]
    expected = model(input_ids=ids).logits
    checkpoint_activations(model)
    chunk_mlps(model, TOKENS + 5)  # more than there are tokens
    linear: Any = model.get_submodule("model.layers.1.mlp.gate_proj")
    linear.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    with torch.no_grad():
        found = model(input_ids=ids).logits
    assert calls == [1] * TOKENS
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("gradients", [False, True])
def test_fewer_tokens_than_planned_have_fewer_chunks_of_the_same_size(gradients: bool) -> None:
    keys = {"model_type": "llama", **keys_of("llama")}
    model = Model(from_config=keys, gradient_checkpointing=True, mlp_chunks=CHUNKS)
    policy, calls = build_model(model, FACTS, 0, torch.float32, tokens=30), list[int]()
    linear: Any = policy.causal_lm.get_submodule("model.layers.1.mlp.gate_proj")
    linear.register_forward_hook(lambda module, inputs, output: calls.append(len(output)))
    ids = torch.arange(TOKENS)[None]
    with torch.set_grad_enabled(gradients):
        logps = logps_of(policy, ids, ids, ids.roll(-1))
    if gradients:
        logps.sum().backward()
    assert calls == [10, 10, 3] * (1 + gradients)


def test_gradients_in_bf16_add_up_in_float32() -> None:
    """As near to the exact ones as without chunks, however many there are."""

    def gradients(chunks: int, dtype: torch.dtype) -> Tensor:
        mlp: nn.Module = small_model("llama", intermediate_size=64).to(dtype)
        found = trained(mlp, chunks, rows=178)[1]  # 4,094 tokens
        return found["model.layers.1.mlp.down_proj.weight"].double()

    exact = gradients(1, torch.float64)
    whole, cut = (float((gradients(n, torch.bfloat16) - exact).norm() / exact.norm()) for n in (1, 64))
    assert cut < 1.3 * whole


def test_a_model_without_mlps_refuses_chunks() -> None:
    keys = {"model_type": "mixtral", **keys_of("mixtral")}
    with pytest.raises(SpecError, match=r"model\.mlp_chunks: 2 has no effect, since this mixtral model"):
        take_census(Model(from_config=keys, gradient_checkpointing=True, mlp_chunks=2), FACTS, cuts=False)
    layers = keys["num_hidden_layers"]
    message = f"gradient_checkpointing: {layers + 1} is more than the model's {layers} layers"
    with pytest.raises(SpecError, match=message):
        take_census(Model(from_config=keys, gradient_checkpointing=layers + 1), FACTS, cuts=False)
    found = take_census(Model(from_config=keys, gradient_checkpointing=True), FACTS, cuts=False)
    assert {parameter.get("mlp") for parameter in found["parameters"]} == {None}


def test_reference_has_no_mlp_chunks() -> None:
    """It is not checkpointed, and may be a model without such an MLP."""
    keys = {"model_type": "mixtral", **keys_of("mixtral")}
    policy = Model(from_config=keys, gradient_checkpointing=True, mlp_chunks=2)
    spec = Spec.model_construct(task="dpo", model=policy, dpo=Dpo())
    assert take_census(reference_model(spec), FACTS, cuts=False)["architecture"] == "MixtralForCausalLM"
