"""JSON files that are damaged or made to harm are refused in a clause, within bounds of memory and depth."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from dsft.system.json_file import DEPTH, read_json


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        (b"[" * 200_000, "is nested more than 100 levels deep"),
        (b'{"a":' * 200_000, "is nested more than 100 levels deep"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "is nested more than 100 levels deep"),
        (b"9" * 5_000, "holds an integer of thousands of digits"),
        (b'{"size": Infinity}', "holds the number Infinity, which is not finite"),
        (b'{"size": NaN}', "holds the number NaN, which is not finite"),
        (b'{"size": 1e999}', "holds the number 1e999, which is not finite"),
        (b'{"name": "\xff"}', "is not UTF-8 text"),
        (b'{"name":\n', "is not JSON at line 2, column 1: Expecting value"),
        (b"", "is not JSON at line 1, column 1: Expecting value"),
        (b" " * 101, "is larger than 100 bytes"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_clause(tmp_path: Path, text: bytes, clause: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="^" + clause.replace("(", r"\(") + "$"):
        read_json(path, 100) if "larger" in clause else read_json(path)


def test_a_device_without_an_end_is_read_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "file.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="is larger than 1,000 bytes"):
        read_json(tmp_path / "file.json", 1_000)


def test_a_value_within_the_bounds_is_what_json_reads(tmp_path: Path) -> None:
    text = '{"shapes": {"a.weight": [16384, 16384]}, "loss": 0.25, "é": [null, true, "1e999"]}'
    (tmp_path / "file.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "file.json", len(text.encode())) == json.loads(text)
    deep = "[" * DEPTH + "]" * DEPTH
    (tmp_path / "deep.json").write_text(deep)
    assert read_json(tmp_path / "deep.json") == json.loads(deep)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


def test_a_pipe_and_a_hook_for_pairs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=('{"a": 1, "a": 2}',))
    writer.start()
    assert read_json(tmp_path / "pipe", object_pairs_hook=tuple) == (("a", 1), ("a", 2))
    writer.join()
