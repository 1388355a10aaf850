"""Text models inside multimodal ones: found, read, trained as the causal language model that transformers
builds of them, and written back into the whole, whose other tensors stay as they are."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from dsft.checkpoint.around import files_around
from dsft.checkpoint.export import export_checkpoint
from dsft.checkpoint.save import CheckpointState, save
from dsft.errors import CheckpointError, MissingInputError, SpecError
from dsft.model.attention import attend_per_segment
from dsft.model.build import build_model, check_trainable
from dsft.model.config import TokenFacts, on_meta, resolve_config
from dsft.model.files import digests, weight_files
from dsft.model.lora import CONFIG
from dsft.model.policy import Policy
from dsft.model.split_check import check_can_split
from dsft.model.split_points import find_split_points
from dsft.model.whole import text_config, whole_of
from dsft.model.whole_proof import apart, check_text
from dsft.spec.load import load_spec
from dsft.spec.schema import Checkpoint, Lora, Model
from tests.architectures.test_folders import tensors_of
from tests.architectures.wholes import VOCABULARY, WHOLES, small_whole
from tests.in_threads import Threads
from tests.integration.runs import write_spec
from tests.make import ALONE, fragment_of, logps_of, make_micro_batch
from tests.selected import tiered

FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)
USUAL = ("gemma3", "qwen3_vl_moe", "qwen3_5")
"""Tied; a class that transformers does not have, with experts that files have transposed; tensors that it
ignores; the others with -m long."""

MTP = {"mtp.layers.0.weight": torch.arange(6).to(torch.float8_e4m3fn)}
"""A tensor that transformers ignores, of a type that the rest has not."""

ADAPTED = {
    "gemma3": ("q_proj", "down_proj"),
    "mistral3": ("q_proj", "down_proj"),
    "qwen2_5_vl": ("q_proj", "down_proj"),
    "llava": ("q_proj", "down_proj"),
    "qwen3_5_moe": ("q_proj", "down_proj"),  # of the shared expert
    "qwen3_vl_moe": ("q_proj", "o_proj"),
}


@pytest.mark.parametrize("kind", tiered(WHOLES, USUAL))
def test_only_the_text_model_is_trained(kind: str, tmp_path: Path) -> None:
    given, tied = tmp_path / "given", kind.startswith("gemma")
    folder_of(given, kind, tied)
    model = Model(name_or_path=str(given))
    policy = build_model(model, FACTS, seed=0, dtype=torch.bfloat16)
    check_trainable(policy.causal_lm)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(2)
    out = tmp_path / "out"
    export_checkpoint(saved(policy, model, tmp_path), out)
    expected, found = tensors_of(given), tensors_of(out)
    assert found.keys() == expected.keys()
    text = {key for key in expected if key in trained(kind, given, policy)}
    assert text and text != expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == (torch.bfloat16 if key in text else tensor.dtype)
        same = (2 * tensor).bfloat16() if key in text else tensor
        assert torch.equal(found[key].view(torch.uint8), same.view(torch.uint8)), key
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (given, out))
    assert after == before | {
        "dtype": "bfloat16",
        "text_config": before["text_config"] | {"dtype": "bfloat16"},
    }
    again, report = AutoModelForMultimodalLM.from_pretrained(
        out, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not (report["missing_keys"] or report["mismatched_keys"] or report["unexpected_keys"])
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        own = policy.eval().causal_lm(input_ids=ids).logits
        assert torch.equal(again.eval()(input_ids=ids).logits, own)


@pytest.mark.parametrize("kind", tiered(WHOLES, USUAL))
def test_losses_and_gradients_equal_the_multimodal_model(kind: str, tmp_path: Path) -> None:
    """Of two rows by themselves, in plain PyTorch, and of both packed into one."""
    whole = folder_of(tmp_path, kind, tied=kind.startswith("gemma"))
    policy = build_model(Model(name_or_path=str(tmp_path)), FACTS, seed=0, dtype=torch.float32)
    around = whole_of(whole.config, on_meta(policy.causal_lm.config))
    attend_per_segment(policy.causal_lm, "auto", 16)
    lengths = (11, 7)
    ids = torch.randint(3, VOCABULARY, (1, sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    targets = torch.cat([row.roll(-1, 1) for row in ids.split(lengths, 1)], 1)
    logps = logps_of(policy, ids, positions, targets, lengths)
    logits = torch.cat([whole(input_ids=row).logits for row in ids.split(lengths, 1)], 1)
    expected = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(logps, expected, rtol=0, atol=2e-6)
    for one in (logps, expected):
        one.sum().backward()
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    found = {around.name(name): p.grad for name, p in policy.named_trained().items()}
    assert found.keys() == gradients.keys()
    rounding = 1e-4 if kind.startswith("gemma4") else 2e-6  # docs/models.md has that of gemma4_text
    allowed = rounding * max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=allowed, msg=name)


@pytest.mark.parametrize("kind", tiered(WHOLES, USUAL))
def test_text_model_runs_with_sequence_parallel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two ranks; of a batch of padded rows."""
    config = text_config(CONFIG_MAPPING[kind.split()[0]](**WHOLES[kind]))
    assert config is not None
    if config.model_type.startswith("qwen3_5"):
        with pytest.raises(
            SpecError, match="cannot be split: its layers of type linear_attention mix tokens"
        ):
            check_can_split(config, 2, 16)
        return
    check_can_split(config, 2, 16)
    torch.manual_seed(0)
    policy = Policy(AutoModelForCausalLM.from_config(config)).eval()
    ids = torch.randint(3, VOCABULARY, (3, 7))
    batch = make_micro_batch(ids, torch.arange(7).repeat(3, 1), ids.roll(-1, 1))
    ranks, parts = Threads(2, monkeypatch), [copy.deepcopy(policy) for _ in range(2)]
    for part in parts:
        attend_per_segment(part.causal_lm, "auto", 16, exchange=ranks)
    with torch.no_grad():
        expected = policy(batch.tokens.input_ids, batch.tokens).logps
        for found in ranks.run(lambda number: ranks.scored(parts[number], batch)):
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", tiered(ADAPTED, ["gemma3"]))
def test_adapter_loads_into_and_merges_with_the_multimodal_model(kind: str, tmp_path: Path) -> None:
    given, ids = tmp_path / "given", torch.arange(3, 20)[None]
    folder_of(given, kind, tied=False)
    lora = Lora(rank=2, target_modules=list(ADAPTED[kind]), modules_to_save=["lm_head"])
    model = Model(name_or_path=str(given), lora=lora)
    policy = build_model(model, FACTS, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        expected = policy.eval().causal_lm(input_ids=ids).logits
    checkpoint = saved(policy, model, tmp_path, "fp32")
    away = given.rename(tmp_path / "away")  # an adapter is exported without its base
    export_checkpoint(checkpoint, tmp_path / "adapter")
    away.rename(given)
    export_checkpoint(checkpoint, tmp_path / "merged", merged=True)
    whole = AutoModelForMultimodalLM.from_pretrained(given, dtype=torch.float32).eval()
    adapted = PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert not any(
        "lora" in name for name, _ in adapted.named_parameters() if "vision" in name or "visual" in name
    )
    merged = AutoModelForMultimodalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
    before, after = tensors_of(given), tensors_of(tmp_path / "merged")
    assert after.keys() == before.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert all(any(part in key for part in (*ADAPTED[kind], "lm_head")) for key in changed)
    assert not any("vis" in key or ".experts." in key for key in changed)
    assert len(changed) == (4 if kind == "qwen3_5_moe" else 5)  # which has attention in one of its layers
    more = {"target_modules": [*ADAPTED[kind]], "modules_to_save": ["lm_head"]}
    for keys in (
        {},
        more,
    ):  # as a user loads it: the folder alone, or the spec that trained it as well
        named = {"lora": {"path": str(tmp_path / "adapter"), **keys}, "tokenizer": "of/another"}
        given_again = f"model={json.dumps(named | {'name_or_path': str(given)})}"
        again = load_spec(write_spec(tmp_path), [given_again, "data.max_length=64"]).model
        values = build_model(again, FACTS, seed=1, dtype=torch.float32).named_trained()
        assert values.keys() == policy.named_trained().keys()
        assert all(torch.equal(values[name], p) for name, p in policy.named_trained().items())
    export_checkpoint(saved(policy, again, tmp_path / "more", "fp32"), tmp_path / "second")
    first, second = (json.loads((tmp_path / out / CONFIG).read_text()) for out in ("adapter", "second"))
    assert first == second


@pytest.mark.parametrize("kind", tiered(WHOLES, USUAL))
def test_small_text_model_agrees_with_the_multimodal_model(kind: str) -> None:
    config = small_whole(kind).config
    assert apart(config, [list(range(3, 60)), [5] * 20]) == 0.0
    text = text_config(config)
    assert text is not None
    stages = find_split_points(text)
    assert isinstance(stages, str) == kind.startswith("gemma4"), stages


@pytest.mark.parametrize("kind", tiered(WHOLES, USUAL))
def test_multimodal_config_decides_whether_embeddings_are_tied(kind: str) -> None:
    """Not the key of its text config, which says the opposite here."""
    for tied in (True, False):
        config = small_whole(kind, tied=tied).config
        config.get_text_config().tie_word_embeddings = not tied
        whole = type(small_whole(kind))._from_config(copy.deepcopy(config))
        text = text_config(config)
        assert text is not None
        assert text.tie_word_embeddings == (whole.lm_head.weight is whole.get_input_embeddings().weight)


def test_new_tokens_are_added_to_the_multimodal_model(tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    folder_of(given, "gemma3", tied=True)
    model = Model(name_or_path=str(given))
    more = dataclasses.replace(FACTS, vocab_size=VOCABULARY + 3)
    policy = build_model(model, more, seed=0, dtype=torch.float32)
    export_checkpoint(saved(policy, model, tmp_path, "fp32"), out)
    again = AutoModelForMultimodalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.tensor([[3, 4, VOCABULARY + 2]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, policy.eval().causal_lm(input_ids=ids).logits)
    assert json.loads((out / "config.json").read_text())["text_config"]["vocab_size"] == VOCABULARY + 3


def test_export_needs_unchanged_original_files(tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "out"
    folder_of(given, "gemma3", tied=True)
    model = Model(name_or_path=str(given))
    checkpoint = saved(build_model(model, FACTS, 0, torch.float32), model, tmp_path)
    path = next(
        path for path in given.glob("*.safetensors") if any("vision" in key for key in load_file(path))
    )
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b"??")
    with pytest.raises(CheckpointError, match="these have changed since"):
        export_checkpoint(checkpoint, out)
    path.unlink()
    with pytest.raises(
        MissingInputError, match="copies the other tensors from .* put it back, then run dsft export"
    ):
        export_checkpoint(checkpoint, out)
    assert not out.exists()
    path.write_bytes(whole)
    export_checkpoint(checkpoint, out)


TOWER = "embeddings.position_embedding.weight"


def tower_file(folder: Path) -> tuple[Path, str, dict[str, torch.Tensor]]:
    """Return the file that has the tensor TOWER, the tensor's name there, and the file's tensors."""
    for path in folder.glob("*.safetensors"):
        for key in (tensors := load_file(path)):
            if key.endswith(TOWER):
                return path, key, tensors
    raise AssertionError(f"{folder} has no {TOWER}")


def test_tower_that_transformers_would_not_load_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, "gemma3", tied=True)
    path, key, tensors = tower_file(tmp_path)
    right = tensors[key]
    for value, message in (
        (right[:-1].clone(), r"position_embedding.weight has shape \[\d+, \d+\] instead of"),
        (right.to(torch.int8), "has the type I8, not one of weights"),
        (None, "position_embedding.weight is missing"),
    ):
        save_file(
            {k: t for k, t in (tensors | {key: value}).items() if t is not None}, path, {"format": "pt"}
        )
        with pytest.raises(MissingInputError, match=message):
            build_model(Model(name_or_path=str(tmp_path)), FACTS, 0, torch.float32)
    save_file(tensors, path, {"format": "pt"})
    build_model(Model(name_or_path=str(tmp_path)), FACTS, 0, torch.float32)


def test_export_names_a_tower_that_is_not_finite(tmp_path: Path) -> None:
    given = tmp_path / "given"
    folder_of(given, "gemma3", tied=True)
    path, key, tensors = tower_file(given)
    tensors[key][0, 0] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    model = Model(name_or_path=str(given))
    checkpoint = saved(build_model(model, FACTS, 0, torch.float32), model, tmp_path)
    assert f"warning: {key} is not finite, as in the files" in export_checkpoint(checkpoint, tmp_path / "out")


@pytest.mark.parametrize(("kind", "words"), [
    ("mllama",
     "a mllama model is more than a text model .*, and transformers builds no causal language model"),
    ("cohere2_vision", "a cohere2_vision model gives other logits on text alone than its text model"),
])  # fmt: skip
def test_multimodal_model_without_a_text_model_is_refused(kind: str, words: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[kind]()
    config.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=words):
        resolve_config(Model(name_or_path=str(tmp_path)), FACTS)
        check_text(config)


def folder_of(folder: Path, kind: str, tied: bool) -> PreTrainedModel:
    """Several files, of two types, with a tensor that transformers ignores where it ignores one. Qwen3-VL-MoE
    and Qwen3.5-MoE have experts as on the hub, transposed and joined; transformers saves each by itself for
    the Qwen3-MoE in a Llava."""
    whole = small_whole(kind, tied=tied)
    whole.save_pretrained(folder, max_shard_size="20KB", save_original_format=kind != "qwen3_5_moe")
    for path in folder.glob("*.safetensors") if kind == "qwen3_vl_moe" else ():
        tensors = {k: t.mT.contiguous() if ".experts." in k else t for k, t in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    if kind == "qwen3_5":
        save_file(MTP, folder / "model-mtp.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(MTP, "model-mtp.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text('{"crop": 3}')
    return whole


def saved(policy: Policy, model: Model, folder: Path, precision: str = "bf16") -> Path:
    """Return what a run would leave."""
    files = files_around(model.name_or_path, policy.causal_lm.config)
    assert files["preprocessor_config.json"] == b'{"crop": 3}'
    trained = policy.named_trained()
    fragments = [fragment_of(name, "value", 0, p.detach().float().flatten()) for name, p in trained.items()]
    spec = {"model": model.model_dump(mode="json"), "train": {"precision": precision, "seed": 0}}
    base = digests(weight_files(str(model.name_or_path)))
    facts = CheckpointState({"step": 0}, spec, {"global_batch_size": 1}, {}, {}, {}, base=base)
    shapes = {name: tuple(p.shape) for name, p in trained.items()}
    save(folder, fragments, shapes, facts, ALONE, model_files=files, retention=Checkpoint(keep_last=None))
    return folder / "checkpoints" / "step-0"


def trained(kind: str, given: Path, policy: Policy) -> set[str]:
    """Return the names in the files of the text model's parameters, by their values, and of its experts."""
    values = [p.detach() / 2 for p in policy.causal_lm.parameters()]
    return {
        key
        for key, tensor in tensors_of(given).items()
        if ".experts." in key
        or tensor.dtype == torch.float32
        and any(v.shape == tensor.shape and torch.equal(v, tensor.bfloat16()) for v in values)
    }
