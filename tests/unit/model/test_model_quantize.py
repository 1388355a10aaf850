"""Weights in 4 bits: which are, that they are bitsandbytes' own, and what is refused."""

from pathlib import Path
from typing import Any

import bitsandbytes.functional as reference
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from benchmarks.load import TINY, make_folder
from dsft.errors import MissingInputError, SpecError
from dsft.model import quantize
from dsft.model.build import build_model
from dsft.model.census import take_census
from dsft.model.config import TokenFacts
from dsft.model.quantize import QuantizedLinear, in_4_bits, packed
from dsft.plan.census import census_from
from dsft.plan.storage import Storage
from dsft.spec.schema import Lora, Model
from tests.architectures.cases import VOCABULARY, small_model

FACTS = TokenFacts(64, None, None, None)
LORA = Lora(rank=2, target_modules=("q_proj", "up_proj"), modules_to_save=("layers.1.mlp.down_proj",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_folder(made, TINY)
    return made


@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (100, 72), (33, 5), (300, 512)])
def test_a_layer_is_bitsandbytes_own(dtype: torch.dtype, shape: tuple[int, int], form: Any) -> None:
    linear = nn.Linear(shape[1], shape[0], dtype=dtype).requires_grad_(False)
    values, state = reference.quantize_4bit(linear.weight, compress_statistics=True, quant_type=form)
    expected = reference.dequantize_4bit(values, state)
    linear.weight = nn.Parameter(packed(linear.weight, form), False)
    assert torch.equal(linear.weight.view(torch.uint8)[: values.numel()], values.flatten())
    assert torch.equal(in_4_bits(linear, form).dequantize(), expected)
    (stored,) = Storage("fp32" if dtype == torch.float32 else "bf16", form).tensors(expected.numel())
    assert linear.weight.shape == (stored.numel,) and linear.weight.element_size() == stored.width
    inputs = torch.randn(2, 3, shape[1], dtype=dtype, requires_grad=True)
    output = linear(inputs)
    output.sum().backward()
    assert torch.equal(output, nn.functional.linear(inputs, expected, linear.bias))
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, torch.ones_like(output) @ expected)


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_frozen_linear_layers_are_quantized_and_nothing_else(folder: Path, form: Any) -> None:
    model = Model(name_or_path=str(folder), lora=LORA, quantize=form)
    policy = build_model(model, FACTS, 0, torch.bfloat16)
    names = {name for name, module in policy.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(names) == 4 * 7 - 1 and not any("lm_head" in n or ".lora_" in n for n in names)
    assert not any(
        p.requires_grad for n, p in policy.named_parameters() if n.removesuffix(".weight") in names
    )
    rows = census_from(take_census(model, FACTS)).parameters
    assert {row.name for row in rows if row.form == form} == {
        f"{name.removeprefix('causal_lm.').replace('.base_layer', '')}.weight" for name in names
    }
    up = policy.get_submodule("causal_lm.model.layers.0.mlp.up_proj.base_layer")
    read = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].to(torch.bfloat16)
    assert isinstance(up, QuantizedLinear) and up.form == form
    assert torch.equal(up.weight.detach().view(torch.uint8), packed(read, form).view(torch.uint8))
    saved = policy.get_submodule("causal_lm.model.layers.1.mlp.down_proj")
    assert type(saved) is nn.Linear and saved.weight.requires_grad


def test_skipped_weights_stay_in_16_bits(folder: Path) -> None:
    def built(*skip: str) -> Any:
        lora = Lora(rank=2, target_modules=("down_proj",))
        return Model(name_or_path=str(folder), lora=lora, quantize="nf4", quantize_skip=skip)

    policy = build_model(
        built("*.down_proj.weight", "model.layers.0.self_attn.?_proj.*"), FACTS, 0, torch.bfloat16
    )
    for number, layer in enumerate(policy.get_submodule("causal_lm.model.layers").children()):
        down, query = layer.get_submodule("mlp.down_proj.base_layer"), layer.get_submodule("self_attn.q_proj")
        assert type(down) is nn.Linear and not down.weight.requires_grad and down.weight.ndim == 2
        assert isinstance(query, QuantizedLinear) == (number > 0)
        assert isinstance(layer.get_submodule("mlp.up_proj"), QuantizedLinear)
    with pytest.raises(
        SpecError, match=r"quantize_skip\.1: '\*\.down' matches no name here; .*down_proj\.weight"
    ):
        take_census(built("*.up_proj.weight", "*.down"), FACTS, cuts=False)
    with pytest.raises(SpecError, match=r"none that is frozen and not in model\.quantize_skip"):
        take_census(built("*"), FACTS, cuts=False)


def test_a_gemma_3n_trains_although_it_clamps_the_weights_of_some_linear_layers(tmp_path: Path) -> None:
    small_model("gemma3n_text").save_pretrained(tmp_path)
    model = Model(name_or_path=str(tmp_path), lora=Lora(rank=2), quantize="nf4")
    causal_lm = build_model(model, TokenFacts(VOCABULARY, None, None, None), 0, torch.float32).causal_lm
    ids = torch.arange(24)[None]
    found = causal_lm.train()(ids).logits
    layers: list[Any] = [module for module in causal_lm.modules() if isinstance(module, QuantizedLinear)]
    for module in layers:
        module.weight, module.__class__ = nn.Parameter(module.dequantize(), False), nn.Linear
    assert torch.equal(found, causal_lm(ids).logits)


@pytest.mark.parametrize(("kind", "layers"), [("gpt2", "Conv1D"), ("falcon", "FalconLinear")])
def test_models_with_linear_layers_of_other_classes_are_refused(kind: str, layers: str) -> None:
    model = Model(from_config={"model_type": kind}, lora=Lora(rank=2), quantize="nf4")
    with pytest.raises(
        SpecError, match=rf"a {kind} model has none that is frozen \(its layers are {layers}\)"
    ):
        take_census(model, FACTS, cuts=False)


def test_a_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "load_bitsandbytes", lambda: None)
    with pytest.raises(MissingInputError, match="needs the package bitsandbytes"):
        packed(torch.ones(2, 64), "nf4")


@pytest.mark.parametrize("error", [ImportError("no symbol"), OSError("libcudart.so"), RuntimeError("CUDA")])
def test_a_package_that_cannot_be_imported_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(quantize.importlib, "import_module", fail)
    with pytest.raises(MissingInputError, match=rf"bitsandbytes, .* is installed but .*\({error}\)"):
        quantize.load_bitsandbytes.__wrapped__()


def test_a_package_that_is_not_installed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError(name="bitsandbytes")

    monkeypatch.setattr(quantize.importlib, "import_module", fail)
    assert quantize.load_bitsandbytes.__wrapped__() is None
