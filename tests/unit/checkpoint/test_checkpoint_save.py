"""A checkpoint is there whole or not at all: disks that fill, ranks that fail, processes that die."""

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsft.checkpoint import save
from dsft.checkpoint.files import TensorEntry, write_tensors
from dsft.checkpoint.read import CheckpointReader, find
from dsft.checkpoint.retain import best_checkpoint
from dsft.errors import CheckpointError, DsftError, StorageError
from tests.make import fragment_of
from tests.small_disk import small_disk, take_all_inodes


def test_a_committed_checkpoint_holds_every_element_and_lists_every_file(maker: Any) -> None:
    assert maker.save(5, ranks=3) == [f"{maker.step(5)} is committed"] * 3
    assert maker.names() == {"step-5", "latest"}
    assert (maker.run / "checkpoints" / "latest").read_text() == "step-5\n"
    files = json.loads((maker.step(5) / "MANIFEST.json").read_text())["files"]
    on_disk = {p.relative_to(maker.step(5)).as_posix() for p in maker.step(5).rglob("*") if p.is_file()}
    assert on_disk == {*files, "MANIFEST.json"}
    for name, listed in files.items():
        data = (maker.step(5) / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (listed["size"], listed["sha256"])

    checkpoint = CheckpointReader.open(maker.step(5))
    checkpoint.verify()
    assert checkpoint.step == 5
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in maker.tensors.items()}
    for name, tensor in maker.tensors.items():
        assert torch.equal(checkpoint.read(name, "value", 0, tensor.numel()), tensor.flatten())
        assert torch.equal(checkpoint.read(name, "exp_avg", 0, tensor.numel()), 2 * tensor.flatten())


def test_no_file_of_a_checkpoint_is_a_pickle(maker: Any) -> None:
    maker.save(1)
    suffixes = {path.suffix for path in maker.step(1).rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors", ".jinja"}


def test_complete_step_is_kept_and_damaged_one_is_rewritten(maker: Any) -> None:
    maker.save(1)
    before = (maker.step(1) / "MANIFEST.json").stat().st_ino
    assert maker.save(1) == [f"{maker.step(1)} is committed already"] * 2
    assert (maker.step(1) / "MANIFEST.json").stat().st_ino == before
    os.truncate(maker.step(1) / "rank-00001.safetensors", 100)
    assert maker.save(1) == [f"{maker.step(1)} is committed"] * 2
    CheckpointReader.open(maker.step(1)).verify()
    assert maker.names() == {"step-1", "latest"}


def test_oldest_checkpoints_and_leftovers_are_removed(maker: Any) -> None:
    for step in (1, 2, 3):
        maker.save(step)
    (maker.run / "checkpoints" / "step-4.tmp-beef" / "model").mkdir(parents=True)
    assert maker.save(4, keep_last=2)[0] == f"{maker.step(4)} is committed; removed step-2, step-1"
    assert maker.names() == {"step-3", "step-4", "latest"}


@pytest.mark.parametrize(("saves", "left"), [
    ([{"step": 1}, {"step": 9}, {"step": 2, "keep_last": 1}], {"step-2", "step-9"}),  # a later step stays
    ([{"step": n, "keep_last": 1, "keep_best": 1, "loss": 1.0} for n in (1, 2, 3)],
     {"step-1", "step-3", "best"}),  # the earlier of equal losses is the best
    ([{"step": 1, "keep_last": 1, "keep_best": 1, "loss": 1.0}, {"step": 2, "keep_last": 1, "loss": 2.0}],
     {"step-2"}),  # without keep_best nothing is named best
])  # fmt: skip
def test_which_checkpoints_are_kept(maker: Any, saves: list[dict[str, Any]], left: set[str]) -> None:
    for one in saves:
        maker.save(**one)
    assert maker.names() == left | {"latest"}
    assert (best_checkpoint(maker.run) is None) == ("best" not in left)


def test_damaged_checkpoint_does_not_count_as_kept(maker: Any) -> None:
    for step in (1, 2):
        maker.save(step)
    os.truncate(maker.step(2) / "rank-00000.safetensors", 10)
    maker.save(3, keep_last=2)
    assert maker.names() == {"step-1", "step-2", "step-3", "latest"}


@pytest.mark.parametrize("keep_last", [1, 2])
def test_saves_between_skipped_steps_remove_no_good_checkpoint(maker: Any, keep_last: int) -> None:
    for step, skipped in ((1, 0), (2, 0), (3, 1), (4, 2), (5, 3)):
        maker.save(step, keep_last=keep_last, skipped=skipped)
    good = {"step-1", "step-2"} if keep_last == 2 else {"step-2"}
    assert good | {"step-5"} <= maker.names()
    assert find(maker.run, "auto").path == maker.step(5)
    maker.save(6, keep_last=keep_last)
    maker.save(7, keep_last=keep_last)
    assert maker.names() == {"step-7", "latest"} | ({"step-6"} if keep_last == 2 else set())


def test_best_checkpoints_are_kept_and_named(maker: Any) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
        maker.save(step, keep_last=1, keep_best=2, loss=loss)
    assert maker.names() == {"step-2", "step-5", "latest", "best"}
    best = maker.run / "checkpoints" / "best"
    assert best.read_text() == "step-2\n"
    assert CheckpointReader.open(best).step == 2
    assert CheckpointReader.open(best).held_out_loss == 1.0
    result = maker.save(6, keep_last=1, keep_best=2, loss=0.5)[0]
    assert result == f"{maker.step(6)} is committed; removed step-5"
    assert maker.names() == {"step-2", "step-6", "latest", "best"}
    assert best.read_text() == "step-6\n"


def test_damaged_checkpoint_is_not_the_best(maker: Any) -> None:
    for step, loss in ((1, 1.0), (2, 3.0)):
        maker.save(step, keep_last=None, keep_best=1, loss=loss)
    os.truncate(maker.step(1) / "rank-00000.safetensors", 10)
    maker.save(3, keep_last=1, keep_best=1, loss=4.0)
    assert maker.names() == {"step-2", "step-3", "latest", "best"}
    assert best_checkpoint(maker.run).path == maker.step(2)


def test_ranks_that_do_not_own_every_element_commit_nothing(maker: Any, monkeypatch: Any) -> None:
    whole = type(maker).fragments
    monkeypatch.setattr(type(maker), "fragments", lambda *place: list(whole(*place))[1:])
    results = maker.save(1)
    assert all(type(result) is DsftError and "elements of value" in str(result) for result in results)
    assert maker.names() == set()


def test_a_parameter_may_have_other_moments_but_not_fewer(maker: Any, monkeypatch: Any) -> None:
    """As Muon's matrices. The checkpoint of a run whose ranks lack one would not resume."""
    whole, odd = type(maker).fragments, next(iter(maker.tensors))

    def changed(kind: str | None) -> None:
        def fragments(*place: Any) -> Iterator[Any]:
            for one in whole(*place):
                is_odd = one.name == odd and one.kind == "exp_avg"
                if kind is not None or not is_odd:
                    yield replace(one, kind=kind) if is_odd else one

        monkeypatch.setattr(type(maker), "fragments", fragments)

    changed("momentum_buffer")
    assert maker.save(1) == [f"{maker.step(1)} is committed"] * 2
    checkpoint = CheckpointReader.open(maker.step(1))
    checkpoint.verify()
    assert checkpoint.state["kinds"] == ["exp_avg", "momentum_buffer", "value"]
    found = {name: checkpoint.kinds_of(name) for name in maker.tensors}
    assert found == dict.fromkeys(maker.tensors, ["exp_avg", "value"]) | {odd: ["momentum_buffer", "value"]}
    changed("value")
    assert all(f"a part of {odd} twice" in str(result) for result in maker.save(2))
    changed(None)
    elements = maker.tensors[odd].numel()
    for result in maker.save(2):
        assert type(result) is DsftError and f"{elements} elements have no exp_avg, which" in str(result)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(save, "_check_parts", lambda parts: None)
        maker.save(3)
    with pytest.raises(CheckpointError, match=f"has no exp_avg of {odd} from element 0 on"):
        CheckpointReader.open(maker.step(3)).verify()


def test_retention_and_resume_use_steps_not_times(maker: Any) -> None:
    """As where the clocks of hosts differ, or a copy has given every folder another time."""
    for step in (1, 2, 3):
        maker.save(step)
        for path in (maker.step(step), maker.step(step) / "MANIFEST.json"):
            os.utime(path, (10**9 - 1000 * step, 10**9 - 1000 * step))  # the newest looks the oldest
    maker.save(4, keep_last=2)
    os.utime(maker.step(4), (0, 0))
    assert maker.names() == {"step-3", "step-4", "latest"}
    assert find(maker.run, "auto").path == maker.step(4)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE])
def test_disk_error_keeps_the_older_checkpoint(maker: Any, code: int, monkeypatch: Any) -> None:
    """At the flush of one rank's file: a broken disk, one that became read-only, a lost NFS handle."""
    maker.save(1)
    flush = os.fsync

    def failing(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "rank-00001.safetensors":
            raise OSError(code, os.strerror(code))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for result in maker.save(2):
        assert isinstance(result, StorageError)
        assert "rank 1: " in str(result) and os.strerror(code) in str(result)
    assert maker.names() == {"step-1", "latest"}
    monkeypatch.setattr(os, "fsync", flush)
    assert maker.save(2) == [f"{maker.step(2)} is committed"] * 2


def test_checkpoint_files_follow_the_umask(maker: Any) -> None:
    before = os.umask(0o077)
    try:
        maker.save(1)
        maker.save(2, keep_last=1)
    finally:
        os.umask(before)
    made = [path for path in (maker.run / "checkpoints").rglob("*")]
    assert len(made) > 10
    assert [path for path in made if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_cannot_write_stops_all_and_keeps_the_older(
    maker: Any, failing: int, monkeypatch: Any
) -> None:
    """A real limit on file size, hit in the middle of one rank's file, under which the other's fits."""
    maker.save(1)
    whole = type(maker).fragments
    extra = torch.zeros(200_000)

    def uneven(self: Any, rank: int, ranks: int) -> Iterator[Any]:
        yield from whole(self, rank, ranks)
        if rank == failing:
            yield fragment_of("extra", "value", 0, extra)

    monkeypatch.setattr(type(maker), "fragments", uneven)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        results = maker.save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for result in results:
        assert isinstance(result, StorageError)
        assert f"rank {failing}: " in str(result) and "cannot be written (File too large)" in str(result)
    assert maker.names() == {"step-1", "latest"}
    assert find(maker.run, "auto").path == maker.step(1)


@pytest.mark.parametrize("room", [0.0, 0.1, 0.5, 0.95])
def test_full_disk_keeps_the_older_checkpoint(
    maker: Any, tmp_path: Path, room: float, monkeypatch: Any
) -> None:
    """The disk has room for a part of the new checkpoint. At 0.0 that is seen before anything is written; for
    the others it seems free until the kernel says otherwise, as where other jobs fill it meanwhile."""
    with small_disk(tmp_path / "disk", "size=3m") as disk:
        other = type(maker)(disk, maker.model_folder, maker.tensors | {"big": torch.randn(20_000)})
        other.save(1)
        digest = CheckpointReader.open(other.step(1)).digest
        needed = sum(8 * tensor.numel() for tensor in other.tensors.values())
        free = shutil.disk_usage(disk).free
        (disk / "filler").write_bytes(b"x" * (free - int(room * needed) - 40_000 * (room > 0)))
        if room:
            usage = namedtuple("usage", "total used free")
            monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, 2**40))
        for result in other.save(2):
            assert isinstance(result, StorageError)
            assert "where this checkpoint needs" in str(result) or "No space left" in str(result)
        assert other.names() == {"step-1", "latest"}
        CheckpointReader.open(other.step(1)).verify()
        assert CheckpointReader.open(other.step(1)).digest == digest


def test_figures_of_a_full_disk_make_sense(maker: Any, monkeypatch: Any) -> None:
    """Some space beyond the checkpoint itself is needed, and counted."""
    usage = namedtuple("usage", "total used free")
    needed = sum(8 * tensor.numel() for tensor in maker.tensors.values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 0, needed + 1000))
    for result in maker.save(1):
        found = re.search(r"has ([\d,]+) bytes free where this checkpoint needs ([\d,]+)", str(result))
        free, wanted = (int(text.replace(",", "")) for text in found.groups())
        assert free == needed + 1000 < wanted


def test_disk_without_inodes_is_not_reported_as_full(maker: Any, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=9m,nr_inodes=40") as disk:
        other = type(maker)(disk, maker.model_folder, maker.tensors)
        other.save(1)
        take_all_inodes(disk)
        for result in other.save(2):
            assert isinstance(result, StorageError)
            assert "the disk has no inodes left for another file" in str(result)
            assert "where this checkpoint needs" not in str(result)
        assert other.names() == {"step-1", "latest"}


@pytest.mark.parametrize("moment", ["fsync", "rename", "replace", "rmtree"])
def test_run_killed_during_a_save_resumes(maker: Any, moment: str) -> None:
    """SIGKILL at the n-th call, for every n until the save gets through: never torn, never step 0."""
    maker.save(1)
    for call in range(1, 100):
        status = save_and_die(maker, moment, call)
        found = find(maker.run, "auto")
        assert found.notes == ()
        assert found.path in (maker.step(1), maker.step(2))
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        shutil.rmtree(maker.step(2), ignore_errors=True)
    assert status == 0 and call > 1
    assert found.path == maker.step(2)
    assert maker.names() == {"step-1", "step-2", "latest"}


def save_and_die(maker: Any, moment: str, call: int) -> int:
    """Save step 2 in a child that kills itself before its `call`-th os.fsync, os.rename, …; its status."""
    child = os.fork()
    if child == 0:
        try:
            module = shutil if moment == "rmtree" else os
            real, left = getattr(module, moment), iter(range(call))

            def dying(*args: Any, **settings: Any) -> Any:
                if next(left) == call - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **settings)

            setattr(module, moment, dying)
            os._exit(0 if isinstance(maker.save(2, ranks=1)[0], str) else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]


def test_tensors_written_in_chunks_are_read_by_safetensors(tmp_path: Path) -> None:
    wide, narrow = torch.randn(3, 5), torch.randn(7).bfloat16()
    entries = [
        TensorEntry("wide", (3, 5)),
        TensorEntry("narrow", (7,), torch.bfloat16),
        TensorEntry("none", (0,)),
    ]
    pieces = [*wide.flatten().split(4), *narrow.split(2)]
    written = write_tensors(tmp_path / "x.safetensors", entries, pieces, {"format": "pt"})
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["wide"], wide) and torch.equal(found["narrow"], narrow)
    assert found["none"].shape == (0,)
    assert written.size == (tmp_path / "x.safetensors").stat().st_size
    with pytest.raises(ValueError, match="where the entries need"):
        write_tensors(tmp_path / "y.safetensors", entries, pieces[1:], {})
