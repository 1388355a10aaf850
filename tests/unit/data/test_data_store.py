"""The token cache: rows equal those in memory; a block is complete or absent, and is checked when opened."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.cache import rows as rows_module
from dsft.data.cache import store
from dsft.data.cache.block import BlockAccount, BlockBuilder, DamagedBlockError, open_block, save_block
from dsft.data.cache.store import Cache, CacheSummary, StoredRows, TokenizeProgress, tokenized_rows
from dsft.data.read import files
from dsft.data.render.renderer import Renderer
from dsft.data.rows import Rendered
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DamagedDataError, DataError, StorageError
from dsft.spec.schema import Source
from dsft.system import lock
from dsft.system.host import cores
from dsft.system.lock import lock_folder
from tests.launching import LATE

ROOT = Path(__file__).resolve().parents[3]
RENDERER = Renderer(byte_level_tokenizer())
BLOCK_BYTES = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of a kilobyte, worth a worker."""
    monkeypatch.setattr(files, "block_starts", partial(files.block_starts, every=BLOCK_BYTES))
    monkeypatch.setattr(store, "_SMALL", 0)
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.05)
    yield
    rows_module._reopened.cache_clear()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some ten blocks, with blank lines and a mistake."""
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": f"row {i} " + "word " * (i % 20)}) for i in range(120)]
    rows[17], rows[60] = "", '{"text": 3}'
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def made(path: Path, cache: Cache, **options: Any) -> StoredRows:
    return tokenized_rows(Source(path=str(path)), RENDERER, task="pretrain", cache=cache, **options)


def contents(rows: StoredRows) -> list[tuple[str, list[int], list[bool], bool]]:
    read = [rows.read(i) for i in range(len(rows.lengths))]
    return [
        (rows.source(i), one.input_ids.tolist(), one.trained.tolist(), one.ended)
        for i, one in enumerate(read)
    ]


def block_folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/block-?????"))


# --- the same rows as in memory ----------------------------------------------------------------------------


def test_a_part_of_a_row_equals_that_of_the_whole_row(data: Path, tmp_path: Path) -> None:
    rows = made(data, Cache(tmp_path / "cache"))
    for row in range(0, len(rows.lengths), 7):
        whole = rows.read(row)
        for start, stop in ((0, 3), (2, 9), (5, 400), (0, 400)):
            part = rows.read(row, start, stop)
            assert part.input_ids.tolist() == whole.input_ids[start:stop].tolist()
            assert part.trained.tolist() == whole.trained[start:stop].tolist()


def test_rows_of_the_cache_equal_those_in_memory(data: Path, tmp_path: Path) -> None:
    expected, reports = made(data, Cache()), list[CacheSummary]()
    shown: list[TokenizeProgress] = []
    cache = Cache(tmp_path / "cache", progress=shown.append, report=reports.append)
    for rows in (made(data, cache), made(data, cache)):
        assert contents(rows) == contents(expected)
        assert rows.account == expected.account
        assert rows.digest == expected.digest
        assert np.array_equal(rows.values["label"], expected.values["label"])
        for name in ("lengths", "trained", "ended", "content"):
            assert np.array_equal(getattr(rows, name), getattr(expected, name)), name
        some = np.arange(1, len(rows.lengths), 3, dtype=np.int32)  # of many blocks
        counts, spans = rows.spans(some)
        each = [rows.spans(np.array([i], np.int32)) for i in some]
        assert [count for (count,), _ in each] == counts.tolist()
        assert [span for _, own in each for span in own.tolist()] == spans.tolist()
        masks = [
            np.flatnonzero(np.diff(rows.read(int(i)).trained, prepend=False, append=False)) for i in some
        ]
        assert [edge for edges in masks for edge in edges.tolist()] == spans.flatten().tolist()
        assert [rows.read(int(i)).input_ids[0] for i in some] == rows.first_tokens(some).tolist()
    count = len(block_folders(tmp_path / "cache"))
    assert count > 5
    assert [one.tokenized for one in reports] == [count, 0]
    assert shown[-1].done == shown[-1].total == count and shown[-1].rows == len(expected.lengths)
    assert expected.source(0).endswith("a.jsonl:1") and expected.source(117).endswith("a.jsonl:120")
    assert expected.account.bad_rows == 1 and expected.account.bad[0][0].endswith("a.jsonl:61")
    assert expected.account.blank_lines == 1


rendered = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=20)


@given(rows=st.lists(rendered, max_size=8), wide=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_block_returns_any_tokens_and_masks(rows: list[list[tuple[int, bool]]], wide: bool) -> None:
    limit = 2**31 if wide else 2**16
    collected = BlockBuilder("<i4" if wide else "<u2", ("label",))
    given = [
        Rendered(
            np.array([t % limit for t, _ in row], np.int32), np.array([m for _, m in row], np.bool_), wide
        )
        for row in rows
    ]
    for i, one in enumerate(given):
        collected.add(one, line=2 * i + 1, content=2**64 - 1 - i, own={"label": i} if wide else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "block")
        save_block(path, collected.block(BlockAccount(9, 1, 1, ((2, "why"),))), "key", 3)
        block, tokens = open_block(path, "key", 3), np.load(path / "tokens.npy")
    assert block.account == BlockAccount(9, 1, 1, ((2, "why"),))
    assert len(block) == len(given)
    for i, one in enumerate(given):
        back = block.read(i)
        assert back.input_ids.tolist() == one.input_ids.tolist()
        assert back.trained.tolist() == one.trained.tolist()
        assert (back.ended, block.line(i)) == (wide, 2 * i + 1)
    assert block.arrays["trained"].tolist() == [int(one.trained[1:].sum()) for one in given]
    assert block.arrays["content"].tolist() == [2**64 - 1 - i for i in range(len(given))]
    assert block.arrays["labels"].tolist() == [i if wide else 1 for i in range(len(given))]
    assert tokens.tolist() == block.arrays["tokens"].tolist()


def test_max_rows_tokenizes_only_the_blocks_it_needs(data: Path, tmp_path: Path) -> None:
    expected = contents(made(data, Cache()))
    rows = made(data, Cache(tmp_path / "cache"), max_rows=30)
    assert contents(rows) == expected[:30]
    few = block_folders(tmp_path / "cache")
    assert 1 < len(few) < 5
    assert contents(made(data, Cache(tmp_path / "cache"))) == expected
    assert made(data, Cache(tmp_path / "cache"), max_rows=1000).digest == made(data, Cache()).digest


def test_the_key_of_a_block_follows_from_content_and_renderer(data: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    made(data, cache)
    folders = {path.parent for path in block_folders(tmp_path / "cache")}
    copy = tmp_path / "elsewhere.jsonl"
    shutil.copy(data, copy)
    assert made(copy, cache).source(0).endswith("elsewhere.jsonl:1")
    assert {path.parent for path in block_folders(tmp_path / "cache")} == folders
    last = Renderer(byte_level_tokenizer(), train_on="last")
    tokenized_rows(Source(path=str(data)), last, task="pretrain", cache=cache)
    copy.write_text(copy.read_text(encoding="utf-8").replace("row 3 ", "row 4 "), encoding="utf-8")
    assert made(copy, cache).digest != made(data, cache).digest
    assert len({path.parent for path in block_folders(tmp_path / "cache")}) == 3


def test_copies_of_a_file_share_their_blocks(data: Path, tmp_path: Path) -> None:
    folder, reports = tmp_path / "both", list[CacheSummary]()
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(data, folder / name)
    rows = made(folder, Cache(tmp_path / "cache", report=reports.append))
    assert contents(rows) == contents(made(folder, Cache()))
    assert reports[0].blocks == 2 * reports[0].tokenized == 2 * len(block_folders(tmp_path / "cache"))
    assert rows.source(118).endswith("b.jsonl:1")


@pytest.mark.parametrize("main", ["dsft/train.py", "dsft/cli.py", "dsft/data/cache/build.py"])
def test_workers_import_no_torch(main: str) -> None:
    """A spawned process imports its parent's main module first."""
    code = (
        f"import runpy, sys; runpy.run_path('{main}', run_name='__mp_main__')\n"
        "print(*({'torch', 'transformers'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert answer.stdout == "\n"


def test_cores_follow_affinity_and_cgroup(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    own, root = tmp_path / "own", tmp_path / "root"
    inner = root / "a" / "b"
    inner.mkdir(parents=True)
    assert cores(own, root) == affinity
    own.write_text("0::/a/b\n", encoding="ascii")
    assert cores(own, root) == affinity
    (inner / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert cores(own, root) == affinity
    (tmp_path / "cpu.max").write_text("50000 100000\n", encoding="ascii")
    (root / "a" / "cpu.max").write_text(f"{(affinity + 1) * 100000} 100000\n", encoding="ascii")
    assert cores(own, root) == affinity
    (root / "a" / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    assert cores(own, root) == 1


# --- several processes ------------------------------------------------------------------------------------


def test_a_waiting_process_logs_which_one_it_waits_for(data: Path, tmp_path: Path) -> None:
    made(data, Cache(tmp_path / "cache"))
    (folder,) = {path.parent for path in block_folders(tmp_path / "cache")}
    shutil.rmtree(block_folders(tmp_path / "cache")[0])
    logged: list[str] = []
    holds, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_folder(folder):
            holds.set()
            done.wait(LATE)

    other = threading.Thread(target=hold)
    other.start()
    holds.wait(LATE)

    def say(text: str) -> None:
        logged.append(text)
        done.set()

    made(data, Cache(tmp_path / "cache", log=say))
    other.join()
    assert f"{data}: waiting for process {os.getpid()} on " in logged[0]
    assert "which tokenizes this file" in logged[0]


# --- damage -----------------------------------------------------------------------------------------------


def test_a_damaged_block_is_rebuilt_when_the_cache_is_opened(data: Path, tmp_path: Path) -> None:
    """A bit flipped anywhere but in the values of the tokens, or a file cut, exchanged or missing."""
    folder, logged = tmp_path / "cache", list[str]()
    expected = contents(made(data, Cache(folder)))
    block, other = block_folders(folder)[2:4]
    rebuilt = harmless = 0
    for path in sorted(block.iterdir()):
        whole = path.read_bytes()
        end = 64 if path.name == "tokens.npy" else len(whole)  # an .npy file begins with a header
        places = [*range(0, end, 1 + end // 40), end - 1]
        damaged = [whole[:i] + bytes([whole[i] ^ (1 << i % 7)]) + whole[i + 1 :] for i in places]
        damaged += [whole[:i] for i in (0, 5, 8, len(whole) // 2, len(whole) - 1)]
        damaged += [b"\0" * len(whole), os.urandom(len(whole))]
        damaged += [(other / path.name).read_bytes()] * (path.name != "tokens.npy")
        for content in damaged:
            path.write_bytes(content)
            rows_module._reopened.cache_clear()
            logged.clear()
            assert contents(made(data, Cache(folder, log=logged.append))) == expected
            rebuilt, harmless = rebuilt + bool(logged), harmless + (not logged)
            if logged:
                (line,) = logged
                assert line.startswith(f"{block}: ") and line.endswith("; its rows are tokenized again")
                assert path.read_bytes() == whole
            path.write_bytes(whole)
    assert rebuilt > 120 and harmless < 5  # a header's padding may be any white space
    for name in ("block.json", "tokens.npy"):
        (block / name).unlink()
        assert contents(made(data, Cache(folder))) == expected


def test_a_cache_that_is_removed_during_a_run_gives_one_line(data: Path, tmp_path: Path) -> None:
    rows = made(data, Cache(tmp_path / "cache"))
    (block_folders(tmp_path / "cache")[0] / "tokens.npy").unlink()
    rows_module._reopened.cache_clear()
    with pytest.raises(
        DamagedDataError, match="start again to tokenize the rows of .*a.jsonl again"
    ) as error:
        rows.read(0)
    assert error.value.exit_code == 74


def test_a_block_of_another_key_is_not_used(data: Path, tmp_path: Path) -> None:
    made(data, Cache(tmp_path / "cache"))
    block = block_folders(tmp_path / "cache")[0]
    with pytest.raises(DamagedBlockError, match="it belongs to other rows"):
        open_block(block, "another key", 0)


def test_a_pair_is_dropped_whole_if_one_answer_is_refused(tmp_path: Path) -> None:
    """This template writes no calls, which the second pair's rejected answer has."""
    called = {"role": "assistant", "content": "b", "tool_calls": [{"name": "f", "arguments": {}}]}
    pairs = [
        {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": rejected}
        for rejected in ("c", called, "d")
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    rows = tokenized_rows(Source(path=str(path)), RENDERER, task="dpo")
    assert [rows.source(i).rsplit(":")[-1] for i in range(len(rows.lengths))] == ["1", "1", "3", "3"]
    ((place, reason),) = rows.account.bad
    assert place.endswith(":2")
    assert "the row has tool calls, which the chat template leaves out" in reason


def test_a_full_disk_is_one_line_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
    try:
        with pytest.raises(StorageError, match="cannot be written .* data.cache_dir"):
            made(data, Cache(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not block_folders(folder) and not list(folder.glob("*/*.tmp"))
    rows = made(data, Cache(folder))
    assert contents(rows) == contents(made(data, Cache()))


def test_a_cache_folder_that_cannot_be_created(data: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be locked .* data.cache_dir"):
        made(data, Cache(tmp_path / "cache"))


def test_a_file_that_changes_while_it_is_read(data: Path, tmp_path: Path) -> None:
    def progress(pace: TokenizeProgress) -> None:
        with data.open("a", encoding="utf-8") as out:
            out.write('{"text": "late"}\n')

    with pytest.raises(DataError, match="written to while its rows were read"):
        made(data, Cache(tmp_path / "cache", progress=progress))
    assert not block_folders(tmp_path / "cache")
