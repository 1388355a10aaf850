"""Every command in a block of README and docs/ does what a reader expects: it is run here, one page after the
other, with small models and rows under the names of the pages; or it needs hosts, GPUs or a network, and then
the test that runs its like is named.

The commands run in a forked process, training without its launcher. With `-m long` each is typed in a process
of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.guards.test_commands_in_docs import PAGES, ROOT, commands
from tests.integration.runs import TRAIN, write_model
from tests.launching import LATE, alone, forked, on_the_cpu
from tests.unit.convert.test_convert import LLAMA_FACTORY

WORKER = Path(__file__).with_name("commands_worker.py")
COMMAND = "from dsft.cli import main; main()"
FIRST = ("sft.md", "dpo.md")
"""Tutorials, whose runs the other pages look at."""

SHORT = ["train.max_steps=2", "train.precision=fp32", "train.global_batch_size=4", "data.max_length=256"]
"""What a training command of a page gets in addition. Of the long conversations 256 tokens would be nothing
but answers: 2,048."""
KEYS = {
    "specs/mydpo.yaml": "model.lora={rank: 2}",  # docs/lora.md has a run with an adapter
    "specs/mychat.yaml": "data.eval=[{path: data/train.jsonl}]",  # docs/evaluate.md answers held-out rows
}
"""And one of this spec."""
TINY = "specs/topics.yaml"
"""A spec of a tiny model, which `dsft init` writes, and which trains as it is."""

NAMED = {
    "runs/NAME": "runs/mydpo", "SPEC": "specs/mychat.yaml", "NAME": "mychat", "MODEL": "models/Qwen3-8B",
    "CONVERSATIONS": "data/train.jsonl", "PAIRS": "data/pairs.jsonl", "step-100": "step-2", "16000": "270",
    "data/test.jsonl": "data/train.jsonl", "1740": "2", "318": "3",
}  # fmt: skip
"""Placeholders and sizes of the pages, and the values that this test uses for them."""

LONG = ("docs/dpo.md", "big-model.md", "long-context.md")
"""Pages whose training is tried with -m long alone; FIRST trains as they do, or tests/parity."""

ELSEWHERE: Mapping[str, tuple[str, str, str]] = {
    r"dsft doctor": ("several hosts", "tests/lab/test_doctor.py", '"doctor"'),
    r"dsft launch(?!.*--dry-run)": ("several hosts", "tests/lab/test_ways_in.py", "launch"),
    r"dsft hostfile --from-slurm": ("Slurm", "tests/unit/rank/test_slurm_allocation.py", "--from-slurm"),
    r"dsft reference .*--processes": (
        "several processes",
        "tests/unit/reference/test_reference_misuse.py",
        "run_ranks",
    ),
    r"deepspeed ": ("several hosts", "tests/lab/test_ways_in.py", "deepspeed"),
    r"torchrun ": ("several GPUs", "tests/lab/test_ways_in.py", "torchrun"),
    r"srun ": ("Slurm", "tests/lab/test_ways_in.py", "srun"),
    r"sbatch ": ("Slurm", "tests/lab/test_scripts.py", "sbatch"),
    r"dsft push": ("the hub", "tests/unit/commands/test_push.py", '"push"'),
    r"git clone|python llama": ("a network", "tests/integration/test_other_programs.py", "llama.cpp"),
    r"ssh|vllm ": ("several hosts", "tests/lab/hosts.py", "ssh"),
    r"STANDIN_MODE=numbers scripts/standin run": ("the stand-in GPU", "tests/standin/test_step.py", "counts"),
    r"scripts/gpu": ("a GPU", "tests/standin/test_gpu_cases.py", "gpu"),
    r"python - docs": ("all pages", "tests/integration/test_commands_in_docs.py", "long-context.md"),
    r"python tests/integration/r|dsft\.train": ("rows", "tests/integration/test_ranking.py", "ranking.py"),
    r"scripts/quickstart": ("a network", "tests/integration/test_pinned_losses.py", "quickstart.yaml"),
    r"(sudo )?scripts/(lab|test)|pip |PIP_": ("a network", ".ci/run", "SCRIPTS/test"),
}
"""Pattern of a command -> what it needs, and a file in which its like is run, with a word of it."""


@dataclass(frozen=True)
class Typed:
    """A command of a page, as it is to be run."""

    page: str
    command: str
    words: tuple[str, ...]

    @property
    def trains(self) -> bool:
        return self.words[1] == "train"

    @property
    def arguments(self) -> list[str]:
        """Return what follows the command's name."""
        if TINY in self.words:
            return list(self.words[2:])
        short = [one.replace("256", "2048") if "name=long-chats" in self.words else one for one in SHORT]
        more = [*short, *(key for spec, key in KEYS.items() if spec in self.words)] if self.trains else []
        return [*self.words[2:], *more]


def elsewhere(command: str) -> tuple[str, str, str] | None:
    return next((marked for pattern, marked in ELSEWHERE.items() if re.match(pattern, command)), None)


def to_run() -> list[Typed]:
    """Return the commands that are run here, each once, a page's together, FIRST first. Translations have
    the same blocks (tests/guards/test_translations.py)."""
    pages = sorted(
        PAGES, key=lambda page: (*(page.parts[-2:] != ("tutorials", name) for name in FIRST), page)
    )
    found: dict[tuple[str, ...], Typed] = {}
    for page in pages:
        for command in commands(page.read_text(encoding="utf-8")):
            words = words_of(command)
            if elsewhere(command) is None and "zh" not in page.parts:
                found.setdefault(words, Typed(str(page.relative_to(ROOT)), command, words))
    return list(found.values())


def words_of(command: str) -> tuple[str, ...]:
    for name, ours in NAMED.items():
        command = re.sub(rf"\b{name}\b", ours, command)
    optional = r"('[^']*')|\[[^]]*\]"  # what a quote has in brackets is a list
    return tuple(shlex.split(re.sub(optional, lambda found: found[1] or "", command)))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a working folder with a model, rows and specs under the names of the pages."""
    folder = tmp_path
    monkeypatch.chdir(folder)
    for name in ("specs", "data", "models", "runs"):
        (folder / name).mkdir()
    write_model(folder / "models/Qwen3-8B")
    questions = [f"What is {n} plus {n + 1}?" for n in range(8)]
    chats = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": f"It is {len(q)}."}]
        for q in questions
    ]
    write_rows(folder / "data/train.jsonl", [{"messages": chat} for chat in chats])
    write_rows(folder / "data/chats.jsonl", [{"messages": chat} for chat in chats])
    write_rows(
        folder / "data/pairs.jsonl",
        [{"prompt": q, "chosen": "Yes.", "rejected": "No, no."} for q in questions],
    )
    write_rows(
        folder / "data/labeled.jsonl",
        [{"prompt": q, "completion": "Yes.", "label": n % 2 == 0} for n, q in enumerate(questions)],
    )
    write_rows(folder / "data/identity.json", [{"instruction": q, "output": "Yes."} for q in questions])
    (folder / "data/a.txt").write_text("\n".join(questions * 40))
    broken = [{"messages": chats[0]}, {"messages": chats[0]}, {"message": chats[1]}]
    write_rows(folder / "hand.jsonl", broken)
    (folder / "data/dataset_info.json").write_text('{"identity": {"file_name": "identity.json"}}')
    factory = LLAMA_FACTORY | {
        "model_name_or_path": "models/Qwen3-8B",
        "dataset": "identity",
        "output_dir": "saves/a",
    }
    (folder / "qwen3_lora_sft.yaml").write_text(
        json.dumps(factory | {"deepspeed": None, "output_dir": "NAME"})
    )
    axolotl = {
        "base_model": "models/Qwen3-8B",
        "datasets": [{"path": "data/identity.json", "type": "alpaca"}],
    }
    (folder / "lora.yml").write_text(json.dumps(axolotl | {"learning_rate": 2e-4}))
    (folder / "ds_z3_config.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}'
    )
    for path in (ROOT / "specs").glob("*.yaml"):
        (folder / "specs" / path.name).write_text(path.read_text())
    make_long_rows(folder)
    environ = {"XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    with mock.patch.dict(os.environ, environ), on_the_cpu():
        yield folder


def make_long_rows(folder: Path) -> None:
    """Run the program of docs/long-context.md that makes its rows, and write the spec of that page."""
    page = (ROOT / "docs/long-context.md").read_text()
    (folder / "docs").symlink_to(ROOT / "docs")
    [program] = re.findall(r"^```\n(mkdir -p data\n.*?)^```$", page, re.M | re.S)
    [spec] = re.findall(r"^```yaml\n(name: long\n.*?)^```$", page, re.M | re.S)
    subprocess.run(["bash", "-ec", program], cwd=folder, check=True)
    (folder / "specs/long.yaml").write_text(spec)


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def after_first(folder: Path, *, all_train: bool) -> None:
    """Give the runs and specs of FIRST the names of the other pages. all_train: those in LONG train too."""
    for name in ("faq", "faq-lora", "my-run"):
        (folder / "runs" / name).symlink_to("mychat")
    for name, run in () if all_train else (("my-sft", "mychat"), ("my-dpo", "mydpo")):
        (folder / "runs" / name).symlink_to(run)
    for name in ("llama8b", "my-run", "my"):
        text = (folder / "specs/mychat.yaml").read_text()
        (folder / f"specs/{name}.yaml").write_text(text.replace("name: mychat", f"name: {name}"))
    hand = (folder / "specs/mychat.yaml").read_text().replace("data/train.jsonl", "hand.jsonl")
    (folder / "hand.yaml").write_text(hand.replace("  max_length:", "  on_bad_row: drop\n  max_length:"))


def outcome(folder: Path, typed: list[Typed]) -> dict[Typed, tuple[int, str]]:
    """Run commands in forked processes: as many as follow each other in one, training in one of its own."""
    found: dict[Typed, tuple[int, str]] = {}
    waiting: list[Typed] = []

    def run_waiting() -> None:
        if waiting:
            asked, answer = folder / "asked.json", folder / "answer.json"
            asked.write_text(json.dumps([one.words[1:] for one in waiting]))
            done = alone(WORKER, [str(asked), str(answer)])
            assert answer.exists(), done.stderr
            found.update(zip(waiting, map(tuple, json.loads(answer.read_text())), strict=True))
            answer.unlink()
            waiting.clear()

    for one in typed:
        if not one.trains:
            waiting.append(one)
            continue
        run_waiting()
        done = forked(TRAIN, 1, one.arguments)
        found[one] = done.returncode, done.stdout + done.stderr
    run_waiting()
    return found


def typed_one_by_one(folder: Path, typed: list[Typed]) -> dict[Typed, tuple[int, str]]:
    """Run each command in a process of its own, training with its launcher."""
    found = {}
    for one in typed:
        argv = [sys.executable, "-c", COMMAND, one.words[1], *one.arguments]
        done = subprocess.run(
            argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LATE
        )
        found[one] = done.returncode, done.stdout + done.stderr
    return found


def wrong(found: Mapping[Typed, tuple[int, str]]) -> list[str]:
    return [
        f"{one.page}: {' '.join(one.words)}: {code}\n{output[-1500:]}"
        for one, (code, output) in found.items()
        if code != 0 or "Traceback" in output
    ]


@pytest.mark.parametrize("page", PAGES)
def test_documented_commands_are_tested_or_have_a_tested_equivalent(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8"), program=""):
        marked = elsewhere(command)
        assert marked is not None or command.startswith("dsft "), f"{command}: nothing says what it needs"
        if marked is not None:
            _, file, word = marked
            assert word in (ROOT / file).read_text(), f"{file} has no {word}"


@pytest.mark.parametrize("each", [False, pytest.param(True, marks=pytest.mark.long)], ids=["forked", "typed"])
def test_documented_commands_do_what_the_page_says(place: Path, each: bool) -> None:
    run = typed_one_by_one if each else outcome
    typed = to_run()
    first = [one for one in typed if one.page.endswith(tuple(f"tutorials/{name}" for name in FIRST))]
    found = run(place, first)
    assert not wrong(found), "\n".join(wrong(found))
    after_first(place, all_train=each)
    rest = [
        one for one in typed if one not in first and (each or not (one.trains and one.page.endswith(LONG)))
    ]
    found |= run(place, rest)
    assert not wrong(found), "\n".join(wrong(found))
    assert len(found) > 50
