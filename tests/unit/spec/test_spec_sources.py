"""What validate says of the paths of data: by their names, and by what lies there. No file is opened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dsft
from dsft.errors import SpecError
from dsft.spec.load import load_spec
from dsft.spec.sources import HubData, hub_data, kind_of, short_name

SPEC = """
name: a
task: sft
model: {name_or_path: org/model}
data: {train: [{path: PATH}], max_length: 16}
train: {max_steps: 1, micro_batch_size: 1, global_batch_size: 1}
optim: {name: sgd, learning_rate: 0.1}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("d/a.jsonl", "d/e/b.parquet", "other/README.md", "x.xlsx", "x.jsonl.gz", "x.parquet.gz"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(b"not looked into")
    for name in ("saved/dataset_dict.json", "saved/train/state.json", "saved/train/dataset_info.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")


def messages(path: str) -> list[str]:
    Path("spec.yaml").write_text(SPEC.replace("PATH", f"'{path}'"))
    try:
        load_spec("spec.yaml", [])
    except SpecError as error:
        return [problem.message for problem in error.problems]
    return []


def test_a_name_that_no_file_can_have() -> None:
    Path("spec.yaml").write_text(SPEC.replace("PATH", '"a\\0*"'))
    with pytest.raises(SpecError, match="does not exist"):
        load_spec("spec.yaml", [])


@pytest.mark.parametrize("path", [
    "d/a.jsonl", "d", "d/", ".", "d/*.jsonl", "**/*.parquet", "d/[a-b]*", "x.jsonl.gz", "builtin:quickstart",
    "builtin:quickstart-pairs",
    "org/data", "org/data:test", "org/data@v1.0:sub:train", "o/d@refs/convert/parquet",  # not looked up
])  # fmt: skip
def test_what_is_there_is_taken(path: str) -> None:
    assert messages(path) == []


READ = ".jsonl, .ndjson, .json, .txt, .csv, .tsv (each also .gz), .parquet and .arrow"


@pytest.mark.parametrize("path, reason", [
    ("x.xlsx", f"'x.xlsx': .xlsx is not supported; supported are {READ}"),
    ("x.parquet.gz", f"'x.parquet.gz': .gz is not supported; supported are {READ}"),
    ("other", f"'other': the folder has no data files, only README.md; supported are {READ}"),
    ("other/*", f"'other/*': the pattern has no data files, only README.md; supported are {READ}"),
    ("no/*.json", "'no/*.json': the pattern matches no file (relative to the current folder); correct it"),
    ("saved", "'saved': this saved data set has splits (train); give one, such as saved/train"),
    ("saved/train", "'saved/train': its state.json has no list of the data files; save it again"),
    ("d/train", "'d/train': does not exist, and is no hub id, since d is a folder here; correct the path"),
    ("gone.jsonl", "'gone.jsonl' does not exist (relative to the current folder); correct the path"),
    ("/nowhere/a", "'/nowhere/a' does not exist; correct the path"),
    ("a/b/c", "'a/b/c' does not exist (relative to the current folder); correct the path"),
])  # fmt: skip
def test_what_is_not_there_or_not_read_is_one_sentence(path: str, reason: str) -> None:
    assert messages(path) == [reason]


@pytest.mark.parametrize("path", ["x" * 5000, "a\\0b", "[", "**", "d/../d/a.jsonl"])
def test_odd_names_end_in_a_sentence_or_a_file(path: str) -> None:
    assert all(message.endswith(("correct the path", "correct it", READ)) for message in messages(path))


def test_nothing_is_asked_of_a_network_and_nothing_large_is_imported() -> None:
    Path("spec.yaml").write_text(SPEC.replace("PATH", "org/data:test"))
    code = (
        "import socket, sys\n"
        "socket.socket.connect = None\n"
        "from dsft.spec.load import load_spec\n"
        "load_spec('spec.yaml', [])\n"
        "print([name for name in ('datasets', 'numpy', 'pandas', 'pyarrow', 'torch') if name in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(dsft.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_kinds_of_files() -> None:
    names = ("a.JSONL", "a.ndjson", "a.json.gz", "a.txt", "a.TSV.GZ", "a.parquet", "a.arrow")
    assert [kind_of(name) for name in names] == ["jsonl", "jsonl", "json", "text", "tsv", "parquet", "arrow"]
    assert [kind_of(name) for name in ("a", "a.gz", "a.arrow.gz", "a.xlsx", ".jsonl", "jsonl")] == [None] * 6


def test_hub_ids() -> None:
    assert hub_data("a/b") == HubData("a/b", None, None, "train")
    assert hub_data("a/b:test") == HubData("a/b", None, None, "test")
    assert hub_data("a-1/b.c_2@v1:sub.x:test") == HubData("a-1/b.c_2", "v1", "sub.x", "test")
    for name in (
        "a", "a/b/c", "a/b:", "a/b:c:", "a/b@", "a/b:c:d:e", "a/b.csv", "/a/b", "./a/b", "a/b\n", "a/b:x[:9]",
    ):  # fmt: skip
        assert hub_data(name) is None


def test_short_names() -> None:
    given = {
        "x/held out.v2.jsonl": "held_out.v2", "rows.jsonl.gz": "rows", "data/books.v2": "books.v2",
        "data/books/": "books", "data/web/2025-*/**/*.jsonl": "web", "*.jsonl": "data", ".": "data",
        "../..": "data", "owner/name@v1:main:test": "name_v1_main_test", "builtin:quickstart": "quickstart",
    }  # fmt: skip
    assert {path: short_name(path) for path in given} == given
