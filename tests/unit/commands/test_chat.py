"""`dsft chat` with a tiny model of random weights: what is answered does not matter, only how."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dsft.commands.chat import ChatModel, Sampling, converse, load
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import MissingInputError
from tests.unit.conftest import Dsft

GREEDY = Sampling(temperature=0.0, max_new_tokens=8)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "export"
    tokenizer = byte_level_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def talker(export: Path) -> ChatModel:
    return load(export, GREEDY)


class Recorder:
    """Answers with what it was asked; keeps the conversations."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []

    def answer(self, messages: list[dict[str, str]], write: Any) -> str:
        self.asked.append([dict(message) for message in messages])
        write("one\ntwo")
        return "one\ntwo"


def talk(lines: list[str], system: str | None = None, one_line: bool = False) -> tuple[Recorder, str]:
    talker: Any = Recorder()
    written: list[str] = []
    converse(talker, lines, system, written.append, one_line=one_line)
    return talker, "".join(written)


def test_turns_add_up_until_they_are_reset() -> None:
    talker, _ = talk(["a", "", "b", "/reset", "c", "/system be short", "d", "/exit", "e"], system="s")
    found = [[f"{m['role']}:{m['content']}" for m in messages] for messages in talker.asked]
    answer = "assistant:one\ntwo"
    assert found == [
        ["system:s", "user:a"],
        ["system:s", "user:a", answer, "user:b"],
        ["system:s", "user:c"],
        ["system:be short", "user:d"],
    ]


def test_an_answer_is_one_line_for_a_pipe_and_as_it_is_for_a_terminal() -> None:
    assert talk(["a", "b"], one_line=True)[1] == "one\\ntwo\none\\ntwo\n"
    assert talk(["a"])[1] == "one\ntwo\n"


def test_an_unknown_command_is_not_sent_to_the_model() -> None:
    talker, written = talk(["/foo"])
    assert not talker.asked and written.startswith("/foo is not a command; /reset")


def test_greedy_answers_equal_generate_and_come_in_pieces(talker: ChatModel) -> None:
    messages = [{"role": "user", "content": "hello"}]
    pieces: list[str] = []
    answer = talker.answer(messages, pieces.append)
    inputs = talker.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    size = inputs["input_ids"].shape[1]
    ids = talker.model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, size:]
    whole = talker.tokenizer.decode(ids, skip_special_tokens=True)
    assert answer == "".join(c for c in whole if c.isprintable() or c in "\n\t")
    assert "".join(pieces) == answer


@pytest.mark.parametrize(("written", "interrupted", "answer"), [
    (b"hi", True, "hi"),  # Ctrl-C ends the answer, and not the conversation
    (b"a\x1b[2Jb\n", False, "a[2Jb\n"),  # what steers a terminal is left out
])  # fmt: skip
def test_answers_as_they_come(
    talker: ChatModel, monkeypatch: Any, written: bytes, interrupted: bool, answer: str
) -> None:
    def generate(streamer: Any, **_: Any) -> None:
        streamer.put(torch.tensor([[1]]))
        for byte in written:
            streamer.put(torch.tensor([byte]))
        if interrupted:
            raise KeyboardInterrupt
        streamer.end()

    monkeypatch.setattr(talker.model, "generate", generate)
    assert talker.answer([{"role": "user", "content": "x"}], lambda piece: None) == answer


def test_a_turn_that_fills_the_model_is_refused_and_dropped(talker: ChatModel) -> None:
    written: list[str] = []
    converse(talker, ["x" * 200, "hi"], None, written.append, one_line=True)
    lines = "".join(written).split("\n")
    assert lines[0].startswith("error: The conversation has 2") and "128 positions" in lines[0]
    assert len(lines) == 3 and not lines[1].startswith("error")


def test_an_endless_template_is_refused_and_does_not_hang(export: Path, tmp_path: Path) -> None:
    folder = copied(export, tmp_path / "loop", "config.json")
    (folder / "chat_template.jinja").write_text("{{ 'A' * 5000000000 }}")
    written: list[str] = []
    converse(load(folder, GREEDY), ["hi"], None, written.append, one_line=True)
    assert "".join(written).startswith(
        "error: The conversation cannot be rendered: the chat template of the tok"
    )


def test_folders_that_cannot_be_talked_to(export: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="neither a folder with an export"):
        load(tmp_path / "nothing", GREEDY)
    with pytest.raises(MissingInputError, match="neither config.json nor adapter_config.json"):
        load(tmp_path, GREEDY)
    (tmp_path / "config.json").write_bytes((export / "config.json").read_bytes())
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(MissingInputError, match="has no chat template"):
        load(tmp_path, GREEDY)


def test_folders_whose_files_are_torn(export: Path, tmp_path: Path) -> None:
    for file in export.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 99 if file.suffix == ".safetensors" else None])
    with pytest.raises(MissingInputError, match=r"has no readable weights \(.*header"):
        load(tmp_path, GREEDY)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(MissingInputError, match="has no base_model_name_or_path"):
        load(tmp_path, GREEDY)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "runs/elsewhere/export"}')
    with pytest.raises(MissingInputError, match="is an adapter of runs/elsewhere/export, which cannot be"):
        load(tmp_path, GREEDY)


def copied(export: Path, folder: Path, file: str, **keys: Any) -> Path:
    """The export once more, with other keys in one of its JSON files."""
    shutil.copytree(export, folder)
    found = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(found | keys))
    return folder


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
def test_code_in_the_folder_is_never_run_whatever_is_typed(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """transformers asks whether to run such code, and would take a line of the conversation as the answer."""
    asked: list[Any] = []
    monkeypatch.setattr("builtins.input", lambda *words: asked.append(words) or "yes")
    code = {"AutoTokenizer": [None, "evil.EvilTokenizer"], "AutoConfig": "evil.EvilConfig"}
    folder = copied(export, tmp_path / "evil", file, auto_map=code, tokenizer_class="EvilTokenizer")
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    with contextlib.suppress(MissingInputError):  # or it is read as what transformers itself knows
        load(folder, GREEDY)
    assert not asked and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
@pytest.mark.parametrize("kernel", ["org/kernel", {"": "org/kernel@main:one"}])
def test_a_kernel_of_the_hub_is_refused(export: Path, tmp_path: Path, key: str, kernel: Any) -> None:
    folder = copied(export, tmp_path / "kernel", "config.json", **{key: kernel})
    with pytest.raises(MissingInputError, match=rf"{key}.* in config.json names the kernel 'org/kernel.*hub"):
        load(folder, GREEDY)


def test_another_choice_of_kernels_is_left_to_this_machine(export: Path, tmp_path: Path) -> None:
    """flash_attention_2 is a kernel of the hub for transformers, where flash-attn is not installed."""
    folder = copied(export, tmp_path / "flash", "config.json", _attn_implementation="flash_attention_2")
    assert load(folder, GREEDY).model.config._attn_implementation == "sdpa"


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Path.touch, (Path("ran"),)


def test_a_pickle_that_would_run_code_is_refused_in_a_sentence(export: Path, tmp_path: Path) -> None:
    folder = copied(export, tmp_path / "pickle", "config.json")
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload()}, folder / "pytorch_model.bin")
    with pytest.raises(
        MissingInputError, match=r"no readable weights \(its weights are a damaged pickle, or one with more"
    ):
        load(folder, GREEDY)


@pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft's get_peft_model asks for it
def test_an_adapter_takes_its_base_model(export: Path, tmp_path: Path) -> None:
    import peft

    base = LlamaForCausalLM.from_pretrained(export)
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, base_model_name_or_path=str(export)
    )
    adapted = peft.get_peft_model(base, config)
    adapted.peft_config["default"].base_model_name_or_path = str(export)
    adapted.save_pretrained(str(tmp_path))
    byte_level_tokenizer().save_pretrained(tmp_path)
    ids = torch.arange(10)[None]
    expected = adapted(ids).logits
    assert torch.allclose(load(tmp_path, GREEDY).model(ids).logits, expected, atol=1e-5)
    assert not torch.allclose(load(export, GREEDY).model(ids).logits, expected, atol=1e-3)


def write_adapter(export: Path, folder: Path, quantization: object) -> None:
    """Write an adapter of `export` without weights, whose dsft_export.json has this quantization_config."""
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(export)}))
    (folder / "dsft_export.json").write_text(json.dumps({"quantization_config": quantization}))


def test_adapter_without_weights_is_refused_without_asking_the_hub(export: Path, tmp_path: Path) -> None:
    write_adapter(export, tmp_path, None)
    with pytest.raises(MissingInputError, match=r"has no adapter_model\.safetensors; export it again"):
        load(tmp_path, GREEDY)


@pytest.mark.parametrize(
    "changed",
    [
        "nf4", [1, 2], 5, {"bnb_4bit_quant_type": "int9"}, {"bnb_4bit_quant_type": ["nf4"]},
        {"bnb_4bit_compute_dtype": "nn"}, {"bnb_4bit_compute_dtype": "int8"}, {"bnb_4bit_compute_dtype": 7},
        {"llm_int8_skip_modules": None}, {"llm_int8_skip_modules": 7}, {"experts_in_4_bits": 7},
    ],
)  # fmt: skip
def test_quantization_config_that_dsft_does_not_write_is_named(
    changed: Any, export: Path, tmp_path: Path
) -> None:
    written = {
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32", "llm_int8_skip_modules": []
    }  # fmt: skip
    write_adapter(export, tmp_path, written | changed if isinstance(changed, dict) else changed)
    with pytest.raises(MissingInputError, match=r"dsft_export\.json: quantization_config is not as dsft"):
        load(tmp_path, GREEDY)


def test_the_command_answers_a_pipe_line_by_line(export: Path, dsft: Dsft) -> None:
    words = ("chat", str(export), "--seed", "3", "--max-new-tokens", "4")
    code, out, err = dsft(*words, typed="hi\n/reset\nyou\n/exit\nnever\n")
    assert code == 0, err
    assert out.count("\n") == 2


@pytest.mark.parametrize(("file", "keys", "reason"), [
    ("config.json", {"tie_word_embeddings": "x"}, "Field 'tie_word_embeddings' expected bool, got str"),
    ("config.json", {"intermediate_size": "a\nb"}, "Field 'intermediate_size' expected int, got str"),
    ("config.json", {"eos_token_id": "…"}, "Field 'eos_token_id' with value '…' doesn't match any type"),
    ("config.json", {"dtype": "__import__"}, "has no attribute '__import__'"),
    ("config.json", {"hidden_act": "\x1b[2J"}, r"\x1b[2J"),
    ("tokenizer_config.json", {"tokenizer_class": 5}, "no tokenizer that transformers can read"),
    ("tokenizer_config.json", {"eos_token": 5}, "no tokenizer that transformers can read"),
])  # fmt: skip
def test_odd_values_in_a_folder_are_one_sentence(
    export: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], file: str, keys: Any, reason: str
) -> None:
    folder = copied(export, tmp_path / "odd", file, **keys)
    with pytest.raises(MissingInputError) as raised:
        load(folder, GREEDY)
    assert reason in str(raised.value) and str(raised.value).isprintable()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_weights_that_are_not_the_configs_are_refused_by_name(
    export: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would print a table, and give missing tensors random values."""
    folder = copied(export, tmp_path / "wide", "config.json", intermediate_size=48)
    with pytest.raises(
        MissingInputError, match=r"mlp.down_proj.weight has shape \[16, 32\] instead of \[16, 48\]"
    ):
        load(folder, GREEDY)
    folder = copied(export, tmp_path / "deep", "config.json", num_hidden_layers=2)
    with pytest.raises(MissingInputError, match=r"model\.layers\.1\.input_layernorm\.weight is missing"):
        load(folder, GREEDY)
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


def test_only_regular_files_of_a_folder_are_read(export: Path, tmp_path: Path) -> None:
    folder = copied(export, tmp_path / "pipe", "config.json")
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(MissingInputError, match=r"tokenizer\.json is a named pipe, not a file"):
        load(folder, GREEDY)
    (folder / "tokenizer.json").unlink()
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(MissingInputError, match=r"tokenizer\.json is larger than 268,435,456 bytes"):
        load(folder, GREEDY)
    folder = copied(export, tmp_path / "linked", "config.json")
    (folder / "model.safetensors").rename(tmp_path / "secret")
    (folder / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(MissingInputError, match=r"model\.safetensors is a link to .*, outside of the folder"):
        load(folder, GREEDY)
