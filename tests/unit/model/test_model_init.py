"""Fresh weights: a function of config and seed, the same for every cut."""

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.core_model_loading import SplitModulelist

from dsft.errors import SpecError
from dsft.model.build import Part, build_model, check_trainable
from dsft.model.config import TokenFacts, on_meta, resolve_config
from dsft.model.init import FreshWeights, module_seed
from dsft.model.policy import Policy
from dsft.model.weights import Sharding
from dsft.plan.cut import balanced
from dsft.plan.storage import Storage
from dsft.spec.schema import Model
from tests.make import logps_of
from tests.specs import llama

FACTS = TokenFacts(96, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = llama(64, 96, 5, 4, 2, max_position_embeddings=64)


def build(
    stage: int = 0, stages: int = 1, seed: int = 3, dtype: torch.dtype = torch.float32, **keys: object
) -> Policy:
    cut = balanced([1] * (LLAMA | keys)["num_hidden_layers"], stages)
    return build_model(Model(from_config=LLAMA | keys), FACTS, seed, dtype, Part(stage, cut))


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in policy.named_trained().items()}


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_stages_initialize_as_the_whole_model(stages: int) -> None:
    whole = weights(build())
    parts = [weights(build(stage, stages)) for stage in range(stages)]
    assert sum(len(part) for part in parts) == len(whole), "every parameter is in one stage"
    together = {name: value for part in parts for name, value in part.items()}
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], value) for name, value in whole.items())


def test_initialization_does_not_depend_on_layer_count() -> None:
    whole, shallow = weights(build()), weights(build(num_hidden_layers=2))
    assert all(torch.equal(whole[name], value) for name, value in shallow.items())


def test_each_parameter_gets_the_type_that_it_is_stored_as() -> None:
    model = on_meta(resolve_config(Model(from_config=LLAMA), FACTS))
    FreshWeights(model, 3).fill(model, lambda p: Storage("fp32" if p.dim() == 1 else "bf16"), Sharding())
    found = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert set(found.values()) == {torch.float32, torch.bfloat16}
    assert all((dtype == torch.float32) == name.endswith("norm.weight") for name, dtype in found.items())


def test_another_seed_gives_other_weights_and_layers_differ() -> None:
    first, second = weights(build()), weights(build(seed=4))
    name = "model.layers.{}.mlp.up_proj.weight"
    assert not torch.equal(first[name.format(0)], second[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


def test_module_seeds_are_pinned() -> None:
    """Python's own hash would: runs of today must be repeatable tomorrow. From `printf 3/lm_head |
    sha256sum`."""
    assert module_seed(3, "lm_head") == 0x1436E5326A828959


def test_initial_distributions_follow_transformers() -> None:
    found = weights(build(hidden_size=128, initializer_range=0.05))
    for name, value in found.items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            assert value.std().item() == pytest.approx(0.05, rel=0.05), name
            assert abs(value.mean().item()) < 0.003, name


def test_bf16_weights_are_the_rounded_fp32_ones_and_rotary_stays_fp32() -> None:
    exact, rounded = build(), build(dtype=torch.bfloat16)
    for name, value in weights(exact).items():
        assert torch.equal(weights(rounded)[name], value.bfloat16())
    rotary = rounded.causal_lm.get_submodule("model.rotary_emb").inv_freq
    expected = 1.0 / 10_000 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    assert rotary.dtype == torch.float32
    torch.testing.assert_close(rotary, expected)


def test_tied_embeddings_are_one_tensor_drawn_as_the_input_embedding() -> None:
    tied, untied = build(tie_word_embeddings=True), build()
    assert tied.causal_lm.lm_head.weight is tied.causal_lm.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(tied)
    name = "model.embed_tokens.weight"
    assert torch.equal(weights(tied)[name], weights(untied)[name])
    assert not torch.equal(weights(untied)["lm_head.weight"], weights(untied)[name])


def test_the_embedding_of_the_padding_token_is_zero() -> None:
    facts = TokenFacts(96, bos_token_id=1, eos_token_id=2, pad_token_id=5)
    embedding = build_model(
        Model(from_config=LLAMA), facts, 3, torch.float32
    ).causal_lm.model.embed_tokens.weight
    assert not embedding[5].any()
    assert embedding[4].any()


def test_random_state_of_the_process_is_unchanged() -> None:
    torch.manual_seed(123)
    expected = torch.rand(4)
    torch.manual_seed(123)
    build()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma2", "gpt_neox", "mixtral"])
def test_every_parameter_is_initialized(kind: str) -> None:
    """The position buffers that lie outside the file included; the same twice, and finite."""
    keys = {"model_type": kind, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind != "gpt2":
        keys |= {"intermediate_size": 48}
    if kind in ("qwen3", "gemma2", "mixtral"):
        keys |= {"num_key_value_heads": 1, "head_dim": 16}
    model = Model(from_config=keys)
    one, two = (build_model(model, FACTS, 3, torch.float32) for _ in range(2))
    assert all(torch.equal(weights(one)[name], value) for name, value in weights(two).items())
    ids = torch.arange(12).view(1, 12)
    assert torch.isfinite(logps_of(one, ids, ids, ids)).all()


@pytest.mark.parametrize("kind", ["mixtral", "gemma4_text", "gpt_neox", "gpt2", "llama"])
def test_exportable_models_are_trainable(kind: str) -> None:
    config = CONFIG_MAPPING[kind](num_hidden_layers=1)
    with torch.device("meta"):
        check_trainable(AutoModelForCausalLM.from_config(config))


def test_unexportable_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](num_hidden_layers=1))
    monkeypatch.setattr(SplitModulelist, "convert", lambda *_, **__: 1 / 0)
    with pytest.raises(SpecError, match="a mixtral model has other tensors .* cannot be exported"):
        check_trainable(model)
