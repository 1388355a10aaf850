"""Weights from files: as by transformers' own loader, in ranges too; what does not fit is an error."""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.errors import MissingInputError
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts
from dsft.model.conversion import write_map
from dsft.model.files import model_files, weight_files
from dsft.model.policy import Policy
from dsft.model.weights import Sharding
from dsft.plan.cut import Cut
from dsft.spec.schema import Model
from tests.specs import dims

FACTS = TokenFacts(96, 1, 2, None)
SMALL = dims(32, 48, 2, 4, 2, vocab_size=96, head_dim=8, max_position_embeddings=64, pad_token_id=None)
KINDS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "cohere",
    "granite", "olmo2", "gpt_neox", "gpt2", "starcoder2", "stablelm", "mixtral", "qwen3_moe",
)  # fmt: skip


def save(
    folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, **keys: object
) -> PreTrainedModel:
    """Return a model whose every tensor is random, biases and norms too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SMALL | keys))).to(dtype)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def read(folder: Path, dtype: torch.dtype = torch.float32, keep: Sharding | None = None) -> Policy:
    return build_model(Model(name_or_path=str(folder)), FACTS, 7, dtype, Part(sharding=keep or Sharding()))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_equal_transformers_loader(kind: str, tmp_path: Path) -> None:
    save(tmp_path, kind)
    found = read(tmp_path).causal_lm
    attention = found.config._attn_implementation
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=attention
    )
    assert_equal(found, expected)
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(found.eval()(ids).logits, expected.eval()(ids).logits)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_together_equal_the_whole(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Of three ranks, in another type than the files have; each parameter is given once."""
    save(tmp_path, kind, torch.bfloat16)
    whole = {name: p.flatten() for name, p in read(tmp_path, dtype).causal_lm.named_parameters()}
    parts = [shares(tmp_path, dtype, rank) for rank in range(3)]
    for name, expected in whole.items():
        assert expected.dtype == dtype
        assert torch.equal(torch.cat([part[name] for part in parts]), expected), name


def shares(folder: Path, dtype: torch.dtype, rank: int, ranks: int = 3) -> dict[str, Tensor]:
    taken: dict[int, Tensor] = {}

    def span(numel: int) -> tuple[int, int]:
        return numel * rank // ranks, numel * (rank + 1) // ranks

    def take(parameter: nn.Parameter, part: Tensor | None) -> None:
        assert part is not None and id(parameter) not in taken
        assert parameter.untyped_storage().nbytes() <= 4, "of a share the rest takes no memory"
        taken[id(parameter)] = part

    policy = read(folder, dtype, Sharding(span, take))
    named = dict(policy.causal_lm.named_parameters())
    assert taken.keys() == {id(p) for p in named.values()}
    return {name: taken[id(p)] for name, p in named.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_base_model_folder_is_loaded(tied: bool, tmp_path: Path) -> None:
    """It has no head, and names without the prefix."""
    whole = save(tmp_path / "whole", tie_word_embeddings=tied)
    whole.base_model.save_pretrained(tmp_path / "base")
    if tied:
        assert_equal(read(tmp_path / "base").causal_lm, whole)
    else:
        with pytest.raises(MissingInputError, match=r"lm_head.weight is missing"):
            read(tmp_path / "base")


def test_unknown_tensor_names(tmp_path: Path) -> None:
    save(tmp_path)
    change(tmp_path, lambda held: {f"wrapped.{name}": value for name, value in held.items()})
    with pytest.raises(MissingInputError, match="model.embed_tokens.weight is missing"):
        read(tmp_path)


def change(folder: Path, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """The folder's tensors, changed, in one file."""
    held = {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
    for file in folder.glob("model*"):
        file.unlink()
    save_file(how(held), folder / "model.safetensors", metadata={"format": "pt"})


NORM = "model.norm.weight"


@pytest.mark.parametrize(("how", "words"), [
    (lambda held: {n: t for n, t in held.items() if n != NORM}, f"{NORM} is missing"),
    (lambda held: held | {"model.extra.weight": torch.ones(2)},
     "model.extra.weight is not a tensor of the model"),
    (lambda held: held | {NORM: torch.ones(33)}, rf"{NORM} has shape \[33\] instead of \[32\]"),
    (lambda held: {}, "and 16 more"),
    (lambda held: held | {NORM: torch.ones(32, dtype=torch.int8)}, f"{NORM} has the type I8"),
], ids=["missing", "left over", "shape", "nothing", "quantized"])  # fmt: skip
def test_weights_of_another_model_are_an_error(
    how: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: str, tmp_path: Path
) -> None:
    save(tmp_path)
    change(tmp_path, how)
    with pytest.raises(MissingInputError, match=words):
        read(tmp_path)


EMBEDDING = "model.embed_tokens.weight"


def with_value(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """In the embedding of token 70 alone."""

    def changed(held: dict[str, Tensor]) -> dict[str, Tensor]:
        held[EMBEDDING][70, 5] = value
        return held

    return changed


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("tied", [True, False])
def test_nonfinite_weight_is_named_with_its_file(value: str, tied: bool, tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=tied)
    change(tmp_path, with_value(float(value)))
    words = rf"model\.safetensors: {EMBEDDING} has the value {value} at \[70, 5\], read as float32"
    with pytest.raises(MissingInputError, match=words):
        read(tmp_path)


def test_each_rank_checks_the_weights_it_reads(tmp_path: Path) -> None:
    """Row 70 of 96 is in the last third."""
    save(tmp_path)
    change(tmp_path, with_value(math.nan))
    for rank in (0, 1):
        shares(tmp_path, torch.bfloat16, rank)
    with pytest.raises(MissingInputError, match=r"nan at \[70, 5\], read as bfloat16"):
        shares(tmp_path, torch.bfloat16, 2)


def test_weight_too_large_for_fp16_is_reported(tmp_path: Path) -> None:
    save(tmp_path)
    change(tmp_path, with_value(1e5))
    assert float(read(tmp_path).causal_lm.get_parameter(EMBEDDING).detach()[70, 5]) == 1e5
    with pytest.raises(MissingInputError, match=r"inf at \[70, 5\], read as float16.*bf16 or fp32"):
        read(tmp_path, torch.float16)


def test_nonfinite_converted_and_pickled_weights_are_named(tmp_path: Path) -> None:
    model = save(tmp_path / "mixture", "mixtral")

    def changed(held: dict[str, Tensor]) -> dict[str, Tensor]:
        held[next(name for name in held if "experts.1" in name)][0, 0] = math.nan
        return held

    change(tmp_path / "mixture", changed)
    made = r"experts\.down_proj, made from model\.safetensors: .*experts.* and 7 more, has the value nan"
    with pytest.raises(MissingInputError, match=made):
        read(tmp_path / "mixture")
    model = save(tmp_path / "pickled")
    model.get_parameter(EMBEDDING).data[70, 5] = math.nan
    for file in (tmp_path / "pickled").glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with (
        pytest.warns(UserWarning, match="has no safetensors files"),
        pytest.raises(MissingInputError, match=rf"pickled': {EMBEDDING} has the value nan at \[70, 5\]"),
    ):
        read(tmp_path / "pickled")


def test_tensors_that_transformers_ignores_are_no_error(tmp_path: Path) -> None:
    """Old folders hold the rotary table of each layer."""
    whole = save(tmp_path)
    change(tmp_path, lambda held: held | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_equal(read(tmp_path).causal_lm, whole)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_head_stored_in_the_file(equal: bool, tmp_path: Path) -> None:
    whole = save(tmp_path, tie_word_embeddings=True)
    embedding = whole.get_input_embeddings().weight.detach()
    head = embedding.clone() if equal else embedding + 1
    change(tmp_path, lambda held: held | {"lm_head.weight": head})
    if equal:
        assert_equal(read(tmp_path).causal_lm, whole)
    else:
        with pytest.raises(MissingInputError, match="differ, but config.json says that they are tied"):
            read(tmp_path)


def test_tied_head_without_embedding_is_enough(tmp_path: Path) -> None:
    whole = save(tmp_path, tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    change(tmp_path, lambda held: {"lm_head.weight" if n == name else n: t for n, t in held.items()})
    assert_equal(read(tmp_path).causal_lm, whole)


def test_missing_shard_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(
        MissingInputError, match=f"has no {first.name}, which model.safetensors.index.json names"
    ):
        read(tmp_path)


INDEXES = ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}', "[" * 50_000]
INDEXES.append('{"weight_map": {"a": "' + "b" * 300 + '"}}')  # longer than the name of a file may be


@pytest.mark.parametrize("content", INDEXES)
def test_a_damaged_index(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(MissingInputError, match="index.json is damaged: .* download it again"):
        weight_files(str(tmp_path))


@pytest.mark.parametrize("entry", ["../a.safetensors", "/a.safetensors", "below/a.safetensors", "..", "."])
def test_an_index_that_names_files_outside_of_its_folder_is_refused(entry: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "a.safetensors").touch()
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (folder / index).write_text(json.dumps({"weight_map": {"a": entry}}))
        with pytest.raises(
            MissingInputError, match="which is not a file of its folder|outside of the folder"
        ):
            model_files(str(folder))
        (folder / index).unlink()


def test_a_hub_id_that_cannot_be_read_is_not_named_as_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no route")

    monkeypatch.setattr("dsft.model.files.snapshot_download", unreachable)
    with pytest.raises(MissingInputError, match=r"^The model 'a/b' has no readable weights \(no route\)"):
        weight_files("a/b")


def test_a_link_may_lead_only_to_the_folder_or_the_hubs_cache(tmp_path: Path) -> None:
    """The cache has a model's files in models--NAME/blobs, and links to them in models--NAME/snapshots/X."""
    folder, blobs = tmp_path / "models--a/snapshots/x", tmp_path / "models--a/blobs"
    places = {"inside": folder / "other", "in the cache": blobs / "1f", "outside": tmp_path / "secret"}
    for place in places.values():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    for name in ("model.safetensors", "pytorch_model.bin"):
        link = folder / name
        for where, place in places.items():
            link.symlink_to(place)
            if where == "outside":
                with pytest.raises(MissingInputError, match=f"{name} is a link to {place}, outside of the"):
                    model_files(str(folder))
            else:
                assert model_files(str(folder)) == [link]
            link.unlink()
        os.mkfifo(link)
        with pytest.raises(MissingInputError, match=f"{name} is a named pipe, not a file"):
            model_files(str(folder))
        link.unlink()


def test_truncated_file_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-10])
    with pytest.raises(MissingInputError, match=f"{first.name} cannot be read"):
        read(tmp_path)


def test_a_folder_without_safetensors_is_read_by_transformers(tmp_path: Path) -> None:
    whole = save(tmp_path, tie_word_embeddings=True)
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.warns(
        UserWarning, match="every rank reads the whole model, since it has no safetensors files"
    ):
        assert_equal(read(tmp_path).causal_lm, whole)


class Payload:
    """Unpickled, it makes a file."""

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize("shape", [(3, 16), None], ids=["another shape", "missing"])
def test_unconvertible_experts_give_one_sentence(
    shape: tuple[int, int] | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers prints a table with a traceback."""
    save(tmp_path, "qwen3_moe")

    def changed(held: dict[str, Tensor]) -> dict[str, Tensor]:
        key = next(name for name in held if "experts.1.up_proj" in name)
        others = {name: tensor for name, tensor in held.items() if name != key}
        return others if shape is None else {**others, key: torch.zeros(shape)}

    change(tmp_path, changed)
    with pytest.raises(MissingInputError, match="some tensors are missing, or have another shape"):
        read(tmp_path)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_pickle_in_place_of_weights_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = save(tmp_path / "model", tie_word_embeddings=True)
    for file in (tmp_path / "model").glob("model*"):
        file.unlink()
    torch.save(
        whole.state_dict() | {"model.norm.weight": Payload()}, tmp_path / "model" / "pytorch_model.bin"
    )
    with pytest.raises(MissingInputError, match="its weights are a damaged pickle, or one with more"):
        read(tmp_path / "model")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_remote_code_is_not_executed(tmp_path: Path, model_type: str) -> None:
    save(tmp_path)
    code = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    config = json.loads((tmp_path / "config.json").read_text()) | {"auto_map": code, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with pytest.raises(MissingInputError) if model_type == "evil" else nullcontext():
        read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_unknown_conversion_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import MergeModulelist

    whole = save(tmp_path, "mixtral")
    convert = MergeModulelist.convert

    def needs_values(self: object, tensors: dict[str, list[Tensor]], *args: object, **keys: object) -> object:
        if any(t.is_meta for group in tensors.values() for t in group):
            raise RuntimeError("values are needed")
        return convert(self, tensors, *args, **keys)

    monkeypatch.setattr(MergeModulelist, "convert", needs_values)
    with pytest.warns(UserWarning, match="needs the values"):
        assert_equal(read(tmp_path).causal_lm, whole)


def test_stage_reads_only_its_tensors(tmp_path: Path) -> None:
    """A file that only the other stage needs may be lost."""
    save(tmp_path, tie_word_embeddings=False)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    broken = tmp_path / index["lm_head.weight"]
    size = broken.stat().st_size
    with broken.open("r+b") as file:  # the header stays
        file.seek(size - 96 * 32 * 4 // 2)
        file.write(b"\xff" * 100)
    first = build_model(Model(name_or_path=str(tmp_path)), FACTS, 7, torch.float32, Part(0, Cut((1, 1))))
    assert all(torch.isfinite(p).all() for p in first.parameters())
    assert "lm_head.weight" not in first.named_trained()


def test_hub_id_is_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = save(tmp_path / "made")
    folder, commit = tmp_path / "hub" / "models--someone--small", "0" * 40
    shutil.copytree(tmp_path / "made", folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_equal(build_model(Model(name_or_path="someone/small"), FACTS, 7, torch.float32).causal_lm, whole)
    with pytest.raises(MissingInputError, match="someone/large"):
        build_model(Model(name_or_path="someone/large"), FACTS, 7, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_written_as_transformers_saves_them(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path, kind)
    saved = {
        name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()
    }
    own = {name: value.detach() for name, value in model.named_parameters()}
    tensor_map = write_map(model, own)
    found = {key: own[name] for key, name in tensor_map.unchanged.items()}
    for conversion in tensor_map.conversions:
        shapes = conversion.shapes(lambda name: tuple(own[name].shape), model)
        converted = conversion.apply((own[name] for _, name in conversion.parts), model)
        assert shapes == {key: tuple(value.shape) for key, value in converted.items()}
        found |= converted
    assert found.keys() == saved.keys() and not tensor_map.unexpected
    assert all(torch.equal(value, saved[key]) for key, value in found.items())
    assert bool(tensor_map.conversions) == (kind in {"mixtral", "qwen3_moe"})
