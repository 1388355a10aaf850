"""`dsft prove`: what is right is certified, in several modes, and each planted fault is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from dsft.data.render.renderer import Renderer
from dsft.data.render.template import named_template
from dsft.data.tokenizer.load import byte_level_tokenizer, num_ids
from dsft.errors import DsftError, SpecError
from dsft.model.config import resolve_config, token_facts
from dsft.plan import ds_config
from dsft.prove import command, runs, small
from dsft.prove.rows import expected_row
from dsft.prove.small import small_model
from dsft.spec.files import CHAT_TEMPLATES
from dsft.spec.schema import Model
from tests.architectures.cases import ARCHITECTURES
from tests.architectures.wholes import WHOLES, small_whole
from tests.integration import planted
from tests.integration.runs import TRAIN, dsft, write_model, write_spec
from tests.integration.test_preference import write_pairs
from tests.launching import alone, forked
from tests.specs import minimal_spec
from tests.unit.data.test_data_truth import conversation, with_specials

pytestmark = pytest.mark.filterwarnings("ignore")
PLANTED = Path(planted.__file__)
PACKED = ("parallel.zero_stage=2", "data.packing=true")
PAIRS = ("task=dpo", "data.eval=[]", "train.eval_every=null", "data.max_length=128")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    write_pairs(path)
    pairs = [
        json.loads(line) | {"margin": n % 4 - 1.5, "label": n % 2, "text": f"{line} {n % 5}"}
        for n, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return write_spec(tmp_path)


def proved(
    spec: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, fault: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the certificate. The ranks are forked, with the fault if there is one; of a
    fault that is not in the resume nothing is resumed."""

    def run(argv: Sequence[str], environ: Mapping[str, str], ranks: int, stdout: int) -> int:
        small = Path(argv[2])
        if small.stem == "again" and "resumed: weights" not in found_by(fault):
            shutil.copytree(small.with_name("run"), small.with_name("again"))
            return 0
        words = [fault, *argv[2:]] if fault else argv[2:]
        script = PLANTED if fault else TRAIN
        done = forked(script, ranks, words) if ranks > 1 else alone(script, words)
        assert done.returncode == 0 or STOPS in found_by(fault), done.stderr[-3000:]
        return done.returncode

    monkeypatch.setattr(runs, "run", run)
    if any("BASE" in one for one in overrides):
        write_model(spec.parent / "base", attention_dropout=0.3)
    for name, place in (("WHOLE", "whole"), ("BASE", "base"), ("HELD", "pairs.jsonl")):
        overrides = tuple(one.replace(name, str(spec.parent / place)) for one in overrides)
    if any(one.startswith("task=") for one in overrides) and "task=distill" not in overrides:
        overrides = (*overrides, f"data.train=[{{path: {spec.parent / 'pairs.jsonl'}}}]")
    code = command.prove(spec, overrides, None, as_json=False)
    found = json.loads((spec.parent / "runs" / "small-certificate.json").read_text(encoding="utf-8"))
    assert not list((spec.parent / "runs").glob("prove-*")), "the folder of the runs is removed"
    return code, found


def failing(certificate: Mapping[str, Any]) -> set[str]:
    """Return the first words of the checks that do not hold."""
    names = {one["what"].partition(",")[0] for one in certificate["checks"] if not one["holds"]}
    return names | ({"masks"} if certificate["masks"]["different"] else set())


MIXTURE = "model.from_config={model_type: qwen3_moe, num_experts: 8, num_experts_per_tok: 2, vocab_size: 512}"
HELD_OUT = "data.eval=[{path: HELD, max_rows: 4, name: one}, {path: HELD, max_rows: 9, name: other}]"
MODES: dict[str, tuple[str, ...]] = {
    "packed": PACKED,
    "dpo": (*PAIRS, "parallel.zero_stage=3", "parallel.offload_optimizer.device=cpu"),
    "lora": ("model.lora={rank: 4}", "parallel.pipeline_stages=2"),
    "split": ("parallel={sequence_parallel: 2, zero_stage: 3}", "train.label_smoothing=0.1"),
    "bf16": ("train.precision=bf16", "optim={name: sgd, learning_rate: 0.01, weight_decay: 0.01}"),
    "reward": (*PAIRS[1:], "task=reward", "data.packing=true"),
    "orpo": (*PAIRS, "dpo.loss_type=orpo", "parallel.zero_stage=0"),
    "ipo": (*PAIRS, "dpo={loss_type: ipo, sft_weight: 0.5}", "train.precision=bf16"),
    "frozen": (
        "model.trainable=['*layers.1.*']",
        "parallel={zero_stage: 3, zero_hpz_partition_size: 8}",
    ),
    "dora": (*PAIRS, "model.lora={rank: 4, use_dora: true, modules_to_save: [lm_head]}"),
    "mixture": (MIXTURE, "model.lora={rank: 4}", "parallel.zero_stage=3"),
    "experts": (MIXTURE, "model.lora={rank: 4, target_modules: [q_proj, experts]}", "parallel.zero_stage=3"),
    "kto": (*PAIRS[1:], "task=kto", "kto.undesirable_weight=0.5", HELD_OUT, "parallel.zero_stage=2"),
    "kto-bf16": (*PAIRS[1:], "task=kto", "data.packing=true", "model.lora={rank: 4}", "train.precision=bf16"),
    "classify": (
        *PAIRS[1:],
        "task=classify",
        "classify.labels=[even, odd]",
        HELD_OUT,
        "parallel.zero_stage=3",
    ),
    "distill": (
        "task=distill",
        "distill={reference_model: BASE, reference_quantize: nf4, top_k: 8, temperature: 2}",
    ),
    "jsd": ("task=distill", "distill={reference_model: BASE, reference: live, loss_type: jsd}", *PACKED),
    "nf4": ("model={name_or_path: BASE, quantize: nf4, lora: {rank: 4}}", "parallel.zero_stage=2"),
    "fp4": (*PAIRS, "model={name_or_path: BASE, quantize: fp4, lora: {rank: 4}}", "train.precision=bf16"),
    "balance": (MIXTURE, "model.experts={balance: global_batch, balance_weight: 0.01}", *PACKED),
    "balanced-pairs": (*PAIRS, MIXTURE, "model.experts={balance: sequence, balance_weight: 0.1}"),
    "muon": ("optim={name: muon, learning_rate: 1.0e-3, weight_decay: 0.1}", "parallel.zero_stage=2"),
    "adamw_8bit": ("optim.name=adamw_8bit", "parallel.zero_stage=2"),
    "groups": (
        MIXTURE,
        "model.experts.freeze_router=true",
        "optim.groups=[{parameters: '*.0.*', learning_rate: 1e-4, weight_decay: 0.1}]",
    ),
    "reference": (*PAIRS, "dpo.reference_model=BASE", "model.from_config.attention_dropout=0.3", HELD_OUT),
    "multimodal": ("model={name_or_path: WHOLE}", "parallel.zero_stage=2"),
}
ALWAYS = ("dpo", "lora", "kto", "distill", "nf4")
"""Packed rows are certified by `test_the_command`."""


@pytest.mark.parametrize(
    "mode", [one if one in ALWAYS else pytest.param(one, marks=pytest.mark.long) for one in MODES]
)
def test_a_mode_is_certified(
    mode: str, spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if mode == "multimodal":
        tokenizer = byte_level_tokenizer()
        text = WHOLES["gemma3"]["text_config"] | {
            "vocab_size": num_ids(tokenizer),
            "max_position_embeddings": 256,
        }
        small_whole("gemma3", text_config=text).save_pretrained(spec.parent / "whole")
        tokenizer.save_pretrained(spec.parent / "whole")
    code, certificate = proved(spec, monkeypatch, *MODES[mode])
    assert (code, failing(certificate)) == (0, set()), capsys.readouterr().out
    figures = [one["found"] for one in certificate["checks"] if one["found"] is not None]
    assert len(set(figures)) >= 6, "the steps differ from each other"
    assert mode in ("reward", "classify") or certificate["masks"]["compared"] >= 10
    assert "hold" in capsys.readouterr().out
    assert mode != "distill" or "reference in nf4" in certificate["mode"]
    assert mode != "frozen" or "copy of the parameters on each 2 processes, 4 proc" in certificate["mode"]


STOPS = "stops"  # dsft's own checks end the run
WHOLE_STEP = {"loss", "gradient norm", "weights"}
ABSOLUTE = "model={from_config: {model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 512}}"
FAULTS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "mean_over_ranks": ({"gradient norm"}, ()),
    "mask_off_by_one": (WHOLE_STEP, ()),
    "no_end_of_turn": ({"masks"}, ()),
    "mean_of_micro_batches": (WHOLE_STEP, PACKED),
    "rate_one_step_early": ({"loss", "weights"}, ()),
    "packing_leak": (WHOLE_STEP, PACKED),
    "positions_run_on": (WHOLE_STEP, (ABSOLUTE, *PACKED)),
    "tie_of_one_stage": (
        {STOPS},
        ("model.from_config.tie_word_embeddings=true", "parallel.pipeline_stages=2"),
    ),
    "reference_with_dropout": (WHOLE_STEP, (*PAIRS, "dpo.reference_model=BASE")),
    "beta_squared": ({"gradient norm"}, PAIRS),
    "decay_of_norms": ({"weights"}, ()),
    "mean_of_set_means": ({"held-out loss"}, (*PAIRS, HELD_OUT)),
    "smoothing_in_evaluation": ({"held-out loss"}, ("train.label_smoothing=0.1",)),
    "ipo_by_tokens_of_both": (WHOLE_STEP, (*PAIRS, "dpo.loss_type=ipo")),
    "moments_are_lost": ({"resumed: weights"}, ()),
    "shards_out_of_order": ({"loss", "weights"}, ("parallel.zero_stage=3",)),
}
"""The faults of `planted.py`: the lines that find each, and the mode."""


def found_by(fault: str | None) -> set[str]:
    return FAULTS[fault][0] if fault else {"resumed: weights"}


QUICK = {"mean_of_micro_batches", "no_end_of_turn", "decay_of_norms", "mean_of_set_means", "moments_are_lost"}
"""One for each kind of line."""


@pytest.mark.long
def test_in_bf16_a_fault_below_its_rounding_is_found_by_the_run_in_fp32(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("train.precision=bf16", "parallel.zero_stage=2")
    code, certificate = proved(spec, monkeypatch, *keys, fault="decay_of_norms")
    assert (code, failing(certificate)) == (1, {"in fp32: weights"})


@pytest.mark.parametrize(
    "fault", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in FAULTS]
)
def test_a_planted_fault_is_found(fault: str, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "no_end_of_turn":
        monkeypatch.setattr(planted.masks.MaskBuilder, "mask", planted.masks.MaskBuilder.mask)
        planted.no_end_of_turn()
    lines, overrides = FAULTS[fault]
    if STOPS in lines:
        with pytest.raises(DsftError, match="nothing is proved"):
            proved(spec, monkeypatch, *overrides, fault=fault)
        return
    code, certificate = proved(spec, monkeypatch, *overrides, fault=fault)
    assert code == 1 and lines <= failing(certificate), failing(certificate)
    if fault == "shards_out_of_order":  # this model's layers are whole at the threshold of the real size
        monkeypatch.setattr(small, "PERSIST_BELOW", ds_config.PERSIST_BELOW)
        assert proved(spec, monkeypatch, *overrides, fault=fault)[0] == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["train.precision=fp16"], "train.precision: dsft prove does not know fp16 yet"),
        ([MIXTURE, "model.lora={target_modules: [experts], use_dora: true}"], "experts cannot have use_dora"),
        (["optim.lr=1"], "optim.lr"),
    ],
)
def test_what_cannot_be_proved(keys: list[str], message: str, spec: Path) -> None:
    with pytest.raises(SpecError, match=message):
        command.prove(spec, keys, None, as_json=False)


def test_a_run_that_fails_ends_with_its_exit_code(
    spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runs, "run", lambda *_: 69)
    with pytest.raises(DsftError, match="nothing is proved") as raised:
        command.prove(spec, (), None, as_json=False)
    assert raised.value.exit_code == 69
    assert not (tmp_path / "runs" / "small-certificate.json").exists()


def test_each_architecture_at_its_real_size_gets_a_small_model() -> None:
    """But those that transformers cannot build with the defaults of their own config."""
    refused = {}
    for kind in ARCHITECTURES:
        config = CONFIG_MAPPING[kind]()
        config.vocab_size, config.pad_token_id = 512, None
        if hasattr(config, "vocab_size_per_layer_input"):
            config.vocab_size_per_layer_input = 512
        try:
            model = small_model(config, stages=2)
        except SpecError as error:
            refused[kind] = str(error)
        else:
            assert model.config.num_hidden_layers >= 4, kind
            assert sum(one.numel() for one in model.parameters()) < 2e7, kind
    assert refused.keys() == {"cohere_compass_text", "deepseek_v2", "dots1", "nemotron"}, refused


def test_a_text_model_that_transformers_has_only_inside_a_multimodal_one_is_refused(tmp_path: Path) -> None:
    small_whole("qwen2_5_vl").config.save_pretrained(tmp_path)
    config = resolve_config(Model(name_or_path=str(tmp_path)), token_facts(byte_level_tokenizer()))
    with pytest.raises(SpecError, match="only inside a multimodal one"):
        small_model(config, 1)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_masks_by_prefixes_are_those_of_the_renderer(name: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = named_template(name)
    with_specials(tokenizer, tokenizer.chat_template, "<s>")
    for case in ("single", "talk", "system"):
        for train_on in ("assistant", "last"):
            sample, _ = conversation(case, "")
            data = minimal_spec("sft", data={"train_on": train_on}).data
            (rendered,) = Renderer(tokenizer, None, data.train_on).render([sample])
            assert not isinstance(rendered, str)
            expected = expected_row(sample, tokenizer, data)
            assert (rendered.input_ids.tolist(), rendered.trained.tolist()) == expected, (case, train_on)
    no_prompt = replace(sample, messages=({"role": "assistant", "content": "a"},))
    assert isinstance(expected_row(no_prompt, tokenizer, data), str), "the row is not compared"


def test_the_command(spec: Path) -> None:
    """Nothing but the JSON is on standard output."""
    done = dsft("--fork", "prove", str(spec), *PACKED, "--processes", "1", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["holds"] and found["mode"] == "sft, fp32, ZeRO 2, packed, 1 process"
    assert found["resumed_in"].endswith("1 process") and found["versions"]["torch"]
