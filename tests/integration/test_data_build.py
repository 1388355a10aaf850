"""Tokens made by several processes: at once, killed, interrupted, on a disk that fills up."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsft.data.cache import store
from dsft.data.cache.store import Cache, CacheSummary, StoredRows, TokenizeProgress
from dsft.data.read import files
from dsft.errors import StorageError, WorldError
from tests.integration.builder import made, small_blocks
from tests.launching import LATE
from tests.selected import tiered

ROOT = Path(__file__).resolve().parents[2]
BUILDER = Path(__file__).with_name("builder.py")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "block_starts", files.block_starts)  # put back what small_blocks changes
    monkeypatch.setattr(store, "_SMALL", store._SMALL)
    small_blocks()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Some eight blocks."""
    path = tmp_path / "a.jsonl"
    rows = (json.dumps({"text": f"row {i} " + "word " * (i % 20)}) for i in range(120))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def contents(rows: StoredRows) -> list[tuple[str, list[int]]]:
    return [(rows.source(i), rows.read(i).input_ids.tolist()) for i in range(len(rows.lengths))]


def block_folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/block-?????"))


def start(
    data: Path, folder: Path, workers: int = 0, seconds: float = 0, blocks: int = 0
) -> subprocess.Popen[str]:
    words = [str(data), str(folder), str(workers), str(seconds), str(blocks)]
    return subprocess.Popen(
        [sys.executable, str(BUILDER), *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("count", tiered([2, 4], [4]))
def test_concurrent_builds_build_each_block_once(data: Path, tmp_path: Path, count: int) -> None:
    started = [start(data, tmp_path / "cache", seconds=0.02) for _ in range(count)]
    printed = [process.communicate(timeout=LATE)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0] * count
    digests, counts = zip(*((line.split()[1], int(line.split()[2])) for *_, line in printed), strict=True)
    assert set(digests) == {made(data, Cache()).digest}
    assert sum(counts) == max(counts) == len(block_folders(tmp_path / "cache")) > 5  # one made all


def test_killed_build_resumes_and_leaves_no_worker(data: Path, tmp_path: Path) -> None:
    data.write_text(3 * data.read_text())  # more blocks than its workers have begun when it is killed
    expected, folder = made(data, Cache()), tmp_path / "cache"
    process = start(data, folder, workers=2, blocks=3)
    assert process.stdout is not None
    assert any(line in ("made 3\n", "made 4\n") for line in process.stdout)
    children = psutil.Process(process.pid).children()
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2 and len(children) == 3  # and multiprocessing's resource tracker
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(children, timeout=LATE)
    assert not alive
    before = {path: path.stat().st_mtime_ns for path in block_folders(folder)}
    assert 3 <= len(before) < 16
    half = next(iter(before)).parent / "block-00016.tmp"
    half.mkdir(exist_ok=True)
    (half / "tokens.npy").write_bytes(b"half")
    kept: list[CacheSummary] = []
    rows = made(data, Cache(folder, report=kept.append))
    assert contents(rows) == contents(expected)
    assert kept[0].tokenized == kept[0].blocks - len(before)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(folder.glob("*/*.tmp"))


@pytest.mark.parametrize("interrupted", [True, False])
def test_workers_end_with_the_build(data: Path, tmp_path: Path, interrupted: bool) -> None:
    """With Ctrl-C; and with one of them, killed as a full memory does it, while blocks are left to make."""
    data.write_text(5 * data.read_text())
    workers: list[Any] = []

    def progress(pace: TokenizeProgress) -> None:
        if not workers:
            workers.extend(multiprocessing.active_children())
            if interrupted:
                raise KeyboardInterrupt
            workers[0].kill()

    with pytest.raises(KeyboardInterrupt if interrupted else WorldError) as error:
        made(data, Cache(tmp_path / "cache", 2, progress=progress))
    if not interrupted:
        assert "a process that tokenized rows was killed by signal 9" in str(error.value)
        assert "set a smaller data.num_workers" in str(error.value)
    assert len(workers) == 2
    assert not any(worker.is_alive() for worker in workers)
    assert contents(made(data, Cache(tmp_path / "cache", 2))) == contents(made(data, Cache()))


def test_full_disk_during_a_build(data: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # they inherit it
    try:
        with pytest.raises(StorageError, match="cannot be written .* data.cache_dir"):
            made(data, Cache(tmp_path / "cache", 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not block_folders(tmp_path / "cache")
    assert contents(made(data, Cache(tmp_path / "cache"))) == contents(made(data, Cache()))
