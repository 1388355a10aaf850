"""What swapping asks of a disk: each refusal with its cause, on made-up mounts and on this machine's own."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from dsft.errors import StorageError
from dsft.system import disk
from dsft.system.files import write_error

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:25 / /dev/shm rw - tmpfs tmpfs rw
31 22 0:26 / /data rw - ext4 /dev/sdb1 rw
32 31 0:27 / /data/team\\040share rw shared:7 - nfs4 server:/x rw
33 22 0:28 / /data rw - xfs /dev/sdc1 rw
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(("folder", "kind"), [
    ("/home/me", "ext4"),
    ("/dev/shm/swap", "tmpfs"),
    ("/data/team share/swap", "nfs4"),
    ("/data/local", "xfs"),  # of two mounts on one point the later one is seen
    ("/database", "ext4"),
])  # fmt: skip
def test_the_mount_that_holds_a_folder(mounts: Path, folder: str, kind: str) -> None:
    assert disk.file_system(Path(folder), mounts) == kind


def test_no_answer_where_the_system_has_none(tmp_path: Path) -> None:
    assert disk.file_system(tmp_path, tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [("tmpfs", "is in memory (tmpfs)"), ("nfs4", "is on the network (nfs4)"), ("lustre", "(lustre)")],
)
def test_disks_that_are_no_local_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    monkeypatch.setattr(disk, "file_system", lambda folder: kind)
    with pytest.raises(StorageError) as raised:
        disk.check_disk(tmp_path, "parallel.offload_optimizer.nvme_path")
    assert words in str(raised.value) and "parallel.offload_optimizer.nvme_path" in str(raised.value)


def test_a_folder_that_is_not_there_or_none_or_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "file_system", lambda folder: "ext4")
    (tmp_path / "file").touch()
    for name, words in (("nothing", "does not exist"), ("file", "is not a folder")):
        with pytest.raises(StorageError, match=words):
            disk.check_disk(tmp_path / name, "nvme_path")
    disk.check_disk(tmp_path, "nvme_path")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "looking leaves nothing behind"
    with pytest.raises(StorageError, match="cannot be written"):
        disk.check_disk(Path("/proc/self/task"), "nvme_path")


def test_a_disk_without_direct_reads_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would stop at its first swap, in the first step."""
    monkeypatch.setattr(disk, "file_system", lambda folder: "ext4")
    opens = os.open

    def refuses(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opens(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(StorageError, match=r"nvme_path: .* supports no reads and writes past the page cache"):
        disk.check_disk(tmp_path, "nvme_path")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_reached(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nvme_path: "):
        disk.check_disk(tmp_path / ("x" * 300), "nvme_path")


def test_space_is_held_against_what_all_ranks_swap(tmp_path: Path) -> None:
    disk.check_swap_space(tmp_path, 1, "nvme_path")
    with pytest.raises(StorageError, match=r"free, but this run swaps up to 1024\.00 TiB"):
        disk.check_swap_space(tmp_path, 2**50, "nvme_path")


def test_locked_memory_is_held_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "may_lock_all", lambda: False)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * 2**20, 8 * 2**20))
    disk.check_locked(2**20)
    with pytest.raises(StorageError, match="ulimit -l"):
        disk.check_locked(2**30)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    disk.check_locked(2**40)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "free space there"), (errno.EROFS, "make it writable"), (errno.EIO, "check the disk")],
)
def test_the_remedy_of_a_failed_write_fits_its_cause(tmp_path: Path, number: int, remedy: str) -> None:
    error = write_error(tmp_path / "x", OSError(number, os.strerror(number)), "change output_dir")
    assert f"({os.strerror(number)}): {remedy}, or change output_dir." in str(error)
