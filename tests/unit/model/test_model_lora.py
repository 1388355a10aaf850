"""Adapters: which modules get one, their first values, their names, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dsft.errors import MissingInputError, SpecError
from dsft.model.build import Part, build_model, choose_trained, initial_values
from dsft.model.lora import PREFIX, WEIGHTS, scale
from dsft.model.names import plain_name
from dsft.model.policy import Policy
from dsft.plan.cut import Cut
from dsft.spec.schema import Lora, Model
from tests.make import logps_of
from tests.unit.model.test_model_init import FACTS, LLAMA

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}


def policy(config: dict[str, Any] = LLAMA, dtype: torch.dtype = torch.float32, **lora: Any) -> Policy:
    return build_model(Model(from_config=config, lora=Lora(**lora)), FACTS, 3, dtype)


def adapted(made: Policy) -> set[str]:
    """Last parts of the names of adapted modules."""
    return {name.split(".")[-3] for name in made.named_trained() if name.endswith("lora_A.weight")}


def test_all_linear_excludes_the_head() -> None:
    assert adapted(policy()) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert adapted(policy(GPT2)) == {"c_attn", "c_proj", "c_fc"}  # transformers' Conv1D


def test_only_adapters_and_modules_to_save_are_trained() -> None:
    made = policy(target_modules=("q_proj",), modules_to_save=("lm_head",), use_dora=True)
    trained = set(made.named_trained())
    assert "lm_head.weight" in trained
    assert {name.rsplit("q_proj.", 1)[-1] for name in trained - {"lm_head.weight"}} == {
        "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
    }  # fmt: skip
    frozen = {n for n, p in made.causal_lm.named_parameters() if not p.requires_grad}
    assert "model.layers.0.self_attn.q_proj.base_layer.weight" in frozen


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_dora", [False, True])
def test_fresh_adapter_is_the_identity(config: dict[str, Any], dtype: torch.dtype, use_dora: bool) -> None:
    ids = torch.arange(20)[None]
    plain = build_model(Model(from_config=config), FACTS, 3, dtype).causal_lm.eval()
    made = policy(config, dtype, use_dora=use_dora).causal_lm.eval()
    with torch.no_grad():
        assert torch.equal(made(ids).logits, plain(ids).logits)


def test_fresh_values_depend_only_on_seed_and_name() -> None:
    model = Model(from_config=LLAMA, lora=Lora(rank=2))
    whole = build_model(model, FACTS, 3, torch.float32).named_trained()
    for stage in (0, 1):
        part = build_model(model, FACTS, 3, torch.float32, Part(stage, Cut((2, 3))))
        for name, parameter in part.named_trained().items():
            assert torch.equal(parameter, whole[name]), name
    other = build_model(model, FACTS, 4, torch.float32).named_trained()
    a = [name for name in whole if name.endswith("lora_A.weight")]
    assert not any(torch.equal(whole[name], other[name]) for name in a)
    assert len({float(whole[name].detach().sum()) for name in a}) == len(a)
    first = whole["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert first.abs().max() <= first.shape[1] ** -0.5
    assert not any(p.any() for name, p in whole.items() if name.endswith("lora_B.weight"))


def test_lora_scale() -> None:
    assert scale(Lora(rank=4, alpha=8)) == 2 and scale(Lora(rank=4, alpha=8, use_rslora=True)) == 4


def test_names_have_no_peft_prefixes() -> None:
    for name, plain in (
        ("model.layers.0.mlp.up_proj.base_layer.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.lora_A.default.weight", "model.layers.0.mlp.up_proj.lora_A.weight"),
        ("m.up_proj.lora_magnitude_vector.default.weight", "m.up_proj.lora_magnitude_vector"),
        ("model.norm.weight", "model.norm.weight"),
    ):
        assert plain_name(name) == plain


@pytest.mark.parametrize(("lora", "message"), [
    ({"target_modules": ("q_prj",)},
     "'q_prj' matches no name here; write one that matches, such as q_proj, "),
    ({"target_modules": ("mlp",)}, "model.layers.0.mlp, which is of class LlamaMLP and no linear layer"),
    ({"target_modules": ("embed_tokens",)}, "of class Embedding and no linear layer"),
    ({"target_modules": ("lm_head",)}, "is the output head, which gets no adapter"),
    ({"modules_to_save": ("lm_hed",)}, "model.lora.modules_to_save.0: 'lm_hed' matches no name"),
    ({"target_modules": ("q_proj",), "modules_to_save": ("q_proj",)}, "is in modules_to_save too"),
])  # fmt: skip
def test_unmatched_lora_names_are_refused(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        policy(**lora)
    assert message in str(caught.value)


def test_all_unmatched_names_are_listed() -> None:
    with pytest.raises(SpecError) as caught:
        policy(target_modules=("nope",), modules_to_save=("nothing",))
    places = [problem.where for problem in caught.value.problems]
    assert places == ["model.lora.modules_to_save.0", "model.lora.target_modules.0"]
    assert "such as 0" not in str(caught.value)


def test_a_tied_head_is_saved_with_its_embedding() -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    with pytest.raises(SpecError, match=r"one tensor in this model.*\[embed_tokens, lm_head\]"):
        policy(tied, modules_to_save=("lm_head",))
    assert (
        "model.embed_tokens.weight"
        in policy(tied, modules_to_save=("lm_head", "embed_tokens")).named_trained()
    )


def save_adapter(folder: Path, values: dict[str, Tensor]) -> str:
    save_file({PREFIX + name: value.contiguous() for name, value in values.items()}, folder / WEIGHTS)
    return str(folder)


def test_saved_adapter_is_loaded(tmp_path: Path) -> None:
    lora: dict[str, Any] = {"rank": 2, "use_dora": True, "modules_to_save": ("lm_head",)}
    values = {name: torch.randn(p.shape) for name, p in policy(**lora).named_trained().items()}
    made = policy(**lora, path=save_adapter(tmp_path, values))
    assert all(torch.equal(p, values[name]) for name, p in made.named_trained().items())


def test_a_saved_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    values = {name: torch.zeros(p.shape) for name, p in policy(rank=2).named_trained().items()}
    with pytest.raises(
        MissingInputError, match=r"q_proj\.lora_A\.weight has shape \[2, .* the model has \[3, "
    ):
        policy(rank=3, path=save_adapter(tmp_path, values))
    shallow = LLAMA | {"num_hidden_layers": 1}
    with pytest.raises(
        MissingInputError, match=r"has base.*layers\.1\..* and \d+ more, which this model with its"
    ):
        policy(shallow, rank=2, path=save_adapter(tmp_path, values))
    del values["model.layers.1.self_attn.q_proj.lora_A.weight"]
    with pytest.raises(MissingInputError, match=r"has no base_model\.model\.model\.layers\.1"):
        policy(rank=2, path=save_adapter(tmp_path, values))
    with pytest.raises(MissingInputError, match="cannot be read"):
        policy(rank=2, path=str(tmp_path / "nowhere"))


def test_a_saved_adapter_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    values = {name: torch.zeros(p.shape) for name, p in policy(rank=2).named_trained().items()}
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"
    values[name][1, 3] = float("nan")
    with pytest.raises(MissingInputError, match=rf"{WEIGHTS}: .*{name} has the value nan at \[1, 3\]"):
        policy(rank=2, path=save_adapter(tmp_path, values))


def test_missing_adapter_base_is_reported(tmp_path: Path) -> None:
    gone = Model(name_or_path=str(tmp_path / "gone"))
    with pytest.raises(MissingInputError, match=r"gone' cannot be read: there is no such folder"):
        initial_values(gone, policy().causal_lm, 3, torch.float32)


def test_trainable_patterns_select_parameters() -> None:
    model = Model(from_config=LLAMA, trainable=("model.layers.1.*", "*norm.weight"))
    trained = set(build_model(model, FACTS, 3, torch.float32).named_trained())
    assert "model.norm.weight" in trained and "model.layers.1.mlp.up_proj.weight" in trained
    assert "model.layers.0.mlp.up_proj.weight" not in trained and "lm_head.weight" not in trained
    whole = build_model(Model(from_config=LLAMA), FACTS, 3, torch.float32).causal_lm
    with pytest.raises(
        SpecError,
        match=r"model\.trainable\.1: 'mlp\.\*' matches no name.*such as model\.layers\.0\.mlp",
    ):
        choose_trained(whole, Model(from_config=LLAMA, trainable=("*", "mlp.*")))


def test_the_head_with_a_frozen_weight_gives_the_same_gradient_in_chunks() -> None:
    made = policy(target_modules=("q_proj",), rank=2)
    gradients = []
    torch.manual_seed(0)
    for name, parameter in made.named_trained().items():
        if name.endswith("lora_B.weight"):
            nn.init.normal_(parameter)
    ids = torch.arange(30).repeat(2, 1)
    for chunk_bytes in (None, 1_000):
        made.causal_lm.get_output_embeddings().chunk_bytes = chunk_bytes
        made.zero_grad()
        logps_of(made, ids, torch.arange(30).repeat(2, 1), ids).sum().backward()
        gradients.append(
            {name: p.grad.clone() for name, p in made.named_trained().items() if p.grad is not None}
        )
    plain, chunked = gradients
    assert plain.keys() == chunked.keys() == made.named_trained().keys()
    for name, gradient in plain.items():
        assert (chunked[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name
    assert made.causal_lm.get_output_embeddings().weight.grad is None
