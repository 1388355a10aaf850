"""Damaged and hostile files of every kind end in a result or in one of dsft's errors, never in a traceback.

A case is a kind and a seed, from which alone the damage follows. The first seeds of each kind always run, a
thousand of each with `-m long`. To try one again: `FUZZ=model:77 pytest tests/unit/test_fuzzed_files.py`.
"""

import gzip
import json
import os
import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from dsft.checkpoint.export import export_checkpoint
from dsft.checkpoint.files import digest_of
from dsft.checkpoint.read import CheckpointReader, find, seal
from dsft.cli import app
from dsft.commands.chat import Sampling, load
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import ChatTemplate, named_template
from dsft.data.rows import Conversation
from dsft.data.tokenizer.load import byte_level_tokenizer, open_tokenizer
from dsft.errors import DsftError, printable
from dsft.model.build import build_model
from dsft.model.config import token_facts
from dsft.model.files import digests, model_files
from dsft.spec.files import CHAT_TEMPLATES
from dsft.spec.schema import Model
from tests.damage import damage, damaged_bytes, damaged_value, fresh, json_bytes
from tests.specs import llama
from tests.unit.checkpoint.conftest import make_llama, make_maker, make_tokenizer
from tests.unit.convert.test_convert import AXOLOTL, LLAMA_FACTORY

ROOT = Path(__file__).resolve().parents[2]
ALWAYS, FULL = 5, 1_000
"""Seeds of each kind that always run, and with `-m long`."""
CPU_SECONDS, MEMORY = 40.0, 3 * 2**30
"""Limits of one case. A chat template alone may take 10 seconds for each of two rows."""
TINY = llama(16, 16, 1, 2, 1)
TURNS = {"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}
ROWS = [{"messages": [*TURNS]}, {"messages": [*TURNS, *TURNS]}] * 3
ALPACA = [{"instruction": f"question {i}", "input": "", "output": f"answer {i}"} for i in range(6)]


class TooLongError(BaseException):
    """A case exceeded CPU_SECONDS."""


def dsft(*words: object) -> None:
    """Run a command in this process; raise what it raises."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert "Traceback" not in done.output, done.output[-500:]
    if done.exception is not None:
        raise done.exception


def write_spec(folder: Path, **sections: Any) -> Path:
    """Write a spec; `sections` replace entries of sections that are there."""
    spec: dict[str, dict[str, Any]] = {
        "model": {"from_config": TINY},
        "data": {"train": [{"path": "builtin:quickstart"}], "max_length": 64, "num_workers": 1},
        "train": {"micro_batch_size": 1, "accumulation_steps": 1, "max_steps": 2, "precision": "fp32"},
        "optim": {"learning_rate": 0.001},
    }  # fmt: skip
    found = {name: section | sections.get(name, {}) for name, section in spec.items()}
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump({"name": "run", "task": "sft", **found}))
    return path


# --- the kinds ---------------------------------------------------------------------------------------------


def try_spec(random: Random, folder: Path, sources: Path) -> None:
    path = random.choice(sorted((ROOT / "specs").glob("*.yaml")))
    if random.random() < 0.6:
        value = damaged_value(random, yaml.safe_load(path.read_text()))
        content = yaml.safe_dump(value, allow_unicode=True).encode(errors="surrogatepass")
    else:
        content = damaged_bytes(random, path.read_bytes())
    (folder / "spec.yaml").write_bytes(content)
    dsft("validate", folder / "spec.yaml")
    dsft("plan", folder / "spec.yaml", *random.choice([(), ("--json",), ("--explain",), ("--world-size", 4)]))
    dsft("generate", folder / "spec.yaml", "--out", folder)


TRL = {
    "model_name_or_path": "a/b", "dataset_name": "x/y", "learning_rate": 1e-6, "loss_type": ["ipo"],
    "beta": 0.05, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "max_steps": 50, "use_peft": True,
    "lora_r": 4, "eval_strategy": "epoch", "optim": "adafactor", "lr_scheduler_kwargs": {"min_lr": 1e-7},
    "report_to": ["wandb"],
}  # fmt: skip
SWIFT = {
    "model": "a/b", "rlhf_type": "dpo", "dataset": "data/pairs.json#10", "beta": 0.2, "lora_rank": 4,
    "torch_dtype": "bfloat16", "target_modules": "all-linear", "deepspeed": "zero3", "max_length": 64,
    "split_dataset_ratio": 0.1,
}  # fmt: skip
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}  # fmt: skip


DATASETS = {
    "identity": {"file_name": "identity.json", "columns": {"prompt": "instruction"}},
    "chats": {"hf_hub_url": "a/b", "formatting": "sharegpt", "tags": {"role_tag": "role"}},
}


def try_config(random: Random, folder: Path, sources: Path) -> None:
    given: Any = random.choice([LLAMA_FACTORY, AXOLOTL, TRL, SWIFT, DEEPSPEED])
    info = folder / "dataset_info.json"
    info.write_text(json.dumps(DATASETS))
    path = folder / random.choice(["config.json", "config.yaml", "config.sh"])
    options = " ".join(f"--{name} {json.dumps(value)!r}" for name, value in given.items())
    written = {".json": json.dumps(given), ".yaml": yaml.safe_dump(given), ".sh": f"trl sft {options}\n"}
    path.write_text(written[path.suffix])
    damage(random, random.choice([path, path, info]))
    named = "--model", "a/b", "--data", "x.json", "--dataset-info", info, "--out", folder / "spec.yaml"
    dsft("convert", path, *named)


def rows_in(folder: Path, kind: str, rows: Any) -> Path:
    path = folder / f"rows.{kind}"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif kind == "arrow":
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
    elif kind == "csv":
        path.write_text("instruction,input,output\n" + 'question,"with, comma",answer\n' * 5)
    else:
        path.write_bytes(
            {"json": json.dumps(rows).encode(), "jsonl.gz": gzip.compress(lines)}.get(kind, lines)
        )
    return path


def try_data(random: Random, folder: Path, sources: Path) -> None:
    kind = random.choice(["jsonl", "jsonl", "json", "json", "csv", "parquet", "arrow", "jsonl.gz"])
    rows: Any = random.choice([ROWS, ALPACA])
    path = rows_in(folder, kind, rows)
    if kind == "jsonl" and random.random() < 0.6:
        changed = damaged_value(random, rows)
        listed = changed if isinstance(changed, list) else [changed]
        path.write_bytes(b"\n".join(json_bytes(random, row) for row in listed))
    else:
        damage(random, path)
    spec = write_spec(folder, data={"train": [{"path": str(path)}], "on_too_long": "truncate"})
    dsft("validate", spec)
    dsft("data", "build", spec)


def try_tokenizer(random: Random, folder: Path, sources: Path) -> None:
    tokenizer = fresh(sources / "llama", folder / "model")
    named = [path for path in sorted(tokenizer.iterdir()) if "token" in path.name or path.suffix == ".jinja"]
    damage(random, random.choice(named))
    rows = {"train": [{"path": str(rows_in(folder, "jsonl", ROWS))}]}
    spec = write_spec(folder, data=rows, model={"tokenizer": str(tokenizer)})
    dsft("validate", spec)
    dsft("preview", spec, "--row", 1)


def try_model(random: Random, folder: Path, sources: Path) -> None:
    path = fresh(sources / random.choice(["llama", "sharded", "mixture"]), folder / "model")
    files = sorted(path.iterdir())
    likely = [file for file in files if file.name in ("config.json", "model.safetensors.index.json")]
    damage(random, random.choice([*likely, *likely, *files]))
    spec = write_spec(folder, model={"name_or_path": str(path), "from_config": None})

    def build() -> None:
        model = Model(name_or_path=str(path))
        tokenizer, added = open_tokenizer(model)
        digests(model_files(str(path)))
        build_model(model, token_facts(tokenizer, added.first_id), 1, torch.float32)

    try_each(
        lambda: dsft("validate", spec),
        lambda: dsft("plan", spec),
        build,
        lambda: load(path, Sampling(temperature=0.0, max_new_tokens=2)),
    )


def try_checkpoint(random: Random, folder: Path, sources: Path) -> None:
    """Some checkpoints are sealed again, as by someone who knows how."""
    run = fresh(sources / "run", folder / "run")
    path, manifest = run / "checkpoints/step-2", run / "checkpoints/step-2/MANIFEST.json"
    files = sorted(one for one in path.rglob("*") if one.is_file())
    damaged = random.choice([*[path / "state.json", manifest] * 3, path / "state.json", *files])
    damage(random, damaged)
    if random.random() < 0.6 and damaged != manifest and damaged.is_file():
        found, digest = json.loads(manifest.read_text()), digest_of(damaged)
        found["files"][str(damaged.relative_to(path))] = {"size": digest.size, "sha256": digest.sha256}
        del found["sha256"]
        manifest.write_text(json.dumps({**found, "sha256": seal(found)}))
    try_each(
        lambda: find(run, "auto"),
        lambda: CheckpointReader.open(path).verify(),
        lambda: export_checkpoint(path, folder / "export"),
    )


def try_run(random: Random, folder: Path, sources: Path) -> None:
    one, two = (fresh(sources / "finished", folder / name) for name in ("one", "two"))
    files = [path for path in sorted(one.rglob("*")) if path.is_file()]
    for path in random.sample(files, random.choice((1, 1, 3))):
        damage(random, path)
    try_each(lambda: dsft("status", one), lambda: dsft("report", one, two))


def try_template(random: Random, folder: Path, sources: Path) -> None:
    content = damaged_bytes(random, named_template(random.choice(CHAT_TEMPLATES)).encode())
    text = content.decode(errors=random.choice(["replace", "surrogateescape"]))
    thinking: Any = random.choice(["empty", "keep", "as_in_template"])
    renderer = Renderer(byte_level_tokenizer(), text, thinking=thinking)
    try_each(
        lambda: renderer.render([Conversation(TURNS), Conversation((*TURNS, *TURNS))]),
        renderer.turn_end,
        lambda: ChatTemplate(text, {}).literals,
    )


KINDS: Mapping[str, Callable[[Random, Path, Path], None]] = {
    "spec": try_spec, "config": try_config, "data": try_data, "tokenizer": try_tokenizer, "model": try_model,
    "checkpoint": try_checkpoint, "run": try_run, "template": try_template,
}  # fmt: skip


# --- the cases ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make undamaged model folders, a run with two checkpoints, and the folder of a finished run."""
    folder = tmp_path_factory.mktemp("sources")
    tokenizer = byte_level_tokenizer()
    small: dict[str, Any] = {key: value for key, value in TINY.items() if key != "model_type"}
    small |= {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "eos_token_id": tokenizer.eos_token_id}
    experts: Any = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8}
    llama, mixture = LlamaConfig(**small), Qwen3MoeConfig(**small, **experts)
    torch.manual_seed(0)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    LlamaForCausalLM(llama).save_pretrained(folder / "sharded", max_shard_size="20KB")
    Qwen3MoeForCausalLM(mixture).save_pretrained(folder / "mixture", max_shard_size="20KB")
    for name in ("llama", "sharded", "mixture"):
        tokenizer.save_pretrained(folder / name)
    maker = make_maker(folder, make_llama(tied=False), make_tokenizer())
    maker.save(1)
    maker.save(2)
    write_finished(folder / "finished")
    return folder


def write_finished(folder: Path) -> None:
    (folder / "logs").mkdir(parents=True)
    figures = {"train/grad_norm": 1.0, "perf/tokens_per_second": 1e3, "perf/step_time": 0.5, "eval/loss": 2.0}
    records = [{"train/global_step": step, "train/loss": 3 / step, **figures} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "logs/train.log").write_text("step 7/8  loss 2\nstep 8/8  loss 2\n")
    (folder / "spec.yaml").write_text((ROOT / "specs/quickstart.yaml").read_text())
    rank = {"host": "a", "pid": 4, "step": 3, "phase": "step", "pulse_age": 0.5, "progress_age": 1.5}
    contents: dict[str, Any] = {
        "memory": {"phases": {"steady": {"host_rss": {"measured": 2**30, "planned": 2**30}}}},
        "versions": {"torch": "2.13.0"},
        "data": {"train": {"total": {"rows": 8, "bad": 0}}},
        "logs/status": {
            "pid": 1, "host": "a", "command": "dsft launch x", "launcher": "dsft", "state": "running",
            "attempt": 1, "exit_code": None, "error": None, "ranks": {"0": rank},
        },
    }  # fmt: skip
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dsft.commands.report.svg", lambda drawn: "")  # which takes half a second


@contextmanager
def limited() -> Iterator[None]:
    """Raise TooLongError after CPU_SECONDS, and let memory grow by MEMORY at most."""

    def too_long(*_: object) -> None:
        raise TooLongError

    before, (soft, hard) = signal.signal(signal.SIGPROF, too_long), resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def try_each(*works: Callable[[], object]) -> None:
    """Raise AssertionError with what is wrong with how each ended."""
    wrong = [found for found in map(outcome, works) if found]
    assert not wrong, "; ".join(wrong)


def outcome(work: Callable[[], object]) -> str | None:
    """Return what is wrong with how `work` ended; None for a result, an exit code, an error with a text."""
    try:
        work()
    except (DsftError, SystemExit) as error:
        text = printable(str(error)).strip()
        return None if text and "could not be counted" not in text else f"no sentence: {error!r}"
    except AssertionError as error:
        return str(error)
    except (KeyboardInterrupt, TooLongError):
        raise
    except BaseException as error:  # noqa: B902  a panic of the tokenizers library is not an Exception
        return f"{type(error).__name__}: {str(error)[:300]} ({places(error)})"
    return None


def places(error: BaseException) -> str:
    """Return where an error comes from: the last lines of dsft, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/dsft/" in frame.filename][-3:]
    return " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*ours, frames[-1]))


def run_case(kind: str, seed: int, folder: Path, sources: Path) -> str | None:
    """Return what is wrong with a case."""
    print(kind, seed, flush=True)  # shown if this process hangs or ends
    folder.mkdir()
    try:
        with limited():
            return outcome(lambda: KINDS[kind](Random(f"{kind} {seed}"), folder, sources))
    except TooLongError as error:
        return f"takes more than {CPU_SECONDS:g} seconds ({places(error)})"


def run_cases(
    kind: str, seeds: Iterable[int], folder: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    only, _, seed = os.environ.get("FUZZ", "").partition(":")
    seeds = seeds if not only else [int(seed)] if only == kind else []
    found = {seed: run_case(kind, seed, folder / f"{seed}", sources) for seed in seeds}
    caplog.clear()  # libraries log damaged text; a report with half a surrogate pair ends a worker of pytest
    wrong = [f"{kind}:{seed}: {what}" for seed, what in found.items() if what is not None]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_few_damaged_files_give_no_traceback(
    kind: str, tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_cases(kind, range(ALWAYS), tmp_path, sources, caplog)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_thousand_damaged_files_give_no_traceback(
    kind: str, tmp_path: Path, sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_cases(kind, range(ALWAYS, FULL), tmp_path, sources, caplog)
