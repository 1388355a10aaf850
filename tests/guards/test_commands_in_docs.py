"""The command line accepts every `dsft` command in a block of README or docs/: its name, its options and its
number of arguments. Nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from dsft.cli import app

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
GROUP = typer.main.get_command(app)


def commands(text: str) -> list[str]:
    """Return the commands in blocks: lines that begin with `dsft ` or `$ dsft `, without comments; a line
    that ends with a backslash goes on in the next."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [re.sub(r"\s+#\s.*$", "", line).removeprefix("$ ").strip() for line in lines]
    return [part for line in found for part in re.split(r"\s*(?:&&|\|)\s*", line) if part.startswith("dsft ")]


def test_examples_are_found() -> None:
    text = "```\n$ dsft a b   # c\necho x | dsft d && dsft e \\\n  f\n```\ndsft g\n"
    assert [command.split() for command in commands(text)] == [
        ["dsft", "a", "b"],
        ["dsft", "d"],
        ["dsft", "e", "f"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_are_accepted(page: Path) -> None:
    for command in commands(page.read_text(encoding="utf-8")):
        words = shlex.split(command.replace("…", "..."))[1:]
        words = [word for word in words if not word.startswith((">", "2>")) and word not in ("&", "...")]
        context: click.Context | None = None
        found: click.Command = GROUP
        try:
            while isinstance(found, click.Group):
                name = words.pop(0)
                if name.startswith("--"):
                    break
                context = click.Context(found, info_name=found.name, parent=context)
                below = found.get_command(context, name)
                assert below is not None, f"{command}: there is no such command"
                found = below
            else:
                found.make_context(found.name, words, parent=context)
        except click.exceptions.Exit:
            pass
        except click.UsageError as error:
            pytest.fail(f"{command}: {error.format_message()}")
