"""A folder in, the same folder out: without a step of training an export has the names, types and values of
the model that it came from, whatever the architecture. Fresh models, and all that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from dsft.checkpoint.export import export
from dsft.checkpoint.files import read_files
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.save import CheckpointState, save
from dsft.checkpoint.tensors import write_beside, write_names
from dsft.engine.replicas import digest, replicated
from dsft.errors import DsftError, SpecError
from dsft.model.build import build_model
from dsft.model.config import DECODERS, TokenFacts
from dsft.model.conversion import persistent_buffers
from dsft.model.files import tensor_names
from dsft.model.policy import Policy
from dsft.spec.architecture import PIPELINE_PARTS
from dsft.spec.schema import Checkpoint, Model
from tests.architectures.cases import (
    ARCHITECTURES,
    REFUSED,
    USUAL,
    VOCABULARY,
    keys_of,
    small_model,
)
from tests.make import ALONE, fragment_of, logps_of
from tests.selected import tiered

T = TypeVar("T")
FACTS = TokenFacts(VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=None)


@pytest.mark.parametrize("kind", tiered(ARCHITECTURES, USUAL))
def test_export_without_a_step_equals_the_folder(kind: str, tmp_path: Path) -> None:
    given = tmp_path / "given"
    small_model(kind).bfloat16().save_pretrained(given, max_shard_size="8KB")
    assert len(list(given.glob("*.safetensors"))) > 1
    policy = build_model(Model(name_or_path=str(given)), FACTS, seed=0, dtype=torch.bfloat16)
    out = exported(policy, tmp_path, given)
    expected, found = tensors_of(given), tensors_of(out)
    assert found.keys() == expected.keys()
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((out / "config.json").read_text()) == json.loads((given / "config.json").read_text())


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_joined_experts_and_router_bias_are_exported_exactly(kind: str, tmp_path: Path) -> None:
    """A folder whose files have the names of the modules, in bf16 but for the bias of a router."""
    given = tmp_path / "given"
    causal_lm = small_model(kind)
    tensors = {name: t if "bias" in name else t.bfloat16() for name, t in causal_lm.state_dict().items()}
    causal_lm.config.save_pretrained(given)
    save_file(tensors, given / "model.safetensors")
    policy = build_model(Model(name_or_path=str(given)), FACTS, seed=0, dtype=torch.bfloat16)
    found = tensors_of(exported(policy, tmp_path, given))
    assert found.keys() == tensors.keys() and any("experts.gate_up_proj" in name for name in found)
    assert all(t.dtype == tensors[name].dtype and torch.equal(t, tensors[name]) for name, t in found.items())


@pytest.mark.parametrize("kind", tiered(ARCHITECTURES, USUAL))
def test_compared_digests_do_not_depend_on_rows(kind: str) -> None:
    """Else ranks with rows of other lengths would be taken for faulty ones."""
    models = [small_model(kind).train(), small_model(kind).train()]
    for causal_lm, shape in zip(models, ((2, 5), (3, 40)), strict=True):
        causal_lm(input_ids=torch.randint(3, VOCABULARY, shape), use_cache=False)
    first, second = (
        {name: int(digest(t)) for name, t in replicated(causal_lm, []).items()} for causal_lm in models
    )
    assert first == second


def exported(policy: Policy, folder: Path, given: Path) -> Path:
    """Return what a run of no step would leave."""
    causal_lm, model_folder = policy.causal_lm, folder / "model"
    causal_lm.config.save_pretrained(model_folder)
    write_beside(model_folder, persistent_buffers(causal_lm))
    write_names(model_folder, tensor_names(str(given)))
    trained = policy.named_trained()
    fragments = [fragment_of(name, "value", 0, p.detach().float().flatten()) for name, p in trained.items()]
    spec = {"train": {"precision": "bf16", "seed": 0}}
    facts = CheckpointState({"step": 0}, spec, {"global_batch_size": 1}, {}, {}, {})
    shapes = {name: tuple(p.shape) for name, p in trained.items()}
    files = read_files(model_folder)
    save(folder, fragments, shapes, facts, ALONE, model_files=files, retention=Checkpoint(keep_last=None))
    export(CheckpointReader.open(folder / "checkpoints" / "step-0"), folder / "out")
    return folder / "out"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("kind", tiered(ARCHITECTURES, USUAL))
def test_fresh_model_gives_its_own_log_probabilities(kind: str) -> None:
    model = Model.model_validate({"from_config": {"model_type": kind, **keys_of(kind)}})
    if kind in {"bailing_hybrid", "beam"}:  # its config class names not all keys that the model reads
        with pytest.raises(SpecError, match="q_lora_rank is not a key of"):
            build_model(model, FACTS, 3, torch.float32)
        return
    if kind == "apertus":  # the parameters of its activation
        with pytest.raises(DsftError, match="does not initialize model.layers.0.mlp.act_fn.alpha_p"):
            build_model(model, FACTS, 3, torch.float32)
        return
    policy = build_model(model, FACTS, 3, torch.float32).eval()
    ids, positions = torch.arange(3, 25).view(2, 11), torch.arange(11).repeat(2, 1)
    targets = ids + 50
    with torch.no_grad():
        logps = logps_of(policy, ids, positions, targets)
        expected = policy.causal_lm(input_ids=ids).logits.log_softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(logps, expected[..., 0], rtol=0, atol=2e-6)
    assert torch.isfinite(logps).all()


def test_every_transformers_architecture_is_listed_or_refused() -> None:
    kinds = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    described = {kind for kind in kinds if CONFIG_MAPPING[kind].base_model_pp_plan}
    described -= PIPELINE_PARTS  # which transformers lists once dsft has made their classes
    assert described | set(DECODERS) == ARCHITECTURES.keys() | REFUSED.keys()


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind: str) -> None:
    keys: dict[str, Any] = {"model_type": kind, **REFUSED[kind][0]}
    with pytest.raises(SpecError, match=f"a {kind} model .*{REFUSED[kind][1]}"):
        build_model(Model(from_config=keys), FACTS, 3, torch.float32)
