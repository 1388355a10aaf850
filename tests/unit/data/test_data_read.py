"""Files of every kind: the same lines whole and in blocks of any size, from little memory."""

from __future__ import annotations

import csv
import gzip
import json
import pickle
import struct
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsft.data.read import columns, json_rows, lines
from dsft.data.read.files import Block, DataFile, blocks, data_files, file_notes, read_block
from dsft.data.rows import Line

ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
MARK = b"\xef\xbb\xbf"
ROWS = [{"text": f"row {n}", "n": n} for n in range(50)]


def file_at(path: Path) -> DataFile:
    (file,) = data_files(str(path))
    return file


def read(parts: tuple[Block, ...] | list[Block]) -> list[Line]:
    """The lines of blocks that follow each other, numbered through."""
    found: list[Line] = []
    for part in parts:
        before = found[-1].number if found else 0
        found += [replace(line, number=before + line.number) for line in read_block(part)]
    return found


def rows(path: Path) -> list[Any]:
    found = read(blocks(file_at(path)))
    assert not [line for line in found if line.mistake]
    return [line.row for line in found if line.row is not None]


# --- lines ------------------------------------------------------------------------------------------------

LINES = st.lists(
    st.sampled_from(
        [b'{"a": 1}', b"", b"  ", '{"a": "é€😀"}'.encode(), b"\xff", b"[1]", b"\r", b"x" * 30, b"a\0b"]
    ),
    max_size=12,
)


@ONE_FOLDER
@given(LINES, st.booleans(), st.booleans(), st.integers(1, 60), st.sampled_from(["jsonl", "txt"]))
def test_blocks_of_any_size_give_the_lines_of_the_whole(
    tmp_path: Path, parts: list[bytes], ends: bool, is_marked: bool, every: int, kind: str
) -> None:
    content = b"\n".join(parts) + b"\n" * ends
    path = tmp_path / f"a.{kind}"
    path.write_bytes(MARK * is_marked + content)
    file = file_at(path)
    starts: list[Any] = [*lines.block_starts(path, every), None]
    cut = [Block(file, i, *pair) for i, pair in enumerate(zip(starts, starts[1:], strict=False))]
    whole = read([Block(file)])
    assert read(cut) == whole
    expected = content.removesuffix(b"\n").split(b"\n") if content else []
    if is_marked and not content:
        expected = [b""]
    assert [line.number for line in whole] == list(range(1, len(expected) + 1))
    for line, raw in zip(whole, expected, strict=True):
        is_bad = b"\xff" in raw or b"\0" in raw or (kind == "jsonl" and raw.strip() and raw[:1] != b"{")
        assert (line.mistake is not None) == bool(is_bad)
        if line.mistake is None and raw.strip():
            assert line.row == (json.loads(raw) if kind == "jsonl" else {"text": raw.decode()})
        elif line.mistake is None:
            assert line.row is None


def test_blocks_start_at_the_first_line_after_each_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"0123\n5678\n" + b"x" * 25 + b"\nyy\n")
    assert lines.block_starts(path, 5) == [0, 5, 10, 36]
    assert lines.block_starts(path, 4) == [0, 5, 10, 36]
    assert lines.block_starts(path, 100) == [0]


def test_a_block_is_picklable_and_a_large_file_has_many(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    monkeypatch.setattr(lines.block_starts, "__defaults__", (100,))
    found = blocks(file_at(path))
    assert len(found) > 5
    assert [line.row for line in read(pickle.loads(pickle.dumps(found)))] == ROWS


def test_only_what_lies_behind_a_mark_is_read_to_find_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as opened:
        opened.truncate(5 << 30)  # a hole of 5 GB
        for place in range(lines.BLOCK_BYTES, 5 << 30, lines.BLOCK_BYTES):
            opened.seek(place)
            opened.write(b"\n")
    assert len(blocks(file_at(path))) == 160


def test_a_line_over_the_limit_is_a_mistake_and_the_next_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 20)
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 20 + b"\n" + b"x" * 21 + b"\nabc\n" + b"x" * 3000)
    found = [(line.number, line.row, bool(line.mistake)) for line in read([Block(file_at(path))])]
    assert found == [
        (1, {"text": "x" * 20}, False),
        (2, None, True),
        (3, {"text": "abc"}, False),
        (4, None, True),
    ]


def test_nul_bytes_of_a_damaged_file_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2' + b"\0" * 100)
    first, second = read([Block(file_at(path))])
    assert first.row == {"a": 1}
    assert second.mistake is not None and second.mistake.startswith("a NUL byte at byte 8")


def test_text_files_have_a_row_per_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(MARK + b"  one \r\n\r\n\xc2\xa0\ntwo")
    assert rows(path) == [{"text": "  one "}, {"text": "\xa0"}, {"text": "two"}]
    assert file_notes(file_at(path)) == (f"{path}: a byte order mark at the start was skipped",)


@pytest.mark.parametrize("kind", ["jsonl", "json", "txt", "csv"])
def test_compressed_files_give_the_same_lines(tmp_path: Path, kind: str) -> None:
    content = MARK + {"txt": b"a\nb\n", "csv": b"text\na\nb\n"}.get(kind, b'{"text": "a"}\n\n{"text": "b"}\n')
    (tmp_path / f"a.{kind}").write_bytes(content)
    (tmp_path / f"a.{kind}.gz").write_bytes(gzip.compress(content))
    plain, packed = file_at(tmp_path / f"a.{kind}"), file_at(tmp_path / f"a.{kind}.gz")
    assert read(blocks(packed)) == read(blocks(plain))
    assert [line.row for line in read(blocks(packed)) if line.row] == [{"text": "a"}, {"text": "b"}]
    assert len(file_notes(packed)) == 1


# --- lists ------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@ONE_FOLDER
@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 0, 2]), st.booleans())
def test_a_list_has_its_elements_with_their_lines(
    tmp_path: Path, values: list[Any], indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(values, indent=indent, ensure_ascii=is_ascii)
    path = tmp_path / "a.json"
    path.write_bytes(text.encode())
    found = list(json_rows.json_list(path))
    assert [line.row for line in found if line.mistake is None] == [v for v in values if isinstance(v, dict)]
    assert len(found) == len(values)
    if indent is None:
        assert [line.number for line in found] == list(range(1, len(values) + 1))
    elif not any(isinstance(value, list | dict) and value for value in values):
        assert [line.number for line in found] == list(range(2, len(values) + 2))


@ONE_FOLDER
@given(st.data())
def test_a_list_cut_anywhere_has_one_mistake(tmp_path: Path, data: Any) -> None:
    text = '[\n {"a": "x\\n", "b": [1.5, -2e3]},\n {"a": null},\n\n {"é": true}]'.encode()
    path = tmp_path / "a.json"
    path.write_bytes(text[: data.draw(st.integers(1, len(text) - 1))])
    found = list(json_rows.json_list(path))
    assert [bool(line.mistake) for line in found] == [False] * (len(found) - 1) + [True]


def test_a_mistake_in_a_list_has_its_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"a": 1},\n  {"a": 2}, {"a" 3},\n {"a": 4}]')
    found = list(json_rows.json_list(path))
    expected = "not JSON: expecting ':' delimiter at column 18; the rest of the file is not read"
    assert found[-1] == Line(2, mistake=expected)
    assert len(found) == 3


def test_an_element_over_the_limit_is_a_mistake(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(json_rows, "MAX_LINE", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"a": "x"}, {"a": "x" * 1000}, {"a": "y"}]))
    good, bad, other = json_rows.json_list(path)
    assert (good.row, other.row) == ({"a": "x"}, {"a": "y"})
    assert bad.mistake is not None and bad.mistake.startswith("the element has 1,009 characters")


# --- csv --------------------------------------------------------------------------------------------------


@ONE_FOLDER
@given(
    st.lists(st.lists(st.text("ab,\"\n\t é'", max_size=5), min_size=2, max_size=2), max_size=6),
    st.sampled_from(["csv", "tsv"]),
)
def test_csv_round_trip(tmp_path: Path, cells: list[list[str]], kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    with path.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, delimiter="," if kind == "csv" else "\t", lineterminator="\n")
        writer.writerows([["question", "answer"], *cells])
    assert rows(path) == [{"question": q, "answer": a} for q, a in cells]


def test_a_row_of_csv_has_the_number_of_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\nx,y\r\n"1\n\n  \n2",b\r\n\r\n3,4\r\n5\r\n')
    found = read(blocks(file_at(path)))
    assert [(line.number, line.row) for line in found[:4]] == [
        (1, None),
        (3, {"x": "1\n\n  \n2", "y": "b"}),
        (7, None),
        (8, {"x": "3", "y": "4"}),
    ]
    assert found[4].number == 9 and "1 field, but the header has 2" in str(found[4].mistake)


# --- parquet and arrow ------------------------------------------------------------------------------------

TABLE = pyarrow.table(
    {
        "text": [f"row {n}" for n in range(1000)],
        "messages": [[{"role": "user", "content": "é" * (n % 7)}] for n in range(1000)],
    }
)


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(TABLE, path, row_group_size=64)


def write_stream(path: Path) -> None:
    with pyarrow.ipc.new_stream(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=64)


def write_file(path: Path) -> None:
    with pyarrow.ipc.new_file(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=64)


@pytest.mark.parametrize(
    "name, write", [("a.parquet", write_parquet), ("stream.arrow", write_stream), ("file.arrow", write_file)]
)
def test_columns_in_blocks_of_any_size(tmp_path: Path, monkeypatch: Any, name: str, write: Any) -> None:
    path = tmp_path / name
    write(path)
    expected = [Line(n, row) for n, row in enumerate(TABLE.to_pylist(), start=1)]
    assert read(blocks(file_at(path))) == expected
    for size, together in ((1, 100), (5000, 1), (2000, 1 << 20)):
        monkeypatch.setattr(columns, "BLOCK_BYTES", size)
        monkeypatch.setattr(columns, "_BYTES_AT_ONCE", together)
        found = blocks(file_at(path))
        parts = 16 if name == "a.parquet" else 1  # a large row group is several blocks, a batch is not
        assert len(found) > 1 and (size > 1 or len(found) == 16 * parts)  # 16 groups of 64 rows or fewer
        assert read(found) == expected
        assert list(read_block(found[1]))[0].number == 1


def test_a_damaged_part_of_a_column_file_is_a_mistake_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_stream(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    found = read(blocks(file_at(path)))
    good = [line.row for line in found if line.row is not None]
    assert good == TABLE.to_pylist()[: len(good)] and len(good) > 300
    assert found[-1].number == len(good) + 1 and "not Arrow, or damaged" in str(found[-1].mistake)


def test_a_damaged_offset_is_a_mistake(tmp_path: Path) -> None:
    """Out of its buffer; pyarrow's own reader crashes on it."""
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": ["aaaaa", "bbbbb", "ccccc"]})
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    content, offsets = path.read_bytes(), struct.pack("<4i", 0, 5, 10, 15)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<4i", 0, 5, 1 << 30, 15)))
    found = read(blocks(file_at(path)))
    assert [line.row for line in found] == [None, None, None]
    assert all("rows 1 to 3 cannot be read: " in str(line.mistake) for line in found)


def test_a_value_that_python_cannot_represent_spoils_the_rows_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_MAX_ROWS_AT_ONCE", 2)
    path = tmp_path / "a.parquet"
    binary = pyarrow.array([b"good", b"\xff", b"good too"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": binary}), path)
    found = read(blocks(file_at(path)))
    assert [line.row for line in found] == [None, None, {"text": "good too"}]
    assert str(found[0].mistake).startswith("rows 1 to 2 cannot be read: ")


def test_other_types_become_python_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    row = {"text": "a", "when": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\x00", "none": None}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    assert rows(path) == [row]


def test_a_column_that_occurs_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"])
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    (line,) = read(blocks(file_at(path)))
    assert line.mistake == 'the column "text" appears twice in the file; the rest of the file is not read'
