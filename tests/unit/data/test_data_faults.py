"""Row 24 of the fault matrix: a fault in a file of good rows is found before training, with its exact line;
dropped, it costs its own row and no other. Without a fault every kind of file gives the same tokens."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, pre_tokenizers

from dsft.data.sets.load import RunData, load_data
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError
from dsft.spec.schema import Data, Source
from tests.unit.data.token_rows import spec_of

FAULTY = 17
ROWS = [json.dumps({"text": f"row {number}"}).encode() for number in range(1, 31)]


@dataclass(frozen=True)
class Fault:
    """What stands in line FAULTY, and how the reason begins."""

    line: bytes
    reason: str


FAULTS = {
    "cut_line": Fault(b'{"text": "row 1', "cut off: the JSON ends before it is complete"),
    "not_utf8": Fault(b'{"text": "caf\xe9"}', "not UTF-8: byte 14 is 0xe9"),
    "nul_bytes": Fault(b"\0" * 40, "a NUL byte at byte 1"),
    "wrong_type": Fault(b'{"text": 17}', '"text" is a number; it must be a string'),
    "missing_key": Fault(b'{"txt": "row 17"}', '"text" is missing; the row has "txt"'),
    "not_a_number": Fault(b'{"text": "row 17", "score": NaN}', "NaN is not JSON"),
    "long_line": Fault(
        b'{"text": "' + b"x" * (64 << 20) + b'"}', "the line has 67,108,877 bytes, but a row may"
    ),
}


LARGE = ("long_line", "jsonl.gz")  # slow to compress, and read by the code that reads the others


def load(path: str, **keys: Any) -> RunData:
    data = Data(train=(Source(path=path),), max_length=64, **keys)
    return load_data(spec_of("pretrain", data), byte_level_tokenizer())


def as_lines(rows: list[bytes]) -> bytes:
    return b"".join(row + b"\n" for row in rows)


def with_fault(line: bytes) -> list[bytes]:
    return [*ROWS[: FAULTY - 1], line, *ROWS[FAULTY:]]


@pytest.mark.parametrize(
    "name, ending",
    [(name, ending) for ending in ("jsonl", "jsonl.gz") for name in FAULTS if (name, ending) != LARGE],
)
def test_a_fault_is_named_with_its_line(
    name: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = as_lines(with_fault(FAULTS[name].line))
    Path(f"a.{ending}").write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    with pytest.raises(DataError) as caught:
        load(f"a.{ending}")
    (problem,) = caught.value.problems
    assert problem.where == f"a.{ending}:{FAULTY}"
    assert problem.message.startswith(FAULTS[name].reason)
    assert caught.value.exit_code == 65
    if name != "long_line":
        kept = load(f"a.{ending}", on_bad_row="drop")
        assert len(kept.train) == len(ROWS) - 1
        told = f"a.{ending}:{FAULTY}: {problem.message}"
        assert any(told in line for line in kept.lines)


@pytest.mark.parametrize("name", ["not_utf8", "nul_bytes", "wrong_type", "missing_key", "not_a_number"])
def test_a_fault_in_a_list_is_named_with_its_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = with_fault(FAULTS[name].line)
    rows[0], rows[-1] = b"[" + rows[0], rows[-1] + b"]"
    Path("a.json").write_bytes(b",\n".join(rows))
    with pytest.raises(DataError) as caught:
        load("a.json")
    (problem,) = caught.value.problems
    assert problem.where == f"a.json:{FAULTY}"
    assert problem.message.startswith(FAULTS[name].reason)


def as_csv(rows: list[bytes]) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows([["text", "n"], *([json.loads(row)["text"], "1"] for row in rows)])
    return out.getvalue().encode()


def as_parquet(rows: list[bytes]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(row) for row in rows]), out, 7)
    return out.getvalue()


def as_arrow(rows: list[bytes]) -> bytes:
    out, table = io.BytesIO(), pyarrow.Table.from_pylist([json.loads(row) for row in rows])
    with pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return out.getvalue()


KINDS: dict[str, Callable[[list[bytes]], bytes]] = {
    "a.jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "a.json": lambda rows: b"[" + b",\n".join(rows) + b"]",
    "b.json": as_lines,
    "a.csv": as_csv,
    "a.txt": lambda rows: as_lines([json.loads(row)["text"].encode() for row in rows]),
    "a.parquet": as_parquet,
    "a.arrow": as_arrow,
}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_rows_in_any_kind_of_file_are_the_same_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(as_lines(ROWS))
    Path("d/e").mkdir(parents=True)
    Path("d/e", name).write_bytes(KINDS[name](ROWS))
    loaded = load("d")
    assert loaded.train.fingerprint == load("a.jsonl").train.fingerprint
    assert f"d: 1 file: {name}" in loaded.account["train"]["sources"]["d"]["notes"]
    assert f"data.train: d: 1 file: {name}" in loaded.lines
    first = 2 if name == "a.csv" else 1
    assert loaded.train.source(16) == f"d/e/{name}:{16 + first}"


def test_a_row_that_makes_the_tokenizer_panic_is_named_or_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer: Any = byte_level_tokenizer()
    split: Any = pre_tokenizers.Split(Regex("(a|aa)+(?=!)"), "isolated")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    Path("a.jsonl").write_bytes(as_lines([b'{"text": "b"}', b'{"text": "%s"}' % (b"a" * 5000)]))
    data = Data(train=(Source(path="a.jsonl"),), max_length=64)
    with pytest.raises(DataError, match=r"a\.jsonl:2: the tokenizer fails on the row \("):
        load_data(spec_of("pretrain", data), tokenizer)
    dropped = data.model_copy(update={"on_bad_row": "drop", "max_dropped_fraction": 1.0})
    assert len(load_data(spec_of("pretrain", dropped), tokenizer).train) == 1
