"""An export's README.md: what it says of the run, and that no name in it becomes markup."""

import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from dsft.checkpoint.card import CARD, model_card, origin_of
from dsft.checkpoint.export import export
from dsft.checkpoint.read import CheckpointReader

HOSTILE = "a|b`c*_[x](http://evil)<script>&amp;\n---\ntags: [x]\n# h \u202e$e$ www.evil.org me@evil.org"


def state(**more: Any) -> dict[str, Any]:
    spec = {
        "name": "llama-dpo",
        "task": "dpo",
        "model": {"name_or_path": "meta-llama/Llama-3.1-8B", "lora": None},
        "dpo": {"beta": 0.1, "loss_type": "sigmoid", "label_smoothing": 0.0, "reference": "precomputed"},
        "train": {"precision": "bf16", "seed": 42},
    }
    found: dict[str, Any] = {
        "spec": spec,
        "progress": {"step": 1200, "epoch": 1.5, "num_tokens": 123456},
        "batch": {"global_batch_size": 64},
        "data": {"data.train pairs": {"rows": 5000, "tokens": 70000, "fingerprint": "ff"}},
        "versions": {"dsft": "0.6", "torch": "2.13.0", "deepspeed": "0.19.8", "system": "Linux"},
        "origin": {
            "digest": "ab" * 32,
            "is_folder": False,
            "reference": {"which": "the policy as it starts (precomputed)"},
        },
    }
    model = more.pop("model", {})
    found["spec"] = {**spec, **more.pop("spec", {}), "model": {**spec["model"], **model}}  # type: ignore[dict-item]
    return {**found, **more}


def front_matter(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return found


def rows(card: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (.+?) \| (.+) \|$", card, re.MULTILINE))


def test_card_states_the_origin_of_the_model() -> None:
    card = model_card(state(), "model")
    assert front_matter(card) == {
        "base_model": "meta-llama/Llama-3.1-8B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dsft", "deepspeed", "dpo"],
    }
    table = rows(card)
    assert table["trained from"].startswith("meta-llama/Llama-3.1-8B<br>digest of its weight files")
    assert "abababab" in table["trained from"]
    assert table["objective"] == "DPO on preference pairs, loss sigmoid, β 0.1"
    assert table["reference"] == r"the policy as it starts \(precomputed\)"
    assert table["data"] == r"data.train pairs\: 5,000 pairs of 70,000 tokens"
    assert table["steps"] == "1,200 steps of 64 pairs<br>1.50 epochs, 123,456 tokens"
    assert (table["precision"], table["versions"]) == ("bf16", "dsft 0.6, torch 2.13.0, deepspeed 0.19.8")


def test_card_has_the_commit_of_a_checkout() -> None:
    versions = {"dsft": "not installed", "commit": "0123456789abcdef+", "torch": "2.13.0"}
    found = rows(model_card(state(versions=versions), "model"))["versions"]
    assert found == "dsft at commit 0123456789ab, torch 2.13.0"


def test_hub_reader_accepts_the_card() -> None:
    data = ModelCard(model_card(state(), "model")).data.to_dict()
    assert (data["base_model"], data["library_name"]) == ("meta-llama/Llama-3.1-8B", "transformers")
    adapter = ModelCard(
        model_card(state(model={"lora": {"rank": 4, "alpha": 8.0}}), "adapter")
    ).data.to_dict()
    assert adapter["library_name"] == "peft" and "lora" in adapter["tags"]


def test_local_base_model_is_named_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "secret" / "start"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    asked = ["sha256sum", "model.safetensors"]
    found = subprocess.run(asked, cwd=folder, capture_output=True, check=True).stdout
    origin = origin_of(str(folder), {"model.safetensors": found.decode().split()[0]})
    assert origin["is_folder"] and origin["digest"] == hashlib.sha256(found).hexdigest()
    card = model_card(state(model={"name_or_path": str(folder)}, origin=origin), "model")
    assert "base_model" not in front_matter(card) and "secret" not in card
    assert rows(card)["trained from"].startswith("start<br>")
    card = model_card(state(model={"name_or_path": "runs/sft/export"}, origin=None), "model")
    assert "base_model" not in front_matter(card) and rows(card)["trained from"] == "runs/sft/export"


def test_a_spec_without_a_section_has_its_defaults() -> None:
    table = rows(model_card(state(spec={"dpo": None}), "model"))
    assert table["objective"] == "DPO on preference pairs, loss sigmoid, β 0.1"


def test_a_fresh_model_has_a_seed_and_no_base() -> None:
    fresh = {"name_or_path": None, "from_config": {"model_type": "llama"}}
    card = model_card(state(model=fresh, origin=origin_of(None, None)), "model")
    assert rows(card)["trained from"] == "fresh weights of a llama config, seed 42"
    assert "base_model" not in front_matter(card) and "reference" not in rows(card)


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_card_names_the_kind_of_adapter(form: Any) -> None:
    lora = {"rank": 8, "alpha": 16.0, "use_dora": True, "path": "/models/old"}
    table = rows(model_card(state(model={"lora": lora}), form))
    assert table["adapter"] == "DoRA, rank 8, alpha 16.0<br>continued from old"


@pytest.mark.parametrize("where", ["name", "model", "data", "reference"])
def test_names_are_escaped_in_the_card(where: str) -> None:
    made = state()
    if where == "name":
        made["spec"]["name"] = HOSTILE
    elif where == "model":
        made["spec"]["model"]["name_or_path"] = HOSTILE
    elif where == "data":
        made["data"] = {HOSTILE: {"rows": 1, "tokens": 2}}
    else:
        made["origin"]["reference"]["which"] = HOSTILE
    card = model_card(made, "model")
    assert set(front_matter(card)) <= {"base_model", "library_name", "pipeline_tag", "tags"}
    assert front_matter(card)["tags"] == ["dsft", "deepspeed", "dpo"]
    body = card.split("---\n", 2)[2]
    assert sum(line.startswith("#") for line in body.splitlines()) == 1  # its own heading
    assert "\u202e" not in card
    for markup in ("<script", "[x](", "`c", "http:", "&amp;", "me@", "$e$", "www.e"):
        assert markup not in re.sub(r"\\.", "", body), markup
    assert re.search(r"(?<!\\)\|b", body) is None  # no column of its own


def test_credentials_in_an_address_are_removed() -> None:
    card = model_card(state(model={"name_or_path": "https://me:hunter2@host/model"}), "model")
    assert "hunter2" not in card and "host/model" in card


def test_exports_of_older_checkpoints_have_a_card(maker: Any, tmp_path: Path) -> None:
    maker.save(4)
    export(CheckpointReader.open(maker.step(4)), tmp_path / "out")  # its state has no model and no origin
    card = (tmp_path / "out" / CARD).read_text(encoding="utf-8")
    assert rows(card) == {"steps": "4 steps of 8 examples", "precision": "fp32"}


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_card_names_the_quantization_of_the_base(form: Any) -> None:
    model = {"lora": {"rank": 8, "alpha": 16.0}, "quantize": "nf4"}
    config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    card = model_card(state(model=model), form, config if form == "adapter" else {})
    found = rows(card)["adapter"].split("<br>")[1]
    assert found == r"trained on weights in 4 bits \(nf4, double quantization, bitsandbytes\)"
    heading = "The following `bitsandbytes` quantization config was used during training:"
    listed = f"\n{heading}\n\n- load_in_4bit: `True`\n- bnb_4bit_quant_type: `nf4`\n"
    assert (listed in card) == (form == "adapter")
