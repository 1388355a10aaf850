"""Weights in 4 bits from files that bitsandbytes' were saved in: the same bytes, not quantized again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from benchmarks.load import TINY, make_folder
from dsft.errors import DsftError, SpecError
from dsft.model.build import build_model, initial_values
from dsft.model.config import TokenFacts, on_meta, read_config
from dsft.model.quantize import QuantizedLinear
from dsft.spec.schema import Lora, Model

FACTS = TokenFacts(64, None, None, None)
DOWN = "model.layers.1.mlp.down_proj"
STATE = f"{DOWN}.weight.quant_state.bitsandbytes__nf4"


def save(folder: Path, **keys: Any) -> Any:
    """Return transformers' model in 4 bits, saved in the folder; keys: of its BitsAndBytesConfig."""
    make_folder(folder / "whole", TINY)
    form = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True} | keys
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **form)
    model = AutoModelForCausalLM.from_pretrained(
        folder / "whole", dtype=torch.bfloat16, quantization_config=config
    )
    model.save_pretrained(folder / "saved")
    return model


def spec(folder: Path, form: Any = "nf4", *skip: str) -> Model:
    lora = Lora(rank=2, target_modules=("q_proj",))
    return Model(name_or_path=str(folder / "saved"), lora=lora, quantize=form, quantize_skip=skip)


def weight_of(module: Any) -> Tensor:
    """What transformers' module computes with."""
    from bitsandbytes.functional import dequantize_4bit

    state = getattr(module.weight, "quant_state", None)
    found: Tensor = module.weight.detach() if state is None else dequantize_4bit(module.weight.data, state)
    return found


def test_the_bytes_of_the_files_are_those_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = save(tmp_path, llm_int8_skip_modules=["lm_head", DOWN], bnb_4bit_quant_storage="bfloat16")
    quantized = []
    monkeypatch.setattr("dsft.model.read.packed", lambda *arguments: quantized.append(arguments))
    up = "model.layers.0.mlp.up_proj"
    policy = build_model(spec(tmp_path, "nf4", f"{up}.weight"), FACTS, 0, torch.bfloat16)
    left = {"lm_head", DOWN, up}  # by their config, and by the spec, from the bytes in the files
    for name, module in policy.causal_lm.named_modules():
        plain = name.replace(".base_layer", "")
        if isinstance(module, nn.Linear) and ".lora_" not in name:
            is_quantized = isinstance(module, QuantizedLinear)
            assert is_quantized is (plain not in left), name
            ours = module.dequantize() if isinstance(module, QuantizedLinear) else module.weight
            assert torch.equal(ours, weight_of(theirs.get_submodule(plain))), name
    assert not quantized

    values = initial_values(spec(tmp_path), on_meta(read_config(tmp_path / "saved")), 0, torch.bfloat16)
    for form in ("nf4", "plain"):
        assert torch.equal(values(f"{up}.weight", form), weight_of(theirs.get_submodule(up)))


def damage(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        held = load_file(folder / "saved" / "model.safetensors")
        change(held)
        save_file(held, folder / "saved" / "model.safetensors", {"format": "pt"})

    return changed


def other_state(**keys: Any) -> Callable[[Path], None]:
    def changed(held: dict[str, Tensor]) -> None:
        state = json.loads(bytes(held[STATE].tolist())) | keys
        held[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return damage(changed)


@pytest.mark.parametrize(("harm", "words"), [
    (damage(lambda held: held.update({STATE: held[STATE][:-9].clone()})), "is damaged"),
    (damage(lambda held: held.__delitem__(f"{DOWN}.weight.absmax")), "is incomplete"),
    (other_state(blocksize=128), "other blocks than 64 elements"),
    (other_state(shape=[7, 5]), r"has shape \[7, 5\] instead of"),
], ids=["damaged", "incomplete", "blocks", "shape"])  # fmt: skip
def test_files_that_do_not_hold_the_weights_are_one_error(
    harm: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    save(tmp_path)
    harm(tmp_path)
    with pytest.raises(DsftError, match=words):
        build_model(spec(tmp_path), FACTS, 0, torch.bfloat16)


def test_the_spec_has_to_name_their_form(tmp_path: Path) -> None:
    save(tmp_path, bnb_4bit_quant_type="fp4")
    for form in (None, "nf4"):
        with pytest.raises(SpecError, match=r"are in 4 bits \(fp4\); set model.quantize: fp4, with model.lo"):
            build_model(spec(tmp_path, form), FACTS, 0, torch.bfloat16)
    save(tmp_path, bnb_4bit_use_double_quant=False)
    with pytest.raises(SpecError, match=r"use the model from which it was quantized"):
        build_model(spec(tmp_path), FACTS, 0, torch.bfloat16)
