"""Small runs for tests: takes a folder, gives a spec in it, starts it, reads what it left."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launching import LATE, ROOT, alone, end_group, forked
from tests.specs import llama

TRAIN = ROOT / "dsft" / "train.py"

SPEC = """
name: small
task: sft
model:
  from_config: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: false}
data:
  train: [{path: "builtin:quickstart"}]
  eval: [{path: "builtin:quickstart-heldout", max_rows: 16}]
  max_length: 256
train: {global_batch_size: 12, micro_batch_size: 3, max_steps: 10, eval_every: 5, precision: fp32}
optim: {learning_rate: 3.0e-3, lr_scheduler_type: cosine, warmup_steps: 2, weight_decay: 0.01, eps: 1.0e-4}
checkpoint: {every: 4}
wandb: {mode: disabled}
"""

LLAMA = llama(32, 64, 2, 2, 2, max_position_embeddings=256)


@functools.cache
def tokens() -> str:
    """Folder of the tokens of all specs of this process, which are made once."""
    folder = tempfile.mkdtemp(prefix="dsft-tokens-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_spec(folder: Path, tied: bool = False, layers: int = 2) -> Path:
    """`tied`: the model's embedding is its head too."""
    path = folder / "small.yaml"
    text = SPEC.replace("tie_word_embeddings: false", f"tie_word_embeddings: {str(tied).lower()}")
    text = text.replace("num_hidden_layers: 2", f"num_hidden_layers: {layers}")
    text = text.replace("max_length: 256\n", f"max_length: 256\n  cache_dir: {tokens()}\n")
    path.write_text(text + f"output_dir: {folder / 'runs'}\n")
    return path


def write_model(folder: Path, *, pickled: bool = False, **keys: object) -> Path:
    """Return a small pretrained Llama with its tokenizer, as transformers saves it; `pickled`: with its
    weights in pytorch_model.bin; keys: of its config, in place of LLAMA's."""
    import torch

    from dsft.data.tokenizer.load import open_tokenizer
    from dsft.model.build import build_model
    from dsft.model.config import token_facts
    from dsft.spec.schema import Model

    model = Model(from_config=LLAMA | keys)
    tokenizer = open_tokenizer(model)[0]
    causal_lm = build_model(model, token_facts(tokenizer), 5, torch.float32).causal_lm
    causal_lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if pickled:
        torch.save(causal_lm.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return folder


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def train(
    spec: Path, *overrides: str, nproc: int = 2, script: Path = TRAIN
) -> subprocess.CompletedProcess[str]:
    """The result is checked by the caller."""
    return forked(script, nproc, [str(spec), *overrides])


def run_forked(argv: Sequence[str], environ: Mapping[str, str], ranks: int, *, quiet: bool) -> int:
    """As `dsft.commands.on_ranks.run`, from processes that have imported torch and DeepSpeed; asserts that
    the ranks have ended well."""
    done = forked(TRAIN, ranks, argv[2:]) if ranks > 1 else alone(TRAIN, argv[2:])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.returncode


def dsft(*words: str) -> subprocess.CompletedProcess[str]:
    """Return the outcome of a command, which is forked; its ranks are too if its first word is --fork."""
    return alone(Path(__file__).with_name("typed.py"), words)


def trained(spec: Path, *overrides: str, nproc: int = 2) -> str:
    """Return the run's output; it must have ended well."""
    result = train(spec, *overrides, nproc=nproc)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def command(
    words: Sequence[str], cwd: Path = ROOT, timeout: float = LATE
) -> subprocess.CompletedProcess[str]:
    """Any launcher, in a session of its own, ended as a whole. `python`, `deepspeed`: this environment's."""
    scripts = Path(sys.executable).parent
    program = {"python": sys.executable, "deepspeed": str(scripts / "deepspeed")}.get(words[0], words[0])
    environ = os.environ | {"PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", "")])}
    process = subprocess.Popen(
        [program, *words[1:]], cwd=cwd, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    finally:
        end_group(process.pid)
    return subprocess.CompletedProcess(words, process.returncode, stdout, stderr)


def records(folder: Path, key: str) -> dict[int, float]:
    """Return step -> value of `key` from metrics.jsonl, in which each step occurs once."""
    found: dict[int, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if key in record:
            assert record["train/global_step"] not in found, "a step was reported twice"
            found[record["train/global_step"]] = record[key]
    return found


def shows_traceback(stderr: str) -> bool:
    """Return whether dsft's own code failed with one. The launchers add theirs when a rank ends with an
    error."""
    return f'File "{ROOT / "dsft"}' in stderr


def series(folder: Path, names: Sequence[str], part: str = "train") -> list[dict[str, float]]:
    """Return the loss and the metrics `names` of each step, without those that a step has not."""
    columns = {name: records(folder, f"{part}/{name}") for name in ("loss", *names)}
    steps = sorted(columns["loss"])
    return [{name: column[step] for name, column in columns.items() if step in column} for step in steps]


def prompt_rows(model: Path, lines: Sequence[dict[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of the prompt and of the completion of each line, which ends with the end of text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    return [(ids(one["prompt"]), [*ids(one["completion"]), tokenizer.eos_token_id]) for one in lines]


def write_small_task(
    spec: Path, task: str, model: Path, rows: Path, section: str, steps: str, rate: float
) -> Path:
    """Write the spec of a run of SGD in fp32 on `rows`, which are held out too, into a file of its name.
    section: the task's own, as YAML; steps: keys of `train`."""
    spec.write_text(
        f"""
name: {spec.stem}
task: {task}
model: {{name_or_path: {model}}}
data: {{train: [{{path: {rows}}}], eval: [{{path: {rows}}}], max_length: 64}}
{task}: {{{section}}}
parallel: {{zero_stage: 0}}
train: {{{steps}, micro_batch_size: 1, precision: fp32, max_grad_norm: 0}}
optim: {{name: sgd, learning_rate: {rate}, lr_scheduler_type: constant, weight_decay: 0.0}}
checkpoint: {{every: 2, keep_last: null}}
wandb: {{mode: disabled}}
output_dir: {spec.parent}/runs
"""
    )
    return spec
