"""Checkpoints of models whose embeddings got rows for new tokens: adapters, merged, parts of a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dsft.checkpoint.compare import check_same_rows
from dsft.checkpoint.export import export_checkpoint
from dsft.commands.chat import Sampling, load
from dsft.data.tokenizer.load import byte_level_tokenizer, open_tokenizer
from dsft.errors import CheckpointError, MissingInputError
from dsft.model.build import build_model
from dsft.model.census import take_census
from dsft.model.config import new_rows, resolve_config, token_facts
from dsft.plan.census import census_from
from dsft.setup.resolve import untrained_rows
from dsft.spec.schema import Model
from tests.unit.checkpoint.conftest import make_checkpoint, make_llama

IDS = torch.tensor([[1, 259, 2, 260]])


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a model of 259 tokens."""
    folder = tmp_path / "base"
    llama = make_llama(request.param)
    llama.resize_token_embeddings(259, mean_resizing=False)
    for parameter in llama.parameters():
        parameter.data.normal_(std=0.3)
    llama.save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [(), ("embed_tokens", "lm_head")], ids=["frozen", "trained"])
def test_adapter_export_has_the_new_embeddings(base: Path, saved: tuple[str, ...], tmp_path: Path) -> None:
    lora = {"rank": 2, "modules_to_save": saved}
    model = Model.model_validate({"name_or_path": str(base), "add_tokens": ["<a>", "<b>"], "lora": lora})
    held, trained = make_checkpoint(model, tmp_path / "run")
    line = export_checkpoint(held.path, tmp_path / "adapter")
    assert line.endswith(", with all 261 rows of the embeddings")
    repeated = export_checkpoint(held.path, tmp_path / "adapter")
    assert repeated.endswith(", exported before, with all 261 rows of the embeddings")
    export_checkpoint(held.path, tmp_path / "merged", merged=True)
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        expected = trained(IDS).logits
        for found in (adapted, merged):
            assert found.get_input_embeddings().weight.shape == (261, 16)
            torch.testing.assert_close(found(IDS).logits, expected, rtol=0, atol=1e-5)
    left = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "generation_config.json" in left and "config.json" not in left
    talker = load(tmp_path / "adapter", Sampling(temperature=0.0, max_new_tokens=2))
    assert talker.model.get_input_embeddings().weight.shape == (261, 16)

    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.embed_tokens.weight" in names
    continued = {"name_or_path": str(base), "add_tokens": ["<a>", "<b>"]}
    again = Model.model_validate(continued | {"lora": lora | {"path": str(tmp_path / "adapter")}})
    tokenizer, added = open_tokenizer(again)
    policy = build_model(again, token_facts(tokenizer, added.first_id), 5, torch.float32)
    with torch.no_grad():
        assert torch.equal(policy.causal_lm.eval()(IDS).logits, expected)


def test_an_adapter_over_other_embeddings_is_refused(base: Path, tmp_path: Path) -> None:
    """Frozen here, they would not be those that it was trained with."""
    lora = {"rank": 2, "modules_to_save": ("embed_tokens", "lm_head")}
    model = Model.model_validate({"name_or_path": str(base), "add_tokens": ["<a>"], "lora": lora})
    held, _ = make_checkpoint(model, tmp_path / "run")
    export_checkpoint(held.path, tmp_path / "adapter")
    frozen = {"rank": 2, "path": str(tmp_path / "adapter")}
    other = Model.model_validate({"name_or_path": str(base), "add_tokens": ["<a>"], "lora": frozen})
    tokenizer, added = open_tokenizer(other)
    with pytest.raises(MissingInputError, match="has other values than this run's model"):
        build_model(other, token_facts(tokenizer, added.first_id), 5, torch.float32)


def test_partly_trained_model_is_exported_whole(base: Path, tmp_path: Path) -> None:
    model = Model.model_validate(
        {"name_or_path": str(base), "add_tokens": ["<a>", "<b>"], "trainable": ["*norm.weight"]}
    )
    held, trained = make_checkpoint(model, tmp_path / "run")
    export_checkpoint(held.path, tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(found(IDS).logits, trained(IDS).logits)
    assert found.config.vocab_size == 261


def test_run_does_not_resume_with_other_new_rows(base: Path, tmp_path: Path) -> None:
    model = Model.model_validate(
        {"name_or_path": str(base), "add_tokens": ["<a>"], "trainable": ["*norm.weight"]}
    )
    held, _ = make_checkpoint(model, tmp_path / "run")
    check_same_rows(held, {"first": 259, "stop": 260, "held": 259})
    for rows, present in (
        ({"first": 259, "stop": 261, "held": 259}, "new rows 259 to 260"),
        (None, "no new rows"),
    ):
        with pytest.raises(CheckpointError, match=f"had new rows 259 to 259, and now they have {present}"):
            check_same_rows(held, rows)


@pytest.mark.parametrize(("keys", "message"), [
    ({}, None),
    ({"lora": {"rank": 2}}, "model.lora.modules_to_save: [embed_tokens, lm_head] trains them"),
    ({"lora": {"rank": 2, "modules_to_save": ["embed_tokens", "lm_head"]}}, None),
    ({"trainable": ["*norm.weight"]}, "model.trainable: [model.embed_tokens.weight"),
    ({"trainable": ["*embed_tokens*", "*lm_head*"]}, None),
])  # fmt: skip
def test_frozen_new_rows_give_a_warning(base: Path, keys: dict[str, Any], message: str | None) -> None:
    model = Model.model_validate({"name_or_path": str(base), "add_tokens": ["<a>"], **keys})
    tokenizer, added = open_tokenizer(model)
    known = token_facts(tokenizer, added.first_id)
    counted = census_from(take_census(model, known))
    inputs: Any = SimpleNamespace(rows=new_rows(model, known), config=resolve_config(model, known))
    lines = list(untrained_rows(model, inputs, counted))
    assert [message in line for line in lines] == [True] if message else lines == []
    assert census_from(take_census(model)) == counted
    assert next(p for p in counted.parameters if p.embedding).shape == (260, 16)
