"""dsft/errors.py and docs/exit-codes.md have the same codes."""

import re
from pathlib import Path

from dsft.errors import DsftError
from dsft.launcher import verdict

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "exit-codes.md"


def kinds(kind: type[DsftError]) -> set[type[DsftError]]:
    return {kind, *(each for below in kind.__subclasses__() for each in kinds(below))}


def test_page_lists_every_exit_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    assert listed == {kind.exit_code for kind in kinds(DsftError)} | {0, 1, verdict.HUNG}


def test_page_lists_restarted_exit_codes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sentence = re.search(r"restarts a run after ([^.]+)\.", text)
    assert sentence
    named = {int(code) for code in re.findall(r"(?<!\+ )\b\d+\b", sentence[1])} - {128}
    every = {kind.exit_code for kind in kinds(DsftError)} | {0, 1, verdict.HUNG}
    assert named == every - verdict.NO_RESTART
