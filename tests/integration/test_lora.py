"""Runs that train a part of a model: stopped, resumed, exported, and loaded by peft and transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dsft.checkpoint.export import export_checkpoint
from dsft.checkpoint.read import CheckpointReader
from dsft.errors import CheckpointError
from tests.integration.runs import TRAIN, records, shows_traceback, trained, write_model, write_spec
from tests.launching import alone

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = "model.lora={rank: 4, alpha: 8, use_dora: true, modules_to_save: [lm_head]}"
FORMAT = {"format": "pt"}
METRICS = ("train/loss", "train/grad_norm", "eval/loss")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's folder."""
    return write_model(tmp_path_factory.mktemp("base"))


def of(base: Path) -> str:
    return f"model={{name_or_path: {base}}}"


@pytest.fixture(scope="module")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with adapters under ZeRO 2 on two ranks; it saved at steps 4, 8 and 10."""
    folder = tmp_path_factory.mktemp("adapted")
    output = trained(write_spec(folder), of(base), LORA, "parallel.zero_stage=2", "checkpoint.keep_last=null")
    assert f"for peft's PeftModel.from_pretrained over {base}" in output and "--merged" in output
    return folder


def run_of(folder: Path) -> Path:
    return folder / "runs" / "small"


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [  # another layout is always tried with all parameters, in test_resume.py and tests/parity/test_state.py
        pytest.param(2, "parallel.zero_stage=2", id="the same"),
        pytest.param(1, "parallel.zero_stage=3", id="zero3 on 1", marks=pytest.mark.long),
    ],
)
def test_adapter_run_resumes(adapted: Path, base: Path, tmp_path: Path, nproc: int, layout: str) -> None:
    shutil.copytree(run_of(adapted), run_of(tmp_path))
    for later in ("checkpoints/step-8", "checkpoints/step-10", "export"):
        shutil.rmtree(run_of(tmp_path) / later)
    output = trained(write_spec(tmp_path), of(base), LORA, layout, nproc=nproc)
    assert "going on from step 4" in output
    for key in METRICS:
        assert records(run_of(tmp_path), key) == pytest.approx(records(run_of(adapted), key), rel=1e-6), key
    if layout == "parallel.zero_stage=2":
        whole, resumed = (
            CheckpointReader.open(run_of(f) / "checkpoints" / "step-10") for f in (adapted, tmp_path)
        )
        for name, shape in whole.shapes.items():
            for kind in ("value", "exp_avg", "exp_avg_sq"):
                numel = torch.Size(shape).numel()
                assert torch.equal(whole.read(name, kind, 0, numel), resumed.read(name, kind, 0, numel)), name


def test_adapter_checkpoint_holds_trained_tensors_and_exports_have_its_logits(
    adapted: Path, base: Path, tmp_path: Path
) -> None:
    path = run_of(adapted) / "checkpoints" / "step-10"
    names = set(CheckpointReader.open(path).shapes)
    assert all(".lora_" in name for name in names - {"lm_head.weight"}) and len(names) == 2 * 7 * 3 + 1

    adapter = run_of(adapted) / "export"
    with_adapter = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    export_checkpoint(path, tmp_path / "merged", merged=True)
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values()), info
    before = logits(AutoModelForCausalLM.from_pretrained(base))
    assert (logits(with_adapter) - before).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(with_adapter), rtol=0, atol=1e-5)

    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base) and config["use_dora"] and config["r"] == 4
    assert not (adapter / "config.json").exists()  # with it transformers takes the folder for a model's
    assert AutoTokenizer.from_pretrained(adapter).chat_template
    assert set(load_file(adapter / "adapter_model.safetensors")) == {f"base_model.model.{n}" for n in names}


def test_new_tokens_beside_adapters_under_zero_3(base: Path, tmp_path: Path) -> None:
    """The rows of a new token that the data has: trained, saved, resumed and exported, in shards."""
    saved = "target_modules: [q_proj], modules_to_save: [embed_tokens, lm_head]"
    new = (
        "model.add_tokens=[color]",
        f"model.lora={{rank: 4, alpha: 8, {saved}}}",
        "parallel.zero_stage=3",
        "checkpoint.keep_last=null",
        "train.max_steps=6",
    )
    (tmp_path / "whole").mkdir()
    output = trained(write_spec(tmp_path / "whole"), of(base), *new)
    assert "1 new row starts from the mean" in output
    shutil.copytree(run_of(tmp_path / "whole"), run_of(tmp_path / "resumed"))
    for later in ("checkpoints/step-6", "export"):
        shutil.rmtree(run_of(tmp_path / "resumed") / later)
    assert "going on from step 4" in trained(write_spec(tmp_path / "resumed"), of(base), *new)
    for key in METRICS:
        assert records(run_of(tmp_path / "resumed"), key) == records(run_of(tmp_path / "whole"), key), key

    export = run_of(tmp_path / "resumed") / "export"
    before = AutoModelForCausalLM.from_pretrained(base)
    tokenizer, first = AutoTokenizer.from_pretrained(export), before.config.vocab_size
    assert tokenizer.convert_tokens_to_ids("color") == first and len(tokenizer) == first + 1
    exported = load_file(export / "adapter_model.safetensors")
    held = CheckpointReader.open(run_of(tmp_path / "resumed") / "checkpoints" / "step-6")
    adapted = AutoPeftModelForCausalLM.from_pretrained(export)
    for name, tensor in (
        ("model.embed_tokens.weight", adapted.get_input_embeddings().weight),
        ("lm_head.weight", adapted.get_output_embeddings().weight),
    ):
        old = before.state_dict()[name]
        mean, numel = old.mean(0), (first + 1) * old.shape[1]
        assert tensor.shape == (first + 1, old.shape[1])
        assert torch.equal(tensor, held.read(name, "value", 0, numel).view_as(tensor))
        assert torch.equal(tensor, exported[f"base_model.model.{name}"])
        assert (tensor[first] - mean).abs().max() > 5e-3, "the new row is trained"
    export_checkpoint(held.path, tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=0, atol=1e-5)


def test_held_out_loss_of_a_run_that_continues_the_adapter(adapted: Path, base: Path, tmp_path: Path) -> None:
    """Its first step has rate 0 (warmup), so that it is evaluated as it was saved."""
    spec = write_spec(tmp_path)
    output = trained(
        spec, of(base), f"model.lora={{path: {run_of(adapted) / 'export'}}}", "train.max_steps=1",
        "parallel.zero_stage=3",
    )  # fmt: skip
    assert "starting at step 0" in output
    last = records(run_of(adapted), "eval/loss")[10]
    assert records(run_of(tmp_path), "eval/loss")[1] == pytest.approx(last, rel=1e-6)


def test_adapter_checkpoint_is_refused_for_a_full_run(adapted: Path, base: Path, tmp_path: Path) -> None:
    shutil.copytree(run_of(adapted), run_of(tmp_path))
    result = alone(TRAIN, [str(write_spec(tmp_path)), of(base), "train.max_steps=11"])
    assert result.returncode == 76 and not shows_traceback(result.stderr)
    assert "model.lora.rank was 4, now (not set)" in " ".join(result.stderr.split())


def test_partly_trained_model_is_exported_with_the_rest_of_its_base(base: Path, tmp_path: Path) -> None:
    patterns = "model.trainable=['model.layers.1.*', '*norm.weight']"
    groups = "optim.groups=[{parameters: '*norm.weight', learning_rate: 0.02}]"
    copy, spec = tmp_path / "base", write_spec(tmp_path)
    shutil.copytree(base, copy)
    trained(spec, of(copy), patterns, groups, "parallel.zero_stage=1")
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run_of(tmp_path) / "export").state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    held = set(CheckpointReader.open(run_of(tmp_path) / "checkpoints" / "step-10").shapes)
    assert changed == held == {n for n in before if "layers.1." in n or n.endswith("norm.weight")}

    # The rest is not in the checkpoint: over another base neither a run nor an export is possible.
    save_file({name: tensor + 1 for name, tensor in before.items()}, copy / "model.safetensors", FORMAT)
    result = alone(TRAIN, [str(spec), of(copy), patterns, groups, "train.max_steps=11"])
    assert result.returncode == 76 and not shows_traceback(result.stderr), result.stderr
    assert f"'{copy}', and these have changed since" in " ".join(result.stderr.split())
    with pytest.raises(CheckpointError, match="changed since"):
        export_checkpoint(run_of(tmp_path) / "checkpoints" / "step-10", tmp_path / "other")


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    found: Tensor = model.eval()(torch.arange(40)[None]).logits
    return found
