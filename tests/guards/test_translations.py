"""README.zh.md follows README.md: the same blocks of commands and output, headings, tables and links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def parts(name: str) -> dict[str, list[str]]:
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"^```.*?^```$", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return {
        "blocks": blocks,
        "levels of headings": re.findall(r"^(#+) ", prose, re.M),
        "cells of tables": [str(line.count("|")) for line in prose.splitlines() if line.startswith("|")],
        "links": [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("README")],
    }


def test_the_chinese_readme_is_in_step() -> None:
    ours, theirs = parts("README.md"), parts("README.zh.md")
    assert ours["blocks"] and ours["links"]
    for name, found in ours.items():
        assert theirs[name] == found, name
