"""What `dsft` shows of its commands, and the names that it takes for them and their options."""

import pytest
import typer
from typer.testing import CliRunner

from dsft.cli import app


def shown(*words: str) -> str:
    return " ".join(CliRunner().invoke(app, words).output.split())


def test_every_command_is_in_a_group() -> None:
    out = CliRunner().invoke(app, ["--help"]).output
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    rows = {line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.split()}
    assert len(commands) > 20 and commands.keys() <= rows


def test_usage_has_no_braces() -> None:
    assert "Usage: dsft verify [OPTIONS] CHECKPOINT Read" in shown("verify", "--help")
    assert "Usage: dsft export [OPTIONS] CHECKPOINT OUT Export" in shown("export", "--help")
    assert "Usage: dsft report [OPTIONS] RUN... Write" in shown("report", "--help")


@pytest.mark.parametrize(
    "option",
    ["--processes", "--num_gpus", "--num-gpus", "--ranks", "--world-size", "--slots", "--world_size"],
)
def test_the_number_of_processes_has_one_name(option: str) -> None:
    """The names of earlier versions are not shown, but still taken."""
    for command in ("train", "launch", "reference", "eval", "plan", "hostfile"):
        help_text = shown(command, "--help")
        assert "--processes" in help_text and (option == "--processes" or option not in help_text)
        assert "Invalid value for '--processes'" in shown(command, "x", option, "0")


def test_words_of_other_tools_name_a_command() -> None:
    assert "No such command 'evaluate'. Use dsft eval." in shown("evaluate", "x")
    assert "Use dsft export --merged." in shown("merge")
    assert "Did you mean 'validate'?" in shown("validat")
