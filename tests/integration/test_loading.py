"""A model folder on several ranks: who holds what, how much memory it takes, and that nothing changes on the
way in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.load import TINY, make_folder
from dsft.data.tokenizer.load import byte_level_tokenizer
from tests.integration.runs import trained, write_spec
from tests.launching import ROOT, forked
from tests.selected import tiered
from tests.specs import dims

MEDIUM = TINY | dims(768, 2048, 6, 12, 4, vocab_size=32_000)
"""87 million parameters, of which the embedding and the head have 25 million each."""

# Odd sizes: on three ranks hardly a tensor can be cut into equal parts.
ODD = TINY | dims(30, 41, 2, 5, 5, vocab_size=67)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    make_folder(made / "tiny", TINY)
    make_folder(made / "medium", MEDIUM, shard="40MB")
    make_folder(made / "odd", ODD, shard="10KB")
    make_folder(made / "odd tied", ODD | {"tie_word_embeddings": True}, shard="10KB")
    assert len(list((made / "medium").glob("*.safetensors"))) > 3
    return made


@pytest.mark.parametrize("variant", tiered(["zero3", "zero3_offload", "pipeline"], ["zero3"]))
def test_ranks_together_hold_the_model_once(variant: str, folders: Path) -> None:
    """One copy per rank would be 2; DeepSpeed's own zero.Init holds 1 more on rank 0. The folder is larger
    than what a rank may allocate."""
    worker = ROOT / "benchmarks" / "load.py"
    words = ["--rank", variant, str(folders / "tiny"), str(folders / "medium"), "--limit", "0.75"]
    done = forked(worker, 2, words)
    assert done.returncode == 0, done.stderr
    sample = json.loads(done.stdout.splitlines()[-1])
    assert 0.95 < sample["held"] <= 1.1, sample
    assert sample["peak"] <= 1.1, sample
    assert sample["largest_rank"] <= 0.65, sample


def test_weights_on_three_ranks_equal_the_files(folders: Path) -> None:
    worker = Path(__file__).with_name("loading_worker.py")
    done = forked(worker, 3, [str(folders / "odd"), str(folders / "odd tied")])
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(cases) == 10
    for case in cases:
        assert case["values"] == 0.0, case
        assert case["logps"] <= (1e-5 if "fp32" in case["case"] else 2e-2), case
        assert case["tensors"] + case["frozen"] == (20 if "tied" in case["case"] else 21), case
        assert bool(case["frozen"]) == ("trainable" in case["case"]), case


def test_load_and_export_change_nothing(tmp_path: Path) -> None:
    """Tied, bf16, in several files; under ZeRO 3, which cuts some tensors and keeps others whole, with a
    learning rate that moves no weight. The tokens are those of tokenizer.json, for which AutoTokenizer (5.23)
    takes another pre-tokenizer in the given folder of a qwen2 model."""
    folder = tmp_path / "model"
    tokenizer = byte_level_tokenizer()
    keys: dict[str, Any] = MEDIUM | {
        "tie_word_embeddings": True,
        "vocab_size": 4_000,
        "max_position_embeddings": 256,
    }
    keys |= {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 2, "model_type": "qwen2"}
    make_folder(folder, keys, shard="2MB")
    tokenizer.save_pretrained(folder)
    same = ("optim.learning_rate=1.0e-42", "optim.warmup_steps=0", "optim.weight_decay=0.0")
    layout = ("parallel.zero_stage=3", "train.precision=bf16", "train.max_steps=1")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What?", "completion": "cafe\u0301"}\n' * 24)
    rows = (f"data.train=[{{path: {tmp_path / 'rows.jsonl'}}}]",)
    trained(write_spec(tmp_path), f"model={{name_or_path: {folder}}}", *same, *layout, *rows)
    out = tmp_path / "runs" / "small" / "export"
    given, written = held_in(folder), held_in(out)
    assert len(list(folder.glob("*.safetensors"))) > 3
    assert given.keys() == written.keys()
    assert all(written[name].dtype == torch.bfloat16 for name in written)
    assert all(torch.equal(written[name], value) for name, value in given.items())
    ids = torch.arange(40).view(1, 40)
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() for path in (folder, out)
    )
    assert torch.equal(before(ids).logits, after(ids).logits)
    replaced, read = (
        AutoTokenizer.from_pretrained(path)("cafe\u0301")["input_ids"] for path in (folder, out)
    )
    assert read == tokenizer("cafe\u0301")["input_ids"] != replaced


def held_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
