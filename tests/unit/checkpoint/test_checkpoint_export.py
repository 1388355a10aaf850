"""What an export holds: the model that transformers loads, in little memory, or nothing new at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma4UnifiedTextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from dsft.checkpoint.export import export, export_checkpoint, write_model_folder
from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.tensors import write_beside
from dsft.data.tokenizer.load import load_tokenizer
from dsft.errors import CheckpointError, LockedError, MissingInputError, StorageError
from dsft.model.conversion import persistent_buffers

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6, 7]])


def saved(maker: Any, ranks: int = 3) -> CheckpointReader:
    maker.save(4, ranks=ranks)
    return CheckpointReader.open(maker.step(4))


def test_export_loads_in_transformers_with_equal_logits(
    maker_of: Any, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert export_checkpoint(saved(maker_of).path, out).startswith(f"{out}: the model after step 4, ")
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.architectures == ["LlamaForCausalLM"] and loaded.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, llama.eval()(TOKENS).logits)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not llama.config.tie_word_embeddings
        assert file.metadata() == {"format": "pt"}


def test_export_has_tokenizer_template_and_generation_config(maker: Any, tmp_path: Path) -> None:
    export(saved(maker), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w3"}], tokenize=False) == "w3"
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 0


@pytest.mark.parametrize(("text", "reason"), [
    ("null", "'NoneType' object is not a mapping"),
    ("[" * 100_000, "recursion"),
    ("{", "not a valid JSON file"),
    ('{"eos_token_id": "</s>"}', "eos_token_id '</s>' is neither a token's id nor a list of them"),
    ('{"num_return_sequences": 5}', "num_return_sequences"),
    ('{"watermarking_config": 5}', "no attribute"),
])  # fmt: skip
def test_a_damaged_generation_config_is_named(
    maker: Any, tokenizer: Any, tmp_path: Path, text: str, reason: str
) -> None:
    """At a start, before anything is trained; without the file the export has one of the config's tokens."""
    config, base = LlamaConfig.from_pretrained(maker.model_folder), tmp_path / "base"
    config.save_pretrained(base)
    file = base / "generation_config.json"
    file.write_text(text)
    with pytest.raises(
        MissingInputError, match=f"generation_config.json of the model .*{reason}.*; correct or"
    ):
        write_model_folder(tmp_path / "model", config, tokenizer, str(base))
    file.write_text('{"eos_token_id": [1, 2], "temperature": 0.5, "do_sample": true}')
    write_model_folder(tmp_path / "model", config, tokenizer, str(base))
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [1, 2]
    file.unlink()
    write_model_folder(tmp_path / "model", config, tokenizer, str(base))
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == config.eos_token_id


def test_export_has_all_chat_templates(maker: Any, tokenizer: Any, tmp_path: Path) -> None:
    several = {"tool_use": "{{ tools }}", "rag": "{{ documents }}", "default": "{{ messages }}"}
    own, config = tokenizer.chat_template, LlamaConfig.from_pretrained(maker.model_folder)
    for templates in (own, several, {"rag": "r"}, own):  # into the folder of the start before
        tokenizer.chat_template = templates
        write_model_folder(maker.model_folder, config, tokenizer)
        maker.save(6)
        export(CheckpointReader.open(maker.step(6)), tmp_path / "out")
        assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == templates
        assert load_tokenizer(tmp_path / "out").chat_template == templates
        shutil.rmtree(maker.step(6))


def test_export_has_the_pieces_of_sentencepiece(tokenizer: Any, llama: Any, tmp_path: Path) -> None:
    """Byte for byte, and not those of an earlier start with another tokenizer."""
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"pieces")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "base")
    loaded.vocab_file = None  # as Gemma's, which does not know of the file
    write_model_folder(tmp_path / "model", llama.config, loaded)
    assert (tmp_path / "model" / "tokenizer.model").read_bytes() == b"pieces"
    write_model_folder(tmp_path / "model", llama.config, tokenizer)
    assert not (tmp_path / "model" / "tokenizer.model").exists()


def test_export_in_shards_with_an_index(maker: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(saved(maker), out, max_shard_bytes=4000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(shards) > 2 and set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in maker.tensors.values())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(p, maker.tensors[name]) for name, p in loaded.named_parameters())


def test_export_in_bf16(maker: Any, tmp_path: Path) -> None:
    export(saved(maker), tmp_path / "out", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(p, maker.tensors[name].bfloat16()) for name, p in loaded.named_parameters())


def test_equal_export_is_kept_and_newer_replaces_it(maker: Any, tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "out", saved(maker)
    export(checkpoint, out)
    before = (out / "model.safetensors").stat().st_ino
    assert export(checkpoint, out) == f"{out}: the model after step 4, exported before"
    assert (out / "model.safetensors").stat().st_ino == before
    maker.save(5)
    export(CheckpointReader.open(maker.step(5)), out)
    assert (out / "model.safetensors").stat().st_ino != before
    (out / "model.safetensors").unlink()
    export(CheckpointReader.open(maker.step(5)), out)
    assert (out / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "dsft_export.json"])
def test_export_with_a_flipped_bit_is_rewritten(maker: Any, tmp_path: Path, name: str) -> None:
    out, checkpoint = tmp_path / "out", saved(maker)
    export(checkpoint, out)
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    damaged = bytearray(whole[name])
    damaged[len(damaged) // 2] ^= 1
    (out / name).write_bytes(damaged)
    line = export_checkpoint(checkpoint.path, out)
    assert "exported before" not in line
    if name != "dsft_export.json":
        assert line.endswith(
            f"; it replaces a damaged export: {out / name} has changed since it was written (SHA-256 differs)"
        )
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert export_checkpoint(checkpoint.path, out).endswith(", exported before")


def test_export_without_checksums_is_rewritten(maker: Any, tmp_path: Path) -> None:
    """As an earlier dsft wrote them, with the sizes of the files alone."""
    out, checkpoint = tmp_path / "out", saved(maker)
    export(checkpoint, out)
    origin = json.loads((out / "dsft_export.json").read_text())
    sizes = {name: file["size"] for name, file in origin.pop("files").items()}
    (out / "dsft_export.json").write_text(json.dumps(origin | {"sizes": sizes}))
    assert not export(checkpoint, out).endswith(", exported before")
    assert export(checkpoint, out).endswith(", exported before")


def test_leftovers_of_a_killed_export_are_removed(maker: Any, tmp_path: Path) -> None:
    for name in ("out.tmp-0a1b2c3d", "out.tmp-0a1b2c3d-old", "outer.tmp-0a1b2c3d", "out-2"):
        (tmp_path / name).mkdir()
    export(saved(maker), tmp_path / "out")
    left = {path.name for path in tmp_path.iterdir()}
    assert {"out", "outer.tmp-0a1b2c3d", "out-2"} <= left and not any(n.startswith("out.tmp") for n in left)


def test_failed_rename_keeps_the_older_export(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", os.rename
    export(saved(maker), out)
    maker.save(5)
    newer = CheckpointReader.open(maker.step(5))
    monkeypatch.setattr("dsft.system.files._exchange", lambda one, other: False)

    def failing(source: Path, target: Path) -> None:
        if target == out and not source.name.endswith("-old"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        with pytest.raises(StorageError, match="an older export there is untouched"):
            export(newer, out)
    assert json.loads((out / "dsft_export.json").read_text())["from"]["step"] == 4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]
    export(newer, out)
    assert json.loads((out / "dsft_export.json").read_text())["from"]["step"] == 5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_older_export_is_replaced_atomically(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(saved(maker), out)
    maker.save(5)
    monkeypatch.setattr(os, "rename", None)
    export(CheckpointReader.open(maker.step(5)), out)
    assert json.loads((out / "dsft_export.json").read_text())["from"]["step"] == 5
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_foreign_files_and_links_of_an_export_are_kept(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("dsft.system.files._exchange", lambda one, other: False)
    out, place = tmp_path / "out", tmp_path / "other disk" / "model"
    out.symlink_to(place)
    export(saved(maker), out)
    (place / "scores.json").write_text("mine")
    maker.save(5)
    export(CheckpointReader.open(maker.step(5)), out)
    assert out.is_symlink() and json.loads((place / "dsft_export.json").read_text())["from"]["step"] == 5
    assert (out / "scores.json").read_text() == "mine"
    assert [path.name for path in place.parent.iterdir()] == ["model"]


def test_foreign_folder_is_not_overwritten(maker: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    with pytest.raises(LockedError, match="was not written by dsft"):
        export(saved(maker), out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_missing_extra_and_misshapen_parameters_are_named(maker: Any, tmp_path: Path) -> None:
    tensors = dict(maker.tensors)
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    other = type(maker)(tmp_path / "other", maker.model_folder, tensors)
    with pytest.raises(CheckpointError) as error:
        export(saved(other), tmp_path / "out")
    assert (
        "lm_head.weight has shape (49, 16) instead of (50, 16); model.norm.bias is not the model's; "
        "model.norm.weight is missing" in str(error.value)
    )
    assert not (tmp_path / "out").exists()


def test_missing_range_keeps_the_older_export(maker: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(saved(maker), out)
    maker.save(5, ranks=3)
    torn = CheckpointReader.open(maker.step(5))
    without = {name: file for name, file in torn.files.items() if name != "rank-00001.safetensors"}
    with pytest.raises(CheckpointError, match="has no value of lm_head.weight from element 266 on"):
        export(CheckpointReader(torn.path, without, torn.state, "digest"), out)
    assert json.loads((out / "dsft_export.json").read_text())["from"]["step"] == 4
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_export_to_a_disk_that_cannot_be_written(maker: Any) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        export(saved(maker), Path("/proc/out"))


PEAK = """
import sys, threading
from pathlib import Path
import torch
import dsft.checkpoint.export as module
from dsft.checkpoint.read import CheckpointReader

def own_memory():  # in KiB; file pages that the kernel may drop do not count
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return int(lines["RssAnon"].split()[0])

def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, own_memory())

small, large, folder = map(Path, sys.argv[1:])
module.export(CheckpointReader.open(small), folder / "first")  # what a first export imports and allocates
module.CHUNK = 2**18
peak, done = 0, threading.Event()
before, watcher = own_memory(), threading.Thread(target=watch)
watcher.start()
module.export(CheckpointReader.open(large), folder / "out", dtype=torch.bfloat16)
done.set()
watcher.join()
print((peak - before) * 1024)
"""


def test_export_memory_is_bounded_by_a_chunk(maker: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Two tensors of 32 MiB, in pieces of 1 MiB."""
    config = LlamaConfig(
        vocab_size=16384, hidden_size=512, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    write_model_folder(tmp_path / "model", config, tokenizer)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = {name: torch.ones(parameter.shape) for name, parameter in model.named_parameters()}
    large = saved(type(maker)(tmp_path / "large", tmp_path / "model", tensors))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(saved(maker).path), str(large.path), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2**25
    assert int(done.stdout) < 2**24


def test_extra_tensors_of_a_file_are_exported(maker: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A layer scalar of Gemma 4 is no parameter, and is not 1 in a pretrained model."""
    config = Gemma4UnifiedTextConfig(
        vocab_size=50, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    scalars = persistent_buffers(model)
    assert list(scalars) == ["model.layers.0.layer_scalar"]
    scalars["model.layers.0.layer_scalar"].fill_(0.5)
    write_model_folder(tmp_path / "gemma4", config, tokenizer)
    write_beside(tmp_path / "gemma4", {"of.another": torch.zeros(1)})
    write_model_folder(tmp_path / "gemma4", config, tokenizer)  # a new start, perhaps of another model
    assert not (tmp_path / "gemma4" / "beside.safetensors").exists()
    write_beside(tmp_path / "gemma4", scalars)
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    export(saved(type(maker)(tmp_path / "other", tmp_path / "gemma4", tensors)), tmp_path / "out")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert persistent_buffers(loaded)["model.layers.0.layer_scalar"] == 0.5
    assert not (tmp_path / "out" / "beside.safetensors").exists()
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model.eval()(TOKENS).logits)
