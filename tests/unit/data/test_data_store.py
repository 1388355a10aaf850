"""The tokens on the disk: the same ones as in memory, made once, whole or not there, never other ones."""

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
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.cache import rows as rows_module
from dsft.data.cache import store
from dsft.data.cache.block import BlockAccount, BlockBuilder, open_block, save_block
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


def said(rows: StoredRows) -> list[tuple[str, list[int], list[bool], bool]]:
    read = [rows.read(i) for i in range(len(rows.lengths))]
    return [
        (rows.source(i), one.input_ids.tolist(), one.trained.tolist(), one.ended)
        for i, one in enumerate(read)
    ]


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


# --- what is kept is what was made ------------------------------------------------------------------------


@pytest.mark.parametrize("long", [0, 10**6])
def test_a_part_of_a_row_is_that_of_the_whole(
    data: Path, tmp_path: Path, long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "_LONG", long)
    rows = made(data, Cache(tmp_path / "cache"))
    for row in range(0, len(rows.lengths), 7):
        whole = rows.read(row)
        for start, stop in ((0, 3), (2, 9), (5, 400), (0, 400)):
            part = rows.read_part(row, start, stop)
            assert part.input_ids.tolist() == whole.input_ids[start:stop].tolist()
            assert part.trained.tolist() == whole.trained[start:stop].tolist()


def test_the_rows_are_those_of_memory(data: Path, tmp_path: Path) -> None:
    expected, kept = made(data, Cache()), list[CacheSummary]()
    paces: list[TokenizeProgress] = []
    cache = Cache(tmp_path / "cache", progress=paces.append, report=kept.append)
    for rows in (made(data, cache), made(data, cache)):
        assert said(rows) == said(expected)
        assert rows.account == expected.account
        assert rows.digest == expected.digest
        for name in ("lengths", "trained", "ended", "content", "desirable"):
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
    count = len(block_files(tmp_path / "cache"))
    assert count > 5
    assert [one.tokenized for one in kept] == [count, 0]
    assert paces[-1].done == paces[-1].total == count and paces[-1].rows == len(expected.lengths)
    assert expected.source(0).endswith("a.jsonl:1") and expected.source(117).endswith("a.jsonl:120")
    assert expected.account.bad_rows == 1 and expected.account.bad[0][0].endswith("a.jsonl:61")
    assert expected.account.blank_lines == 1


rendered = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=20)


@given(rows=st.lists(rendered, max_size=8), wide=st.booleans())
@settings(max_examples=60, deadline=None)
def test_any_tokens_and_masks_come_back(rows: list[list[tuple[int, bool]]], wide: bool) -> None:
    limit = 2**31 if wide else 2**16
    collected = BlockBuilder("<i4" if wide else "<u2")
    given = [
        Rendered(
            np.array([t % limit for t, _ in row], np.int32), np.array([m for _, m in row], np.bool_), wide
        )
        for row in rows
    ]
    for i, one in enumerate(given):
        collected.add(one, line=2 * i + 1, content=2**64 - 1 - i, desirable=not wide)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        with closing(collected):
            save_block(path, collected.block(BlockAccount(9, 1, 1, ((2, "why"),))), "key", 3)
        block, loaded = open_block(path, "key", 3), safetensors.numpy.load_file(path)
    assert block.account == BlockAccount(9, 1, 1, ((2, "why"),))
    assert len(block) == len(given)
    for i, one in enumerate(given):
        back = block.read(i)
        assert back.input_ids.tolist() == one.input_ids.tolist()
        assert back.trained.tolist() == one.trained.tolist()
        assert (back.ended, block.line(i)) == (wide, 2 * i + 1)
    assert block.arrays["trained"].tolist() == [int(one.trained[1:].sum()) for one in given]
    assert block.arrays["content"].tolist() == [2**64 - 1 - i for i in range(len(given))]
    assert loaded["tokens"].tolist() == block.arrays["tokens"].tolist()


def test_only_the_blocks_that_are_needed_are_made(data: Path, tmp_path: Path) -> None:
    expected = said(made(data, Cache()))
    rows = made(data, Cache(tmp_path / "cache"), max_rows=30)
    assert said(rows) == expected[:30]
    few = block_files(tmp_path / "cache")
    assert 1 < len(few) < 5
    assert said(made(data, Cache(tmp_path / "cache"))) == expected
    assert made(data, Cache(tmp_path / "cache"), max_rows=1000).digest == made(data, Cache()).digest


def test_the_name_of_what_is_kept_is_its_content(data: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    made(data, cache)
    folders = {path.parent for path in block_files(tmp_path / "cache")}
    copy = tmp_path / "elsewhere.jsonl"
    shutil.copy(data, copy)
    assert made(copy, cache).source(0).endswith("elsewhere.jsonl:1")
    assert {path.parent for path in block_files(tmp_path / "cache")} == folders
    last = Renderer(byte_level_tokenizer(), train_on="last")
    tokenized_rows(Source(path=str(data)), last, task="pretrain", cache=cache)
    copy.write_text(copy.read_text(encoding="utf-8").replace("row 3 ", "row 4 "), encoding="utf-8")
    assert made(copy, cache).digest != made(data, cache).digest
    assert len({path.parent for path in block_files(tmp_path / "cache")}) == 3


def test_copies_of_a_file_have_one_set_of_blocks(data: Path, tmp_path: Path) -> None:
    folder, kept = tmp_path / "both", list[CacheSummary]()
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(data, folder / name)
    rows = made(folder, Cache(tmp_path / "cache", report=kept.append))
    assert said(rows) == said(made(folder, Cache()))
    assert kept[0].blocks == 2 * kept[0].tokenized == 2 * len(block_files(tmp_path / "cache"))
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


def test_cores_are_those_that_may_be_used(tmp_path: Path) -> None:
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


# --- another makes them ------------------------------------------------------------------------------------


def test_the_others_are_told_whom_they_wait_for(data: Path, tmp_path: Path) -> None:
    made(data, Cache(tmp_path / "cache"))
    (folder,) = {path.parent for path in block_files(tmp_path / "cache")}
    block_files(tmp_path / "cache")[0].unlink()
    told: list[str] = []
    holds, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_folder(folder):
            holds.set()
            done.wait(LATE)

    other = threading.Thread(target=hold)
    other.start()
    holds.wait(LATE)

    def say(text: str) -> None:
        told.append(text)
        done.set()

    made(data, Cache(tmp_path / "cache", log=say))
    other.join()
    assert f"{data}: waiting for process {os.getpid()} on " in told[0]
    assert "which tokenizes this file" in told[0]


# --- damage -----------------------------------------------------------------------------------------------


def test_damage_of_a_long_row_is_found_at_its_first_part(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in the row it is: the part itself may be sound."""
    monkeypatch.setattr(rows_module, "_LONG", 0)
    made(data, Cache(tmp_path / "cache"))
    path = block_files(tmp_path / "cache")[0]
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    first = header + json.loads(content[8:header])["tokens"]["data_offsets"][0]
    content[first + 2 * 4] ^= 1  # the first row's fifth token of two bytes
    path.write_bytes(content)
    rows_module._reopened.cache_clear()
    rows = made(data, Cache(tmp_path / "cache"))
    assert rows.read_part(1, 0, 2).input_ids.tolist() == rows.read(1).input_ids[:2].tolist()
    with pytest.raises(DamagedDataError, match="start again"):
        rows.read_part(0, 0, 2)


def test_every_damage_is_found(data: Path, tmp_path: Path) -> None:
    """A bit flipped at any place, or a file cut anywhere: made anew, or refused when the row is read."""
    folder, told = tmp_path / "cache", list[str]()
    expected = said(made(data, Cache(folder)))
    path = block_files(folder)[2]
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [0, 3, 7, *range(8, header, 97), *range(header, len(whole), 41), len(whole) - 1]
    damaged = [whole[:i] + bytes([whole[i] ^ (1 << i % 8)]) + whole[i + 1 :] for i in places]
    damaged += [whole[:i] for i in (0, 5, 8, header - 1, header, len(whole) // 2, len(whole) - 1)]
    damaged += [
        whole + b"\0",
        b"\0" * len(whole),
        block_files(folder)[3].read_bytes(),
        os.urandom(len(whole)),
    ]
    remade = refused = 0
    for content in damaged:
        path.write_bytes(content)
        rows_module._reopened.cache_clear()
        told.clear()
        try:
            assert said(made(data, Cache(folder, log=told.append))) == expected
        except DamagedDataError as error:
            refused += 1
            assert str(path) in str(error) and "start again" in str(error)
            assert error.exit_code == 74
            assert not path.exists()
            made(data, Cache(folder))
        else:
            remade += 1
            assert told[0].startswith(f"{path}: ") and told[0].endswith("; its rows are tokenized again")
        assert path.read_bytes() == whole
    print(f"{remade} made anew and {refused} refused of {len(damaged)}")
    assert remade + refused == len(damaged) > 60
    assert min(remade, refused) > 10


def test_a_pair_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
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


def test_a_row_of_another_row_is_refused(data: Path, tmp_path: Path) -> None:
    """Tokens of the same length from elsewhere in the block, as a disk that mixes up its sectors gives."""
    rows = made(data, Cache(tmp_path / "cache"))
    path = block_files(tmp_path / "cache")[0]
    block = path.read_bytes()
    one, other = (rows.read(i).input_ids.astype("<u2").tobytes() for i in (0, 1))
    same = min(len(one), len(other))
    path.write_bytes(block.replace(one[:same], other[:same]))
    rows_module._reopened.cache_clear()
    with pytest.raises(DamagedDataError):
        rows.read(0)


def test_a_disk_that_is_full(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(StorageError, match="cannot be written .* data.cache_dir"):
            made(data, Cache(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not block_files(folder) and not list(folder.glob("*/*.tmp"))
    rows = made(data, Cache(folder))
    assert said(rows) == said(made(data, Cache()))


def test_a_folder_that_cannot_be_made(data: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be locked .* data.cache_dir"):
        made(data, Cache(tmp_path / "cache"))


def test_a_file_that_changes_meanwhile(data: Path, tmp_path: Path) -> None:
    def progress(pace: TokenizeProgress) -> None:
        with data.open("a", encoding="utf-8") as out:
            out.write('{"text": "late"}\n')

    with pytest.raises(DataError, match="written to while its rows were read"):
        made(data, Cache(tmp_path / "cache", progress=progress))
    assert not block_files(tmp_path / "cache")
