"""Exports in programs that nobody here wrote: peft, llama.cpp and lm-evaluation-harness answer as dsft does.

The last two are installed from the package registry, into an environment of their own beside the project's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from dsft.checkpoint.export import export_checkpoint
from dsft.commands.answer import answer
from dsft.commands.chat import Sampling
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.data.tokenizer.training import TokenizerOptions, train_tokenizer
from dsft.spec.schema import Model, Source
from tests.integration.runs import edit_json
from tests.launching import LATE, ROOT
from tests.unit.checkpoint.conftest import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
NEW = 24  # tokens of an answer
DIMS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
LIKE_PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}
"""Keys that llama.cpp takes to be as in the published models."""
TARGETS = {"mixtral": ("q_proj", "v_proj", "experts"), "qwen3_moe": ("q_proj", "o_proj", "experts")}
QUESTIONS = ("Hello, how are you?", "  Two spaces\n\tand a line", "Zahl 1234, Straße, naïve — 你好 🙂")


def adapted(kind: str, tokenizer: Any, folder: Path) -> Path:
    """Write a small model of this type, and what an adapter over it is exported as: `base`, `adapter` and
    `merged`. Return the folder."""
    torch.manual_seed(1)
    ends = {f"{one}_token_id": getattr(tokenizer, f"{one}_token_id") for one in ("bos", "eos", "pad")}
    keys: dict[str, Any] = {"vocab_size": len(tokenizer), **ends, **DIMS, **LIKE_PUBLISHED.get(kind, {})}
    config = CONFIG_MAPPING[kind](**keys)
    model = AutoModelForCausalLM.from_config(config)
    for norm in (parameter.data for parameter in model.parameters() if parameter.ndim == 1):
        norm.normal_(std=2.0)  # or a Gemma, whose embedding is its head, repeats the last token
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    if (file := Path(getattr(tokenizer, "vocab_file", None) or "")).is_file():
        (folder / "base" / file.name).write_bytes(file.read_bytes())
    lora = {"rank": 8, "target_modules": TARGETS.get(kind, "all-linear")}
    held, _ = make_checkpoint(
        Model.model_validate({"name_or_path": str(folder / "base"), "lora": lora}), folder / "run"
    )
    export_checkpoint(held.path, folder / "adapter")
    export_checkpoint(held.path, folder / "merged", merged=True)
    return folder


def greedy(model: Any, tokenizer: Any, question: str) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and those that transformers answers."""
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], **options)
    ids = model.eval().generate(**prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
    size = prompt["input_ids"].shape[1]
    return ids[:size], ids[size:]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "mixtral", "qwen3_moe"])
def test_peft_and_transformers_answer_as_dsft(kind: str, tmp_path: Path) -> None:
    folder = adapted(kind, byte_level_tokenizer(), tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    tokenizer = AutoTokenizer.from_pretrained(folder / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    before = [greedy(base, tokenizer, text)[1] for text in QUESTIONS]
    models = {
        "adapter": PeftModel.from_pretrained(base, folder / "adapter"),
        "merged": AutoModelForCausalLM.from_pretrained(folder / "merged"),
    }
    for name, model in models.items():
        found = [greedy(model, tokenizer, text)[1] for text in QUESTIONS]
        assert found != before and len(set(sum(found, []))) > 8, "equal answers are no chance"
        out = tmp_path / f"{name}.jsonl"
        answer(folder / name, Source(path=str(rows)), out, Sampling(0.0, 1.0, NEW, 0), None, 2, 1)
        ours = [json.loads(line)["answer"] for line in out.read_text().splitlines()]
        assert ours == [tokenizer.decode(ids, skip_special_tokens=True) for ids in found], name


def installed(folder: Path, *packages: str, **environ: str) -> Path:
    """Return the Python of an environment with these packages beside those of the project's own."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (own / "project.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *packages]
    subprocess.run(pip, check=True, timeout=3 * LATE, env=os.environ | environ)
    return python


LLAMA_CPP = "llama-cpp-python==0.3.36"
CONVERT = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from conversion.base import TextModel
if words := sys.argv.pop(1):
    TextModel.get_vocab_base_pre = lambda self, tokenizer: words
import convert_hf_to_gguf
convert_hf_to_gguf.main()
"""
"""python -c CONVERT FOLDER WORDS …: llama.cpp's converter. WORDS: its name for how texts are split,
"" where it finds that by itself."""
CONVERTED = (
    ("llama", "bpe", ""), ("gemma2", "bpe", ""),
    ("llama", "byte_bpe", "dbrx"), ("qwen3", "byte_bpe", "dbrx"), ("qwen3_moe", "byte_bpe", "dbrx"),
)  # fmt: skip
"""Model, tokenizer, and WORDS."""


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a Python with llama-cpp-python, which takes ten minutes of a core to build, and the folder of
    llama.cpp, with the converter, from the same package's source."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    python = installed(folder / "venv", "--no-deps", LLAMA_CPP, "diskcache", CMAKE_ARGS="-DLLAVA_BUILD=OFF")
    name = LLAMA_CPP.split("=")[0]
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", name, LLAMA_CPP]
    subprocess.run([*pip, "-d", str(folder)], check=True, timeout=LATE)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    [source] = folder.glob("*/vendor/llama.cpp")
    return python, source


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tokenizers that `dsft tokenizer train` made of the project's pages."""
    folder = tmp_path_factory.mktemp("tokenizers")
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    (folder / "pages.txt").write_text("\n".join(pages), encoding="utf-8")
    for kind in ("bpe", "byte_bpe"):
        options = TokenizerOptions([str(folder / "pages.txt")], folder / kind, 1500, kind, 0.9995, (), 200.0)
        train_tokenizer(options, lambda line: None)
    return folder


@pytest.mark.long
@pytest.mark.timeout(4 * LATE)
def test_llama_cpp_tokenizes_and_answers_as_transformers(
    llama_cpp: tuple[Path, Path], tokenizers: Path, tmp_path: Path
) -> None:
    """Exports of merged adapters, with both kinds of tokenizers."""
    python, source = llama_cpp
    wrong = {}
    for kind, made, words in CONVERTED:
        place = tmp_path / f"{kind}-{made}"
        folder = adapted(kind, AutoTokenizer.from_pretrained(tokenizers / made), place) / "merged"
        if made == "bpe":  # docs/use-your-model.md says why
            edit_json(folder / "tokenizer_config.json", add_bos_token=False)
        argv = [str(source), words, str(folder), "--outfile", str(place / "model.gguf"), "--outtype", "f32"]
        done = subprocess.run([sys.executable, "-c", CONVERT, *argv], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
        prompt, answered = greedy(model, tokenizer, QUESTIONS[0])
        texts = [*QUESTIONS, tokenizer.decode(prompt)]
        asked = {"texts": texts, "prompt": prompt, "new": len(answered)}
        (place / "asked.json").write_text(json.dumps(asked))
        worker = [str(python), str(Path(__file__).with_name("llama_worker.py"))]
        said = subprocess.run(
            [*worker, str(place / "model.gguf"), str(place / "asked.json")], capture_output=True, text=True
        )
        assert said.returncode == 0, said.stderr
        tokens = [tokenizer(text).input_ids for text in texts]
        if (found := json.loads(said.stdout)) != {"tokens": tokens, "answer": answered}:
            wrong[place.name] = found, tokens, answered
    assert wrong == {}


LM_EVAL = "lm_eval==0.4.13"
TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.long
@pytest.mark.timeout(4 * LATE)
def test_lm_evaluation_harness_on_a_local_task(tmp_path: Path) -> None:
    """The log-probabilities of its answers are those of transformers, over a whole model and an adapter."""
    python = installed(tmp_path / "venv", LM_EVAL)
    folder = adapted("llama", byte_level_tokenizer(), tmp_path / "model")
    choices = ["red", "green and blue", "as white as snow"]
    rows = [{"question": text, "choices": choices, "answer": 1} for text in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colors.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    environ = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONWARNINGS": "ignore",
    }
    for name, where in {
        "merged": f"pretrained={folder / 'merged'}",
        "adapter": f"pretrained={folder / 'base'},peft={folder / 'adapter'}",
    }.items():
        words = [
            "--model",
            "hf",
            "--model_args",
            f"{where},dtype=float32",
            "--tasks",
            "colors",
            "--device",
            "cpu",
        ]
        words += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / name), "--log_samples"]
        done = subprocess.run([python, "-m", "lm_eval", *words], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [samples] = (tmp_path / name).rglob("samples_colors_*.jsonl")
        found = [
            [float(one[0][0]) for one in json.loads(line)["resps"]]
            for line in samples.read_text().splitlines()
        ]
        expected = [
            [logp(folder / "merged", f"Question: {q}\nAnswer:", f" {c}") for c in choices] for q in QUESTIONS
        ]
        assert found == [pytest.approx(row, abs=1e-3) for row in expected], name
        [results] = (tmp_path / name).rglob("results_*.json")
        right = sum(row.index(max(row)) == 1 for row in expected) / len(rows)
        assert json.loads(results.read_text())["results"]["colors"]["acc,none"] == pytest.approx(right)


@torch.no_grad()
def logp(folder: Path, prompt: str, answer: str) -> float:
    """Return the log-probability of the answer after the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt + answer).input_ids])
    first = len(tokenizer(prompt).input_ids)
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits[0, :-1]
    of_each = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    return float(of_each[first - 1 :].sum())
