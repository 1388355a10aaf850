"""metrics.jsonl: unrounded, whole lines, cut at a resume."""

import json
import math
from pathlib import Path

import pytest

from dsft.errors import StorageError
from dsft.report.jsonl import MetricsFile, read_metrics
from tests.small_disk import small_disk, take_all_inodes

STEP = "train/global_step"


def write(path: Path, *steps: int, resume_step: int = 0) -> None:
    file = MetricsFile(path, resume_step)
    for step in steps:
        file.metrics({STEP: step, "train/loss": 1 / (3 * step)})
    file.close()


def steps(path: Path) -> list[float]:
    return [record[STEP] for record in read_metrics(path)]


def test_floats_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = {STEP: 7, "train/loss": 0.1 + 0.2, "train/grad_norm": 1e-45, "train/num_tokens": 2**60 + 1}
    file = MetricsFile(path, 0)
    file.metrics(record)
    file.close()
    assert path.read_text() == json.dumps(record) + "\n"
    assert read_metrics(path) == [record]


def test_a_line_is_on_disk_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.metrics({STEP: 1, "train/loss": 2.0})
    assert steps(tmp_path / "metrics.jsonl") == [1]
    file.close()


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.metrics({STEP: 1, "a": math.inf, "b": -math.inf, "c": math.nan})
    file.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert record["a"] == math.inf and record["b"] == -math.inf and math.isnan(record["c"])


def test_a_record_without_a_step_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(ValueError, match="train/global_step"):
        file.metrics({"train/loss": 1.0})
    file.close()


def test_a_resume_cuts_what_comes_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    before = path.read_text().splitlines()
    write(path, 4, 5, 6, resume_step=3)
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[:3] == before[:3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_in_a_folder_of_an_old_one_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    write(path, 1)
    assert steps(path) == [1]


def test_a_torn_last_line_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    wrong = []
    for lost in range(1, last + 1):
        path.write_bytes(whole[:-lost])
        kept = steps(path)
        write(path, 3, 4, resume_step=2)
        goes_on = steps(path) == [1, 2, 3, 4] and path.read_bytes().startswith(whole)
        if not goes_on or kept != ([1, 2, 3] if lost == 1 else [1, 2]):  # 1: only the line break is missing
            wrong.append((lost, kept, path.read_bytes()))
    assert not wrong and last > 45


def test_a_line_break_lost_in_a_kill_does_not_join_two_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-1])
    write(path, 3, resume_step=2)
    assert steps(path) == [1, 2, 3]


def test_bytes_that_are_not_text_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    path.write_bytes(path.read_bytes() + b"\x00\xff\xfe{]\n[1]\n5\n" + b'{"train/global_step": "x"}\n')
    assert steps(path) == [1]


def test_a_disk_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="metrics.jsonl cannot be written .*: check the disk, or"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl", 0)


def test_a_folder_that_was_removed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="run is gone: it was removed or moved") as error:
        MetricsFile(tmp_path / "run" / "metrics.jsonl", 0)
    assert "space" not in str(error.value)


def test_a_disk_without_inodes_is_not_reported_as_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m,nr_inodes=8") as disk:
        take_all_inodes(disk)
        with pytest.raises(StorageError, match=r"no inodes left for another file.*: remove files there"):
            MetricsFile(disk / "metrics.jsonl", 0)
        (disk / "file-0").unlink()
        write(disk / "metrics.jsonl", 1)
        assert steps(disk / "metrics.jsonl") == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    file.close()
    file._file = Path("/dev/full").open("w")
    with pytest.raises(StorageError, match=r"No space left on device"):
        file.metrics({STEP: 1})
    file.close()  # flushes once more what could not be written: not reported twice, and not as a traceback
    assert file._file.closed
