"""The command `dsft`, run in this process."""

import io
import sys
from collections.abc import Callable

import pytest

from dsft import cli

Dsft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dsft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dsft:
    """Return a function that runs the command and returns its exit code, standard output and standard
    error. `typed`: what it reads from its standard input."""

    def run(*arguments: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dsft", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        return int(ended.value.code or 0), captured.out, captured.err

    return run
