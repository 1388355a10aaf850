"""JSON files that are damaged or made to harm are refused in a clause, within bounds of memory and depth."""

import json
import os
import socket
from pathlib import Path

import pytest

from dsft.system.json_file import DEPTH, read_json


@pytest.mark.parametrize(("text", "clause"), [
    (b"[" * 200_000, "is nested more than 100 levels deep"),
    (b'{"a":' * 200_000, "is nested more than 100 levels deep"),
    (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "is nested more than 100 levels deep"),
    (b"9" * 301, "holds an integer of more than 300 digits"),
    (b'[{"step": -' + b"9" * 5_000 + b"}]", "holds an integer of more than 300 digits"),
    (b'{"size": Infinity}', "holds the number Infinity, which is not finite"),
    (b'{"size": NaN}', "holds the number NaN, which is not finite"),
    (b'{"size": 1e999}', "holds the number 1e999, which is not finite"),
    (b'{"name": "\xff"}', "is not UTF-8 text"),
    (b'{"name":\n', "is not JSON at line 2, column 1: Expecting value"),
    (b"", "is not JSON at line 1, column 1: Expecting value"),
    (b" " * 101, "is larger than 100 bytes"),
])  # fmt: skip
def test_unreadable_file_gives_a_clause(tmp_path: Path, text: bytes, clause: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="^" + clause.replace("(", r"\(") + "$"):
        read_json(path, 100) if "larger" in clause else read_json(path)


@pytest.mark.parametrize("kind", ["a device", "a named pipe", "a socket"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """Reading a device may never end, and opening a named pipe waits for its writer."""
    path = tmp_path / "file.json"
    with socket.socket(socket.AF_UNIX) as endpoint:
        if kind == "a device":
            path.symlink_to("/dev/zero")
        elif kind == "a named pipe":
            os.mkfifo(path)
        else:
            endpoint.bind(os.path.relpath(path))  # a socket's path has at most 108 bytes
        with pytest.raises(OSError, match=f"it is {kind}, not a file"):
            read_json(path)
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)


def test_values_within_the_limits(tmp_path: Path) -> None:
    text = '{"shapes": {"a.weight": [16384, 16384]}, "loss": 0.25, "é": [null, true, "1e999"]}'
    (tmp_path / "file.json").write_text(text, encoding="utf-8")
    assert read_json(tmp_path / "file.json", len(text.encode())) == json.loads(text)
    deep = "[" * DEPTH + "]" * DEPTH
    (tmp_path / "deep.json").write_text(deep)
    assert read_json(tmp_path / "deep.json") == json.loads(deep)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")


def test_hook_gets_the_pairs_of_an_object_and_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": 1, "a": 2}', encoding="utf-8-sig")
    assert read_json(tmp_path / "file.json", object_pairs_hook=tuple) == (("a", 1), ("a", 2))
