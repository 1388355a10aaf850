"""What an agent does with the output of its processes: a real pipe, and the log that is made of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsft.launcher.output import OutputLog
from tests.launching import LATE


class Kept:
    """An OutputLog in a folder. `lines`: what it has reported."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[str] = []
        self.log = folder / "log"
        self.output = OutputLog(self.log, self.lines.extend)
        self.output.start()

    def write(self, *parts: bytes) -> None:
        for part in parts:
            os.write(self.output.writing, part)
            self.output.last_lines()  # waits until the part is taken

    def end(self) -> str:
        self.output.close()
        assert self.output.ended.wait(LATE)
        return self.log.read_bytes().decode(errors="backslashreplace")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    monkeypatch.setenv("HF_TOKEN", "canary-token")
    kept = Kept(tmp_path)
    yield kept
    if not kept.output.ended.is_set():
        kept.end()


def test_secrets_are_hidden_in_log_and_terminal(kept: Kept) -> None:
    kept.write(b"GET can", b"ary-token\nand canary-", b"token\nnot text: \xff\n", b"the end")
    assert kept.lines == ["GET (hidden)", "and (hidden)", "not text: \udcff"]
    assert kept.output.last_lines() == [*kept.lines, "the end"]
    assert kept.end() == "GET (hidden)\nand (hidden)\nnot text: \\xff\nthe end"
    assert kept.lines[-1] == "the end"


def test_states_of_a_progress_bar(kept: Kept) -> None:
    kept.write(b"\r10%", b"\r20%", b"\r30%\r")
    assert kept.log.read_bytes() == b"\r10%\r20%\r30%\r" and kept.lines == []
    kept.write(b"\ndone\r\n")
    assert kept.lines == ["30%", "done"]


def test_endless_line_is_written_in_parts(kept: Kept) -> None:
    for _ in range(8):
        kept.write(b"x" * 2**15)
    assert len(kept.log.read_bytes()) >= 2**17
    assert len(kept.end()) == 2**18


def test_log_ends_with_the_last_process_that_has_the_pipe(kept: Kept) -> None:
    child = os.dup(kept.output.writing)
    kept.output.close()
    os.write(child, b"of a child\n")
    assert kept.output.last_lines() == ["of a child"] and not kept.output.ended.is_set()
    os.close(child)
    assert kept.output.ended.wait(LATE)


def test_log_on_a_full_disk_loses_its_lines_only() -> None:
    lines: list[str] = []
    output = OutputLog(Path("/dev/full"), lines.extend)
    output.start()
    os.write(output.writing, b"one\n")
    assert output.last_lines() == ["one"]
    output.close()
    assert output.ended.wait(LATE) and lines == ["one"]
