"""A run's folder on a swap disk: removed by the last of its ranks, or at the next start after a kill; never
a living process's, and never what dsft and DeepSpeed have not written."""

import json
import multiprocessing
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dsft.errors import StorageError
from dsft.rank.swap import MARKER, remove_stale_folders, shared_swap_folder

RUN = Path("/runs/mine")
SWAPPED = Path("zero_stage_3") / "optimizer" / "rank0" / "0_1.tensor.swp"


def swap(folder: Path, name: Path = SWAPPED) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1234")
    return path


def rank(disk: Path, nonce: str, pipe: Connection) -> None:
    with shared_swap_folder(disk, nonce, RUN) as folder:
        swap(folder)
        pipe.send(True)
        pipe.recv()


def started(disk: Path, nonce: str) -> tuple[multiprocessing.Process, Connection]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=rank, args=(disk, nonce, there))
    process.start()
    assert here.recv()
    return process, here  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:.*fork")
def test_the_last_rank_removes_the_folder(tmp_path: Path) -> None:
    process, pipe = started(tmp_path, "a")
    with shared_swap_folder(tmp_path, "a", RUN) as folder:
        swap(folder, Path("zero_stage_3") / "fp32params" / "rank1" / "7_param.tensor.swp")
    assert (folder / SWAPPED).exists(), "another rank still lives"
    pipe.send(True)
    process.join()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*fork")
def test_after_a_kill_the_next_start_removes_it_and_no_living_one(tmp_path: Path) -> None:
    killed, _ = started(tmp_path, "killed")
    living, pipe = started(tmp_path, "living")
    os.kill(killed.pid or 0, signal.SIGKILL)
    killed.join()
    (line,) = remove_stale_folders(tmp_path)
    assert line == f"removed {tmp_path / 'dsft-swap-killed'}, 4 bytes that {RUN} had left"
    assert [path.name for path in tmp_path.iterdir()] == ["dsft-swap-living"]
    pipe.send(True)
    living.join()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("marker", [None, "", "[]", '{"folder": "dsft-swap-other", "run": "/x"}'])
def test_folders_without_a_marker_stay(tmp_path: Path, marker: str | None) -> None:
    folder = tmp_path / "dsft-swap-notes"
    path = swap(folder)
    if marker is not None:
        (folder / MARKER).write_text(marker)
    assert list(remove_stale_folders(tmp_path)) == []
    assert path.exists()


def test_files_of_the_users_own_in_it_stay(tmp_path: Path) -> None:
    elsewhere = swap(tmp_path / "elsewhere", Path("kept.swp"))
    folder = tmp_path / "dsft-swap-x"
    swap(folder)
    (folder / "zero_stage_3" / "notes.txt").write_text("mine")
    (folder / "linked").symlink_to(elsewhere.parent)
    (folder / MARKER).write_text(json.dumps({"folder": folder.name, "run": str(RUN)}))
    (line,) = remove_stale_folders(tmp_path)
    assert line.endswith("; other files in it are left alone")
    assert (folder / "zero_stage_3" / "notes.txt").exists() and elsewhere.exists()
    assert not (folder / SWAPPED).exists()


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    path = swap(real)
    (real / MARKER).write_text(json.dumps({"folder": "dsft-swap-x", "run": str(RUN)}))
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "dsft-swap-x").symlink_to(real)
    assert list(remove_stale_folders(disk)) == []
    assert path.exists()


def test_a_folder_that_cannot_be_marked_is_not_left_behind(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # as a full disk: nothing can be written
    try:
        with pytest.raises(StorageError, match="cannot be created"), shared_swap_folder(tmp_path, "a", RUN):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
