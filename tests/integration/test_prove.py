"""`dsft prove`: what is right is certified, in several modes, and each planted fault is found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from dsft.data.render.renderer import Renderer
from dsft.data.render.template import named_template
from dsft.data.tokenizer.load import byte_level_tokenizer, num_ids
from dsft.errors import DsftError, SpecError
from dsft.prove import command, runs
from dsft.prove.rows import expected_row
from dsft.prove.small import small_model
from dsft.spec.files import CHAT_TEMPLATES
from tests.architectures.cases import ARCHITECTURES
from tests.architectures.wholes import WHOLES, small_whole
from tests.integration import planted
from tests.integration.runs import TRAIN, dsft, write_spec
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
        json.loads(line) | {"margin": n % 4 - 1.5} for n, line in enumerate(path.read_text().splitlines())
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return write_spec(tmp_path)


def proved(
    spec: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, fault: str | None = None
) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the certificate. The ranks are forked, with the fault if there is one."""

    def run(argv: Sequence[str], environ: Mapping[str, str], ranks: int, stdout: int) -> int:
        words = [fault, *argv[2:]] if fault else argv[2:]
        script = PLANTED if fault else TRAIN
        done = forked(script, ranks, words) if ranks > 1 else alone(script, words)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.returncode

    monkeypatch.setattr(runs, "run", run)
    if any(one.startswith("task=") for one in overrides):
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
MODES: dict[str, tuple[str, ...]] = {
    "packed": PACKED,
    "dpo": (*PAIRS, "parallel.zero_stage=3", "parallel.offload_optimizer.device=cpu"),
    "lora": ("model.lora={rank: 4}", "parallel.pipeline_stages=2"),
    "split": ("parallel={sequence_parallel: 2, zero_stage: 3}", "train.label_smoothing=0.1"),
    "bf16": ("train.precision=bf16", "optim={name: sgd, learning_rate: 0.01, weight_decay: 0.01}"),
    "reward": (*PAIRS[1:], "task=reward", "data.packing=true"),
    "orpo": (*PAIRS, "dpo.loss_type=orpo", "parallel.zero_stage=0"),
    "ipo": (*PAIRS, "dpo={loss_type: ipo, sft_weight: 0.5}", "train.precision=bf16"),
    "frozen": ("model.trainable=['*layers.1.*']", "parallel.zero_stage=3"),
    "dora": (*PAIRS, "model.lora={rank: 4, use_dora: true, modules_to_save: [lm_head]}"),
    "mixture": (MIXTURE, "model.lora={rank: 4}", "parallel.zero_stage=3"),
    "multimodal": ("model={name_or_path: WHOLE}", "parallel.zero_stage=2"),
}
ALWAYS = ("packed", "dpo", "lora")


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
    keys = [one.replace("WHOLE", str(spec.parent / "whole")) for one in MODES[mode]]
    code, certificate = proved(spec, monkeypatch, *keys)
    assert (code, failing(certificate)) == (0, set())
    assert len(certificate["checks"]) == (20 if "bf16" in "".join(keys) else 12)
    figures = [one["found"] for one in certificate["checks"] if one["found"] is not None]
    assert len(set(figures)) >= 6, "the steps differ from each other"
    assert mode == "reward" or certificate["masks"]["compared"] >= 10
    assert "hold" in capsys.readouterr().out


WHOLE_STEP = {"loss", "gradient norm", "weights"}
FAULTS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "mean_of_micro_batches": (WHOLE_STEP, PACKED),
    "mask_off_by_one": (WHOLE_STEP, ()),
    "packing_leak": (WHOLE_STEP, PACKED),
    "rate_one_step_early": ({"loss", "weights"}, ()),
    "beta_squared": ({"gradient norm"}, PAIRS),
    "decay_of_norms": ({"weights"}, ()),
    "no_end_of_turn": ({"masks"}, ()),
    "moments_are_lost": ({"resumed: weights"}, ()),
}


@pytest.mark.long
def test_in_bf16_a_fault_below_its_rounding_is_found_by_the_run_in_fp32(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("train.precision=bf16", "parallel.zero_stage=2")
    code, certificate = proved(spec, monkeypatch, *keys, fault="decay_of_norms")
    assert (code, failing(certificate)) == (1, {"in fp32: weights"})


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found_by, overrides = FAULTS[fault]
    if fault == "no_end_of_turn":
        monkeypatch.setattr(planted.masks.MaskBuilder, "mask", planted.masks.MaskBuilder.mask)
        planted.no_end_of_turn()
    code, certificate = proved(spec, monkeypatch, *overrides, fault=fault)
    assert code == 1 and found_by <= failing(certificate), failing(certificate)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["optim.name=muon"], "optim.name: dsft prove does not know 'muon' yet"),
        ([MIXTURE, "model.lora={target_modules: [experts]}"], "model.lora: peft cannot make these adapters"),
        (
            [
                "task=kto",
                "data={train: [{path: builtin:quickstart-pairs}], max_length: 256}",
                "train.eval_every=null",
            ],
            "task: dsft prove does not know 'kto' yet",
        ),
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


def test_the_command(spec: Path) -> None:
    """With real processes, and nothing but the JSON on standard output."""
    done = dsft("prove", str(spec), *PACKED, "--processes", "1", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["holds"] and found["mode"] == "sft, fp32, ZeRO 2, packed, 1 process"
    assert found["resumed_in"].endswith("1 process") and found["versions"]["torch"]
