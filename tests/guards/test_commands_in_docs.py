"""The command line accepts every `dsft` command of README and docs/: its name, its options and, in a block,
its number of arguments. tests/integration/test_commands_in_docs.py runs them."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from dsft.cli import app

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS: Mapping[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


LEFT_OUT = ("MissingParameter", "BadOptionUsage")
"""What typer raises for an argument, or the value of an option, that is not there."""
PROGRAMS = re.compile(
    r"(sudo |[A-Z_]+=\S+ )*(dsft|scripts/\w+|deepspeed|torchrun|srun|sbatch|mpirun|python|pip|ssh|vllm|git)\b"
)


def commands(text: str, program: str = "dsft ") -> list[str]:
    """Return the commands in blocks: lines that begin with a program, maybe after `$ `, without comments; a
    line that ends with a backslash continues in the next."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"\s+#\s.*$", "", line).removeprefix("$ ").strip() for line in lines]
    parts = [part for line in found for part in re.split(r"\s*(?:&&|\|)\s*", line)]
    return [part for part in parts if PROGRAMS.match(part) and part.startswith(program)]


def in_sentences(text: str) -> list[str]:
    """Return the commands in sentences, which may leave arguments out."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    found = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return [re.sub(r"\[[^]]*\]", "", code) for code in found if code.startswith("dsft ")]


def test_examples_are_found() -> None:
    text = "```\n$ dsft a b   # c\necho x | dsft d && dsft e \\\n  f\n```\ndsft g\n"
    assert [command.split() for command in commands(text)] == [
        ["dsft", "a", "b"],
        ["dsft", "d"],
        ["dsft", "e", "f"],
    ]


def refusal(command: str, *, in_sentence: bool = False) -> str:
    """Return why the command line does not accept a command, "" if it does."""
    words = ["1" if word == "N" else word for word in shlex.split(command)[1:]]
    words = [word for word in words if word not in ("&", "...", "…")]
    found: Any = COMMANDS.get(words[0] if words else "")
    words = words[1:]
    if hasattr(found, "commands"):
        found, words = found.commands.get(words[0]), words[1:]
    if found is None:
        return "" if words[:1] == ["--help"] else "there is no such command"
    try:
        found.make_context(found.name, words)
    except Exception as error:
        if in_sentence and type(error).__name__ in LEFT_OUT:
            return ""
        return str(getattr(error, "format_message", lambda: "")())  # --help ends with an Exit
    return ""


@pytest.mark.parametrize(
    "command", ["dsft a", "dsft plan x --b", "dsft plan", "dsft data built x", "dsft init a b"]
)
def test_invalid_example_is_found(command: str) -> None:
    assert refusal(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_are_accepted(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    refused = {command: refusal(command) for command in commands(text)}
    refused |= {command: refusal(command, in_sentence=True) for command in in_sentences(text)}
    assert {command: why for command, why in refused.items() if why} == {}


def test_examples_in_the_help_are_accepted() -> None:
    groups = [COMMANDS, COMMANDS["data"].commands, COMMANDS["tokenizer"].commands]
    commands = [found for group in groups for found in group.values() if not hasattr(found, "commands")]
    examples = [found.epilog.removeprefix("Example: ").partition(" > ")[0] for found in commands]
    assert len(examples) > 20
    assert {example: why for example in examples if (why := refusal(example))} == {}
