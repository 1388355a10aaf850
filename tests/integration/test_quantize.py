"""Adapters on weights in 4 bits, in every layout that trains them: equal to a plain loop over transformers'
4-bit model with peft, whose weights have the same bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from benchmarks.load import TINY
from dsft.checkpoint.export import export_checkpoint
from dsft.commands.chat import Sampling, load
from dsft.data.tokenizer.load import byte_level_tokenizer, num_ids
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.names import plain_name
from dsft.model.quantize import QuantizedLinear
from dsft.spec.schema import Lora, Model
from tests.architectures.wholes import WHOLES, small_whole
from tests.integration.runs import TRAIN, records, shows_traceback, trained, write_model, write_spec
from tests.integration.test_killed import DYING
from tests.integration.test_preference import STEPS, write_dpo, write_pairs
from tests.launching import alone, forked
from tests.make import logps_of
from tests.specs import dims

ODD = TINY | dims(36, 41, 3, 6, 3, vocab_size=67, model_type="llama")
"""Blocks of 64 elements across rows, and a last one that is not full."""


MIXTURE = dims(40, 48, 3, 4, 2, vocab_size=67, model_type="qwen3_moe", head_dim=8)
MIXTURE |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
"""Each expert's matrices have fewer blocks than share a scale of scales."""

SMALL = dims(36, 41, 3, 4, 2, vocab_size=67, head_dim=8)
FAMILIES = {
    "qwen": SMALL | {"model_type": "qwen2"},  # its projections have biases
    "gemma": SMALL | {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 3},
    "whole": SMALL | {"model_type": "qwen2_5_vl", "hidden_size": 32},
}
"""Beside Llama and the mixture; "whole": the text model of a multimodal one."""


def write_odd(folder: Path, config: dict[str, Any], factor: float) -> None:
    """A model that is sure of its answers, so that pairs have a gradient too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if config["model_type"] in WHOLES:
            text = WHOLES[config["model_type"]]["text_config"] | config
            model = small_whole(config["model_type"], text_config=text).bfloat16()
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data *= factor if parameter.ndim > 1 else 1.0
    model.save_pretrained(folder, max_shard_size="10KB")


def write_saved(base: Path, folder: Path, dtype: torch.dtype) -> None:
    """The model in 4 bits, as transformers saves it."""
    form = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head", "model.layers.1.mlp.down_proj"],
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=form)
    model.save_pretrained(folder, max_shard_size="10KB")


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

ALWAYS: tuple[dict[str, Any], ...] = (
    {"zero": 1, "precision": "bf16", "checkpointing": True},
    {"zero": 3, "of": "saved", "task": "dpo", "live": True},
    {"zero": 3, "task": "dpo"},
    {"zero": 3, "of": "gemma", "dora": True, "packed": True, "checkpointing": True},
    {"zero": 3, "of": "whole", "packed": True},
    {"zero": 0, "stages": 2, "packed": True},
    {"zero": 1, "of": "qwen", "stages": 2, "task": "dpo", "live": True},
    {"zero": 2, "of": "mixture", "eager": True},
    {"zero": 3, "of": "mixture", "targets": ["experts", "q_proj"], "packed": True},
    {"zero": 2, "task": "reward", "packed": True},
    {"zero": 1, "stages": 2, "task": "distill"},
    {"zero": 1, "split": 2, "packed": True, "task": "distill"},  # the teacher's rows are split, too
    {"zero": 3, "of": "mixture", "split": 2, "checkpointing": True},
    {"zero": 3, "offload": True, "checkpointing": True},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"zero": 0, "packed": True},  # as in stages
    {"zero": 2, "of": "qwen", "dora": True},  # as Gemma, and Qwen in stages
    {"zero": 3, "of": "mixture", "packed": True, "checkpointing": True},  # as split rows
    {"zero": 1, "of": "mixture", "stages": 2},  # as without a mixture, and a whole run below
    {"zero": 1, "split": 2, "packed": True},  # as the mixture
    {"zero": 3, "precision": "bf16"},  # as under ZeRO 1
    {"zero": 2, "of": "saved"},  # as under ZeRO 3
    {"zero": 3, "packed": True, "checkpointing": True},  # as Gemma
    {"zero": 2, "task": "dpo", "live": True},  # as under ZeRO 3
    {"zero": 0, "of": "mixture", "packed": True},  # as without a mixture
    {"zero": 3, "of": "mixture", "task": "dpo", "live": True},  # as without a mixture
    {"zero": 1, "of": "gemma", "stages": 2},
    {"zero": 2, "of": "whole", "task": "dpo", "live": True},
    {"zero": 1, "checkpointing": True},
    {"zero": 2, "task": "dpo"},
    {"zero": 1, "stages": 2, "task": "dpo"},
    {"zero": 3, "of": "mixture", "precision": "bf16"},
    {"zero": 3, "split": 2, "task": "dpo"},  # as the mixture
    {"zero": 0, "of": "qwen", "split": 2, "dora": True},
    {"zero": 3, "of": "mixture", "offload": True},  # as without a mixture
    {"zero": 1, "of": "mixture", "task": "dpo", "checkpointing": True},
    # other tasks; the teacher of distillation is in 4 bits too
    *({"zero": 3, "task": task} for task in ("reward", "classify", "kto", "distill")),
    *({"zero": 1, "stages": 2, "task": task} for task in ("reward", "classify", "kto")),
    {"zero": 2, "task": "classify", "packed": True, "of": "qwen"},
    {"zero": 2, "task": "kto", "live": True},
    {"zero": 2, "task": "distill", "packed": True, "precision": "bf16"},
    {"zero": 3, "of": "mixture", "task": "reward", "packed": True},
)
COPIED: tuple[dict[str, Any], ...] = (  # on four ranks, of which each two have a copy of the parameters
    {"zero": 3, "hpz": 2, "of": "saved", "packed": True},
    {"zero": 3, "hpz": 2, "task": "dpo", "live": True},
    {"zero": 3, "hpz": 2, "task": "dpo"},
    {"zero": 3, "hpz": 2, "of": "mixture", "checkpointing": True},
)
ALONE: tuple[dict[str, Any], ...] = (  # a whole run of one rank is always tried below
    {"zero": 0},
    {"zero": 2, "packed": True},
    {"zero": 3},
    {"zero": 1, "precision": "bf16"},
    {"zero": 3, "precision": "bf16"},
    {"zero": 0, "task": "dpo", "live": True},
    {"zero": 3, "of": "mixture", "eager": True},
)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, ALWAYS),
        *(pytest.param(*more, marks=pytest.mark.long) for more in ((2, OTHERS), (4, COPIED), (1, ALONE))),
    ],
)
def test_adapters_on_4_bits_equal_a_plain_loop(
    ranks: int, cases: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    write_odd(tmp_path / "model", ODD, 4.0)
    write_odd(tmp_path / "mixture", MIXTURE, 8.0)
    for name, config in FAMILIES.items():
        write_odd(tmp_path / name, config, 4.0)
    write_saved(tmp_path / "qwen", tmp_path / "saved", torch.float32)
    worker = Path(__file__).with_name("quantize_worker.py")
    done = forked(worker, ranks, [str(tmp_path), json.dumps(cases)])
    check(done, cases, 1e-5)


def check(done: subprocess.CompletedProcess[str], cases: tuple[dict[str, Any], ...], bound: float) -> None:
    """bound: of the losses in fp32."""
    assert done.returncode == 0, done.stderr
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(found) == len(cases)
    for case in found:
        losses, gradients = (bound, 1e-5) if "precision" not in case["case"] else (5e-3, 0.1)
        assert case["losses"] <= losses and case["gradients"] <= gradients, case
        assert case["moved"] > 1e-4, case  # the adapters have learned, so A's gradients are not 0
        assert not case["other_weights"], case
        assert case["references"] <= 1e-5, case  # of its own engine, and of the policy without its adapter


ON_EXPERTS: tuple[dict[str, Any], ...] = tuple(
    {"of": "mixture", "quantize": None, "targets": ["experts", "o_proj"]} | more
    for more in (
        {"zero": 2, "task": "dpo"},
        {"zero": 3, "eager": True, "targets": ["gate_up_proj"]},
        {"zero": 1, "stages": 2, "task": "dpo", "live": True},
        {"zero": 0, "stages": 2, "packed": True, "targets": ["down_proj"]},
        # of two of five experts, bf16 chooses others for a few tokens, and a gradient is 0.20 off
        {"zero": 3, "of": "every", "packed": True, "precision": "bf16"},
        # as above
        {"zero": 0, "packed": True},
        {"zero": 1, "checkpointing": True},
        {"zero": 3, "packed": True, "checkpointing": True},
        {"zero": 3, "task": "dpo"},
    )
)


@pytest.mark.parametrize(
    "cases", [ON_EXPERTS[:5], pytest.param(ON_EXPERTS[5:], marks=pytest.mark.long)], ids=["some", "others"]
)
def test_adapters_on_experts_equal_a_plain_loop_over_pefts(
    cases: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    """Whose adapters are added to whole weights. A rank of 4 is computed expert by expert."""
    write_odd(tmp_path / "mixture", MIXTURE, 8.0)
    worker = Path(__file__).with_name("quantize_worker.py")
    write_odd(tmp_path / "every", MIXTURE | {"num_experts_per_tok": MIXTURE["num_experts"]}, 8.0)
    check(forked(worker, 2, [str(tmp_path), json.dumps(cases)]), cases, 1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_run_goes_on_in_another_layout_and_its_adapter_is_pefts(tmp_path: Path) -> None:
    """Killed in step 6 at ZeRO 2, and then in a pipeline while it saves step 8; it goes on from step 4 at
    ZeRO 3 on one rank."""
    from peft import PeftModel

    base = write_model(tmp_path / "base")
    words = [f"model={{name_or_path: {base}}}", "model.lora={rank: 4, alpha: 8}", "model.quantize=nf4"]
    words += ["model.quantize_skip=[model.layers.0.mlp.up_proj.weight]"]
    words += ["checkpoint.keep_last=null"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    trained(write_spec(whole), *words, "parallel.zero_stage=2")
    spec, run = str(write_spec(resumed)), resumed / "runs" / "small"
    kills = (("step", "1", "6"), "parallel.zero_stage=2"), (("part", "0", "8"), "parallel.pipeline_stages=2")
    for number, (kill, layout) in enumerate(kills):
        killed = forked(DYING, 2, [*kill, spec, *words, layout])
        output = killed.stdout + killed.stderr
        assert killed.returncode != 0 and ("going on from step 4" in output) is bool(number), output
    again = alone(TRAIN, [str(write_spec(resumed)), *words[:2], "parallel.zero_stage=3"])
    assert again.returncode == 76 and not shows_traceback(again.stderr)
    assert "model.quantize was 'nf4', now null" in " ".join(again.stderr.split())
    assert "going on from step 4" in trained(write_spec(resumed), *words, "parallel.zero_stage=3", nproc=1)
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert records(run, key) == pytest.approx(records(whole / "runs" / "small", key), rel=1e-4), key

    recorded = json.loads((run / "export" / "dsft_export.json").read_text())["quantization_config"]
    assert recorded["llm_int8_skip_modules"] == ["lm_head", "model.layers.0.mlp.up_proj"]
    card = (run / "export" / "README.md").read_text()
    assert "<br>trained on weights in 4 bits" in card and "\n- bnb_4bit_quant_type: `nf4`\n" in card
    form = BitsAndBytesConfig.from_dict(recorded)
    assert form.bnb_4bit_compute_dtype == torch.float32 and form.bnb_4bit_use_double_quant
    whole_model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=form)
    whole_model.train()  # in evaluation bitsandbytes packs weights again on some CPUs, which fails below 64
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = whole_model(ids).logits
        theirs = PeftModel.from_pretrained(whole_model, run / "export").train()(ids).logits
        lora = Lora(rank=4, alpha=8, path=str(run / "export"))
        model = Model(name_or_path=str(base), lora=lora, quantize="nf4")
        model = model.model_copy(update={"quantize_skip": ("model.layers.0.mlp.up_proj.weight",)})
        ours = build_model(model, TokenFacts(theirs.shape[-1], None, None, None), 0, torch.float32)
        targets = ids.roll(-1, 1)
        logps = logps_of(ours.eval(), ids, ids.clone(), targets)
        chat = load(run / "export", Sampling()).model(ids).logits
    assert (theirs - before).abs().max() > 0.1
    expected = theirs.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-4)
    chatted = chat.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(chatted, logps, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_experts_in_4_bits_of_a_run_that_goes_on_in_a_pipeline(tmp_path: Path) -> None:
    """Trained at ZeRO 3 on two ranks, and from step 8 on in two stages. The chat quantizes the same weights,
    and the merged export has the adapters added to their values, or to those of the files, as peft adds
    them."""
    from peft import PeftModel

    base = write_model(tmp_path / "base", **EXPERTS)
    words = [
        f"model={{name_or_path: {base}}}",
        "model.lora={rank: 4, alpha: 8, target_modules: [experts, q_proj]}",
        "model.quantize=nf4",
    ]
    words += ["model.quantize_skip=['*.0.mlp.experts.down_proj']", "checkpoint.keep_last=null"]
    trained(write_spec(tmp_path), *words, "parallel.zero_stage=3")
    run = tmp_path / "runs" / "small"
    losses = records(run, "train/loss")
    for later in ("checkpoints/step-10", "export"):
        shutil.rmtree(run / later)
    pipeline = ["parallel.pipeline_stages=2", "parallel.zero_stage=0"]
    assert "going on from step 8" in trained(write_spec(tmp_path), *words, *pipeline)
    assert records(run, "train/loss") == pytest.approx(losses, rel=1e-4)

    recorded = json.loads((run / "export" / "dsft_export.json").read_text())["quantization_config"]
    experts = [
        f"model.layers.{n}.mlp.experts.{own}" for n in range(2) for own in ("down_proj", "gate_up_proj")
    ]
    assert recorded["experts_in_4_bits"] == experts[1:] and recorded["llm_int8_skip_modules"] == ["lm_head"]
    ids = torch.arange(40)[None]
    lora = Lora(rank=4, alpha=8, path=str(run / "export"), target_modules=("experts", "q_proj"))
    model = Model(name_or_path=str(base), lora=lora, quantize="nf4")
    model = model.model_copy(update={"quantize_skip": ("*.0.mlp.experts.down_proj",)})
    with torch.no_grad():
        chat = load(run / "export", Sampling()).model
        logits = chat(ids).logits
        ours = build_model(model, TokenFacts(logits.shape[-1], None, None, None), 0, torch.float32)
        targets = ids.roll(-1, 1)
        logps = logps_of(ours.eval(), ids, ids.clone(), targets)
    chatted = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(chatted, logps, rtol=0, atol=1e-5)

    checkpoint = run / "checkpoints" / "step-10"
    export_checkpoint(checkpoint, tmp_path / "merged", dequantized=True)
    with torch.no_grad():
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits, logits, rtol=0, atol=1e-5
        )
    assert "its adapter merged into the dequantized weights" in (tmp_path / "merged/README.md").read_text()
    export_checkpoint(checkpoint, tmp_path / "merged", merged=True)
    merged, original = (AutoModelForCausalLM.from_pretrained(one) for one in (tmp_path / "merged", base))
    changed = {n for n, p in original.named_parameters() if not torch.equal(p, merged.get_parameter(n))}
    assert changed == {*experts, *(f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2))}
    merged.load_state_dict(original.state_dict())
    adapted = PeftModel.from_pretrained(merged, run / "export").merge_and_unload()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, exported(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_in_4_bits_is_trained_merged_and_answers(tmp_path: Path) -> None:
    from peft import PeftModel

    base = write_model(tmp_path / "base", hidden_size=64, intermediate_size=128)
    write_saved(base, tmp_path / "saved", dtype=torch.float32)
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "saved")
    words = [
        f"model={{name_or_path: {tmp_path / 'saved'}}}",
        "model.lora={rank: 4, alpha: 8, use_dora: true}",
    ]
    spec = write_spec(tmp_path)
    trained(spec, *words, "model.quantize=nf4", nproc=1)
    run, ids = tmp_path / "runs" / "small", torch.arange(40)[None]
    export_checkpoint(run / "checkpoints" / "step-10", tmp_path / "merged", merged=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").train()
    with torch.no_grad():
        before = plain(ids).logits
        theirs = PeftModel.from_pretrained(plain, run / "export").train()(ids).logits
        assert (theirs - before).abs().max() > 0.1
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        torch.testing.assert_close(merged, theirs, rtol=0, atol=1e-5)
        chat = load(run / "export", Sampling()).model(ids).logits
        torch.testing.assert_close(chat, theirs, rtol=0, atol=1e-5)
    refused = alone(TRAIN, [str(spec), *words])
    assert not shows_traceback(refused.stderr)
    assert "weights are in 4 bits (nf4); set model.quantize: nf4" in " ".join(refused.stderr.split())


def test_a_precomputed_reference_is_in_4_bits_too(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    write_pairs(base.parent / "pairs.jsonl")
    words = [
        "model.lora={rank: 4, alpha: 8}",
        "model.quantize=nf4",
        "train.max_steps=2",
        "checkpoint.every=null",
    ]
    trained(write_dpo(tmp_path, base), *words, nproc=1)
    run = tmp_path / "runs" / "preferred"
    assert records(run, "train/loss")[1] == pytest.approx(0.6931471805599453, abs=1e-6)
    assert records(run, "eval/rewards/margins")[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_the_text_model_of_a_multimodal_one_is_quantized_and_its_tower_is_not(tmp_path: Path) -> None:
    """Supervised, and then preferred over a reference that has the first adapter."""
    from peft import PeftModel

    tokenizer = byte_level_tokenizer()
    text = WHOLES["gemma3"]["text_config"] | {
        "vocab_size": num_ids(tokenizer),
        "max_position_embeddings": 256,
    }
    small_whole("gemma3", text_config=text).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    export = tmp_path / "runs" / "small" / "export"
    words = [f"model.name_or_path={tmp_path / 'base'}", "model.quantize=nf4"]
    first = [str(write_spec(tmp_path)), "model.from_config=null", "model.lora={rank: 4}", "train.max_steps=2"]
    done = alone(TRAIN, [*first, *words])
    assert done.returncode == 0, done.stdout + done.stderr
    write_pairs(export.parent / "pairs.jsonl")
    second = [str(write_dpo(tmp_path, export)), f"model.lora={{path: {export}}}", "data.packing=true"]
    done = alone(TRAIN, [*second, "checkpoint.every=null", *words])
    assert done.returncode == 0, done.stdout + done.stderr
    preferred = tmp_path / "runs" / "preferred"
    losses = records(preferred, "train/loss")
    assert losses[1] == pytest.approx(0.6931471805599453, abs=1e-5) and losses[STEPS] < losses[1]
    before, moved = (load_file(out / "adapter_model.safetensors") for out in (export, preferred / "export"))
    assert before.keys() == moved.keys() and not any(torch.equal(before[name], moved[name]) for name in moved)

    recorded = json.loads((export / "dsft_export.json").read_text())["quantization_config"]
    form = BitsAndBytesConfig.from_dict(recorded)
    whole = AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, quantization_config=form
    )
    kinds = {name: type(module).__name__ for name, module in whole.named_modules()}
    chosen = {name for name, kind in kinds.items() if kind == "Linear4bit"}
    assert chosen and all("language_model.layers." in name for name in chosen)
    chat = load(export, Sampling()).model
    ours = {plain_name(n) for n, module in chat.named_modules() if isinstance(module, QuantizedLinear)}
    assert ours == chosen
    ids = torch.arange(40)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(whole.train(), export).train()(ids).logits
        torch.testing.assert_close(chat(ids).logits, theirs, rtol=0, atol=1e-4)
