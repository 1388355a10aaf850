"""What a source names: files, folders, patterns, saved data sets, ids of the hub; and their digests."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

import dsft
from dsft.data.read.files import blocks, data_files, file_digest, file_notes, read_block
from dsft.errors import DataError, MissingInputError
from dsft.system import digest

ROW = b'{"text": "a"}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*names: str, content: bytes = ROW) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)


def names(path: str) -> list[str]:
    return [file.name for file in data_files(path)]


def rows(path: str) -> list[Any]:
    lines = [line for file in data_files(path) for block in blocks(file) for line in read_block(block)]
    assert not [line for line in lines if line.mistake]
    return [line.row for line in lines]


# --- folders and patterns ---------------------------------------------------------------------------------


def test_a_folder_is_its_data_files_sorted_and_what_is_left_out_is_told() -> None:
    write("d/b.jsonl", "d/a.JSON", "d/sub/c.txt.gz", "d/sub.csv", "d/README.md", "d/.x.jsonl", "d/.git/a.txt")
    files = data_files("d")
    assert [file.name for file in files] == ["d/a.JSON", "d/b.jsonl", "d/sub/c.txt.gz", "d/sub.csv"]
    assert [file.kind for file in files] == ["json", "jsonl", "text", "csv"]
    assert files[0].notes == (
        "d: 4 files: a.JSON, b.jsonl, c.txt.gz, sub.csv",
        "d: ignored, since these are not data files: .git, .x.jsonl, README.md",
    )
    assert file_notes(files[0]) == files[0].notes and file_notes(files[1]) == ()


def test_links_to_folders_are_followed_each_folder_once() -> None:
    write("elsewhere/a.jsonl")
    Path("d").mkdir()
    Path("d/link").symlink_to("../elsewhere")
    Path("d/round").symlink_to("../d")
    assert names("d") == ["d/link/a.jsonl"]


def test_patterns() -> None:
    write("d/a.jsonl", "d/b.jsonl", "d/e/c.jsonl", "d/notes.md", "d/[x].txt")
    assert names("d/*.jsonl") == ["d/a.jsonl", "d/b.jsonl"]
    assert names("d/**/*.jsonl") == ["d/a.jsonl", "d/b.jsonl", "d/e/c.jsonl"]
    assert names("d/[b-z]*") == ["d/b.jsonl"]
    assert names("d/[x].txt") == ["d/[x].txt"]  # a file of this name is meant before a pattern


def test_many_files_are_told_of_in_short() -> None:
    write(*(f"d/{n:03}.jsonl" for n in range(40)))
    assert data_files("d")[0].notes[0] == (
        "d: 40 files: 000.jsonl, 001.jsonl, 002.jsonl, 003.jsonl, 004.jsonl and 35 more"
    )


# --- the hub ----------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """`datasets.load_dataset` as it answers for one id; gives what it was asked."""
    import pyarrow

    asked: list[Any] = []
    path = Path(f"cache/{COMMIT}/data-train.arrow").absolute()

    def load(name: str, subset: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, subset, split, revision))
        if name != "owner/name":
            raise ConnectionError("Couldn't reach 'owner/name' on the Hub\n(offline)")
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"text": ["a", "b"]})
        with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
        cache_files = [] if split == "empty" else [{"filename": str(path)}]
        return type("Data", (), {"cache_files": cache_files, "__len__": lambda self: 2})()

    module = ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    yield asked


def test_a_hub_id_is_loaded_into_files_and_its_revision_told(hub: list[Any]) -> None:
    (file,) = data_files("owner/name@v1.0:main:test")
    assert hub == [("owner/name", "main", "test", "v1.0")]
    assert file.name == "owner/name/data-train.arrow"
    said = f"owner/name@v1.0:main:test: from the hub, split test, revision {COMMIT}, 2 rows"
    assert file.notes == (said,)
    assert rows("owner/name") == [{"text": "a"}, {"text": "b"}]
    assert hub[1:] == [("owner/name", None, "train", None)]


def test_a_file_or_folder_is_meant_before_a_hub_id(hub: list[Any]) -> None:
    write("owner/name/a.jsonl")
    assert names("owner/name") == ["owner/name/a.jsonl"]
    with pytest.raises(
        MissingInputError, match="owner/nam: does not exist, and is no hub id, since owner is a fo"
    ):
        names("owner/nam")
    assert hub == []


def test_what_is_not_to_be_had_is_one_sentence(hub: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.data.read.files.hub_obstacle", lambda: None)
    with pytest.raises(MissingInputError) as caught:
        names("nobody/nothing")
    assert str(caught.value) == (
        "data nobody/nothing: there is no such file, and it cannot be loaded from the hub (Couldn't reach "
        "'owner/name' on the Hub (offline)); correct the path (owner/name[@revision][:[subset:]split]), set "
        "HF_ENDPOINT to a mirror, or set HF_TOKEN if the data set is private"
    )
    monkeypatch.setattr("dsft.data.read.files.hub_obstacle", lambda: "HF_HUB_OFFLINE=1 is set")
    with pytest.raises(
        MissingInputError, match=r"\(HF_HUB_OFFLINE=1 is set\); download it once into the cache"
    ):
        names("nobody/nothing")
    with pytest.raises(MissingInputError, match=f"cache has only revision {COMMIT};"):
        names(f"owner/name@{'0' * 40}")
    with pytest.raises(MissingInputError, match="the split empty of owner/name has no rows"):
        names("owner/name:empty")


@pytest.mark.parametrize(
    "name", ["name", "a/b/c", "owner/name:", "owner/name:a:b:c", "a/b.jsonl", "../b", "a/b c"]
)
def test_what_is_no_hub_id_is_not_asked_for(hub: list[Any], name: str) -> None:
    with pytest.raises(MissingInputError, match="there is no such file"):
        names(name)
    assert hub == []


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as `datasets` asks for: owner/name has a Parquet file, owner/code a script."""

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].split("/")[1:]
        body: Any = None
        if parts[0] == "datasets":  # datasets/OWNER/NAME/resolve/REVISION/FILE
            body = HUB.get(parts[2], {}).get(parts[-1])
        elif parts[4:5] == ["revision"]:  # api/datasets/OWNER/NAME/revision/REVISION
            body = json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode()
        elif parts[4:5] == ["tree"]:
            files = HUB["name"].items()
            listed = [{"type": "file", "path": k, "size": len(v), "oid": "0" * 40} for k, v in files]
            body = json.dumps(listed).encode()
        self.send_response(404 if body is None else 200)
        headers = {"Content-Length": len(body or b""), "X-Repo-Commit": COMMIT, "ETag": f'"{hash(body)}"'}
        missing = "EntryNotFound" if "owner" in parts else "RepoNotFound"
        for key, value in (headers | ({"X-Error-Code": missing} if body is None else {})).items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        pass


def parquet() -> bytes:
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), out)
    return out.getvalue()


CARD = b"---\nconfigs: [{config_name: main, data_files: [{split: test, path: a.parquet}]}]\n---\n"
HUB = {
    "name": {"README.md": CARD, "a.parquet": parquet()},
    "code": {"README.md": b"", "code.py": b"open('it_ran', 'w')"},
}
ASK = """
import sys
from dsft.data.read.files import blocks, data_files, read_block
print([name for name in ('datasets', 'pandas', 'pyarrow', 'torch', 'transformers') if name in sys.modules])
for name in ('owner/name:test', 'owner/name:main:test', 'owner/name', 'owner/code', 'nobody/nothing'):
    try:
        (file,) = data_files(name)
        print([line.row for block in blocks(file) for line in read_block(block)], *file.notes)
    except Exception as error:
        print(type(error).__name__, error)
print([name for name in ('torch', 'transformers') if name in sys.modules])
import datasets
made = datasets.Dataset.from_list([{'text': str(n)} for n in range(10)])
datasets.DatasetDict({'train': made, 'test': made.select(range(2))}).save_to_disk('saved')
made.save_to_disk('shards', num_shards=3)
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder in which `datasets` itself was at work with a hub of this machine, and what it said."""
    folder = tmp_path_factory.mktemp("asked")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever)
    thread.start()
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(folder)}
    env["PYTHONPATH"] = str(Path(dsft.__file__).parents[1])
    command = [sys.executable, "-c", ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.splitlines()


def test_a_mirror_is_asked_and_no_code_of_it_runs(asked: tuple[Path, list[str]]) -> None:
    folder, said = asked
    rows = "[{'text': 'a'}, {'text': 'b'}] owner/name"
    told = f"from the hub, split test, revision {COMMIT}, 2 rows"
    assert said[1:3] == [f"{rows}:test: {told}", f"{rows}:main:test: {told}"]
    refused = ('Unknown split "train"', "scripts are no longer supported", "doesn't exist on the Hub")
    for line, reason in zip(said[3:6], refused, strict=True):
        assert line.startswith("MissingInputError data ") and reason in line
    assert said[:1] == said[6:] == ["[]"]  # what was imported
    assert not (folder / "it_ran").exists()


def test_a_data_set_that_datasets_saved(
    asked: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(asked[0])
    Path("saved/train/cache-1.arrow").write_bytes(b"of an earlier map()")
    assert rows("saved/train") == [{"text": str(n)} for n in range(10)]
    assert rows("shards") == rows("saved/train")
    assert len(names("shards")) == 3
    with pytest.raises(MissingInputError, match=r"splits \(test, train\); give one, such as saved/test"):
        names("saved")


# --- digests ----------------------------------------------------------------------------------------------


def digest_of(path: str, memory: str | None = "memory") -> str:
    (file,) = data_files(path)
    return file_digest(file, Path(memory) if memory else None)


def set_time(path: str, seconds_ago: float) -> None:
    os.utime(path, ns=(time.time_ns(), time.time_ns() - int(seconds_ago * 1e9)))


def test_a_digest_is_of_the_content_and_of_how_it_is_read() -> None:
    write("a.jsonl", "b.jsonl", "c.txt")
    write("d.jsonl", content=ROW + ROW)
    write("e.jsonl.gz", content=gzip.compress(ROW))
    assert digest_of("a.jsonl", None) == digest_of("b.jsonl") == digest_of("b.jsonl")
    kinds = ("a.jsonl", "c.txt", "d.jsonl", "e.jsonl.gz", "builtin:quickstart", "builtin:quickstart-heldout")
    assert len({digest_of(name) for name in kinds}) == 6


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content was hashed."""
    found: list[str] = []
    real = digest._hash

    def record(path: Path, read: Any) -> str:
        found.append(path.name)
        return real(path, read)

    monkeypatch.setattr(digest, "_hash", record)
    return found


def test_an_old_file_is_hashed_once_and_again_when_it_changed(hashed: list[str]) -> None:
    write("a.jsonl")
    set_time("a.jsonl", 10)
    first = digest_of("a.jsonl")
    assert digest_of("a.jsonl") == first and hashed == ["a.jsonl"]
    write("a.jsonl", content=ROW.replace(b"a", b"b"))  # the same size, another time
    set_time("a.jsonl", 9)
    assert digest_of("a.jsonl") != first and len(hashed) == 2
    os.replace("a.jsonl", "b.jsonl")
    write("a.jsonl")
    os.utime("a.jsonl", ns=(0, Path("b.jsonl").stat().st_mtime_ns))  # size and time as before, another file
    assert digest_of("a.jsonl") == first and len(hashed) == 3


def test_a_file_whose_time_was_put_back_is_hashed_again(hashed: list[str]) -> None:
    """As `cp -p` over it does, or an archive whose files all have one time."""
    write("a.jsonl")
    os.utime("a.jsonl", ns=(0, 0))
    first = digest_of("a.jsonl")
    before = Path("a.jsonl").stat()
    time.sleep(0.02)  # more than a tick of the kernel's clock
    with Path("a.jsonl").open("r+b") as file:
        file.write(ROW.replace(b"a", b"b"))
    os.utime("a.jsonl", ns=(0, 0))
    after = Path("a.jsonl").stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (after.st_size, 0, after.st_ino)
    assert digest_of("a.jsonl") != first and len(hashed) == 2


def test_a_file_of_the_last_two_seconds_is_not_remembered(hashed: list[str]) -> None:
    write("a.jsonl")
    for seconds_ago in (0, 1.5, -5):
        set_time("a.jsonl", seconds_ago)
        digest_of("a.jsonl")
        digest_of("a.jsonl")
    assert len(hashed) == 6
    assert not list(Path().glob("memory/*.json"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 3}', b"\xff"])
def test_a_damaged_memory_is_made_anew(hashed: list[str], content: bytes) -> None:
    write("a.jsonl")
    set_time("a.jsonl", 10)
    first = digest_of("a.jsonl")
    (known,) = Path("memory").iterdir()
    known.write_bytes(content)
    assert digest_of("a.jsonl") == first and len(hashed) == 2
    assert json.loads(known.read_text())["sha256"] != first  # of the content alone


def test_a_folder_that_cannot_be_written_costs_time_alone(hashed: list[str]) -> None:
    write("a.jsonl", "memory")  # a file where the folder should be
    set_time("a.jsonl", 10)
    assert digest_of("a.jsonl") == digest_of("a.jsonl") and len(hashed) == 2


def test_a_file_that_changes_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.jsonl")
    real = digest._hash

    def change(path: Path, read: Any) -> str:
        write("a.jsonl", content=ROW + ROW)
        return real(path, read)

    monkeypatch.setattr(digest, "_hash", change)
    with pytest.raises(DataError, match="a.jsonl: has another size or time than before"):
        digest_of("a.jsonl")
