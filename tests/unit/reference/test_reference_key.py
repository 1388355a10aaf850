"""What a store's key sees: each thing that gives other log-probabilities, by name, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from dsft.errors import WorldError
from dsft.model import files
from dsft.plan.reference import reference_model
from dsft.reference.check import check_weights
from dsft.reference.key import Key, differences, key_of, paths_of
from dsft.setup.inputs import read_inputs
from dsft.system import digest
from tests.unit.reference.small import TINY, spec


def key(folder: Path, changed: dict[str, Any] | None = None) -> Key:
    mine = spec(folder, changed)
    return key_of(mine, reference_model(mine), read_inputs(mine, lambda text: None))


def one_weight(folder: Path) -> None:
    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] += 2**-10
    save_file(tensors, path, {"format": "pt"})


def one_template_character(folder: Path) -> None:
    path = folder / "model" / "chat_template.jinja"
    text = path.read_text(encoding="utf-8")
    assert "\\n" in text
    path.write_text(text.replace("\\n", "\\t", 1), encoding="utf-8")


def one_row(folder: Path) -> None:
    path = folder / "b.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("held out 1", "held in 21"), encoding="utf-8")


def one_number_of_the_config(folder: Path) -> None:
    path = folder / "model" / "config.json"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'), encoding="utf-8")


@pytest.mark.parametrize("change, shown", [
    (one_weight, "the weight file model.safetensors has changed"),
    (one_template_character, "the chat template has changed at its character"),
    (one_row, "data.eval had 2 pairs of"),
    (one_number_of_the_config, "the model's config: rms_norm_eps was 1e-06, now 1e-05"),
])  # fmt: skip
def test_files_that_change(folder: Path, change: Callable[[Path], None], shown: str) -> None:
    before = key(folder)
    assert key(folder).digest == before.digest
    change(folder)
    now = key(folder)
    assert now.digest != before.digest
    assert any(shown in clause for clause in differences(before.components, now.components))
    if change is not one_template_character:  # which changes the rows' tokens, too
        assert len(differences(before.components, now.components)) == 1


@pytest.mark.parametrize("changed, shown", [
    ({"data": {"max_length": 128}}, "data.max_length was 256, now 128"),
    ({"train": {"precision": "bf16"}}, "train.precision was fp32, now bf16"),
    ({"model": {"add_tokens": ("<new>",)}}, "model.add_tokens"),
    ({"model": {"name_or_path": None, "from_config": {"model_type": "llama"} | TINY}},
     "the weights were read from files, now fresh ones of model.from_config"),
])  # fmt: skip
def test_keys_of_the_spec_that_change(folder: Path, changed: dict[str, Any], shown: str) -> None:
    before, now = key(folder), key(folder, changed)
    assert now.digest != before.digest
    assert any(shown in clause for clause in differences(before.components, now.components))


def test_a_fresh_model_is_its_config_and_its_seed(folder: Path) -> None:
    fresh = {"model": {"name_or_path": None, "from_config": {"model_type": "llama"} | TINY}}
    one, other = key(folder, fresh), key(folder, fresh | {"train": {"seed": 1}})
    assert differences(one.components, other.components) == ["the fresh model's seed was 42, now 1"]


def test_layout_and_folders_are_not_in_the_key(folder: Path, tmp_path: Path) -> None:
    before = key(folder)
    others: dict[str, Any] = {
        "train": {"micro_batch_size": 4, "accumulation_steps": 2},
        "parallel": {"zero_stage": 3},
        "data": {"packing": True},
        "dpo": {"beta": 0.5, "share_prompts": True},
        "optim": {"learning_rate": 1.0},
    }
    for section, keys in others.items():
        assert key(folder, {section: keys} if section != "parallel" else {}).digest == before.digest
    (folder / "model").rename(folder / "moved")
    assert key(folder, {"model": {"name_or_path": str(folder / "moved")}}).digest == before.digest


def test_weights_are_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_RACY_NS", -1)
    before = key(folder)
    monkeypatch.setattr(digest, "_hash", lambda path, read: pytest.fail(f"{path} was hashed"))
    assert key(folder).digest == before.digest


def test_pickled_weights_of_the_hub_are_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")
    monkeypatch.setattr(files, "snapshot_download", lambda *given, **asked: str(folder / "model"))
    (found,), _ = paths_of(reference_model(spec(folder, {"model": {"name_or_path": "some/model"}})))
    assert found == folder / "model" / "pytorch_model.bin"


def test_weights_that_change_after_the_key_was_computed(folder: Path) -> None:
    asked = spec(folder), key(folder)
    check_weights(*asked)
    one_weight(folder)
    with pytest.raises(WorldError, match=r"weight file model\.safetensors has changed; start again"):
        check_weights(*asked)


def test_an_adapter_is_part_of_it(folder: Path) -> None:
    adapter = folder / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text(name)
    plain, with_lora = key(folder), key(folder, {"model": {"lora": {}}})
    assert plain.digest == with_lora.digest  # fresh adapters change nothing
    with_path = {"model": {"lora": {"path": str(adapter)}}}
    one = key(folder, with_path)
    (adapter / "adapter_model.safetensors").write_text("trained on")
    shown = differences(one.components, key(folder, with_path).components)
    assert shown == ["the adapter's file adapter_model.safetensors has changed"]


def test_weights_in_4_bits_are_another_reference(folder: Path) -> None:
    lora = {"lora": {"rank": 2}}
    plain = key(folder, {"model": {"name_or_path": str(folder / "model"), **lora}})
    quantized = key(folder, {"model": {"name_or_path": str(folder / "model"), "quantize": "nf4", **lora}})
    clauses = differences(plain.components, quantized.components)
    assert clauses == ["model.quantize was null, now 'nf4'"]
    assert "quantize" not in plain.components  # stores of older versions stay valid


def test_another_model_is_not_quantized(folder: Path) -> None:
    named = {"name_or_path": str(folder / "model"), "lora": {"rank": 2}, "quantize": "nf4"}
    mine = spec(folder, {"model": named | {"quantize_skip": ["*.up_proj.weight"]}})
    assert reference_model(mine).quantize_skip == ("*.up_proj.weight",)
    other = mine.model_copy(update={"dpo": mine.dpo.model_copy(update={"reference_model": "owner/other"})})
    assert (reference_model(other).quantize, reference_model(other).quantize_skip) == (None, ())
    asked = other.dpo.model_copy(update={"reference_quantize": "fp4"}) if other.dpo else None
    assert reference_model(other.model_copy(update={"dpo": asked})).quantize == "fp4"
