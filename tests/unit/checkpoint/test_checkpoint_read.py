"""A checkpoint that is not as it was written is named and passed over; a run never starts again by itself."""

import hashlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsft.checkpoint.files import digest_of
from dsft.checkpoint.read import CheckpointReader, find, seal, verify
from dsft.errors import CheckpointError, LockedError


@pytest.fixture
def two(maker: Any) -> Any:
    maker.save(1)
    maker.save(2)
    return maker


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def truncate_to(share: float, less: int = 0) -> Any:
    return lambda path: os.truncate(path, int(path.stat().st_size * share) - less)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(len(data) * 8)
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


DAMAGES = {
    "emptied": truncate_to(0), "half": truncate_to(0.5), "one byte short": truncate_to(1, 1),
    "one bit": flip_a_bit, "deleted": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_named_and_the_previous_is_used(two: Any, damage: str) -> None:
    whole = two.run / "whole"
    shutil.copytree(two.step(2), whole)
    names = [path.relative_to(whole) for path in files_of(whole)]
    assert len(names) >= 6
    for name in names:
        DAMAGES[damage](two.step(2) / name)
        if name.name != "MANIFEST.json" or not same_json(two.step(2) / name, whole / name):
            with pytest.raises(CheckpointError) as error:
                CheckpointReader.open(two.step(2)).verify()
            assert name.name in str(error.value) or name.name == "MANIFEST.json"
            found = find(two.run, "auto")
            assert found.path == two.step(1)
            assert len(found.notes) == 1 and found.notes[0].startswith("step-2 is skipped: ")
        shutil.rmtree(two.step(2))
        shutil.copytree(whole, two.step(2))
    assert find(two.run, "auto").path == two.step(2)


def same_json(one: Path, other: Path) -> bool:
    """The manifest has no digest outside itself: a change to its blanks alone changes nothing."""
    try:
        return bool(json.loads(one.read_bytes()) == json.loads(other.read_bytes()))
    except (OSError, ValueError):
        return False


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_anywhere_in_the_tensors_is_found(maker: Any, data: st.DataObject) -> None:
    if not maker.step(1).exists():
        maker.save(1)
    path = maker.step(1) / "rank-00000.safetensors"
    before = path.read_bytes()
    place = data.draw(st.integers(0, 8 * len(before) - 1))
    after = bytearray(before)
    after[place // 8] ^= 1 << place % 8
    path.write_bytes(after)
    with pytest.raises(CheckpointError, match=r"rank-00000.safetensors has changed since"):
        CheckpointReader.open(maker.step(1)).verify()
    path.write_bytes(before)


@pytest.mark.parametrize("latest", [None, "", "step-1", "step-77", "../../etc"])
def test_missing_or_wrong_latest_is_tolerated(two: Any, latest: str | None) -> None:
    path = two.run / "checkpoints" / "latest"
    path.unlink() if latest is None else path.write_text(latest)
    assert find(two.run, "auto").path == two.step(2)


def test_only_damaged_checkpoints_are_an_error(two: Any) -> None:
    for step in (1, 2):
        (two.step(step) / "MANIFEST.json").unlink()
    with pytest.raises(
        CheckpointError, match="None of the 2 checkpoints .* does not start again from step 0"
    ):
        find(two.run, "auto")


def test_folder_without_checkpoints_starts_at_step_0(tmp_path: Path) -> None:
    assert find(tmp_path, "auto").path is None
    (tmp_path / "checkpoints" / "step-3.tmp-12ab").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-x").mkdir()
    assert find(tmp_path, "auto").path is None
    assert find(tmp_path, "never").path is None


def test_resume_never_refuses_a_folder_with_checkpoints(two: Any) -> None:
    with pytest.raises(LockedError, match="checkpoint.resume is never, but .* has step-2"):
        find(two.run, "never")


def test_resume_path_is_used_or_refused(two: Any) -> None:
    assert find(two.run, str(two.step(2))).path == two.step(2)
    with pytest.raises(CheckpointError, match="is neither a checkpoint, .* nor a run"):
        find(two.run, str(two.step(3)))
    for name in (two.run, two.run / "checkpoints" / "latest"):
        assert find(two.run, str(name)).path == two.step(2)
    flip_a_bit(two.step(1) / "rank-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00001.safetensors has changed since"):
        find(two.run, str(two.step(1)))


def test_resume_path_with_later_checkpoints_is_refused(two: Any, tmp_path: Path) -> None:
    with pytest.raises(LockedError, match=r"step-1, but .* has step-2: set checkpoint.resume=auto"):
        find(two.run, str(two.step(1)))
    other = tmp_path / "other" / "checkpoints"
    shutil.copytree(two.step(1), other / "step-1")
    with pytest.raises(LockedError, match=r"has step-2, step-1: "):
        find(two.run, str(other / "step-1"))
    shutil.rmtree(two.step(2))
    assert find(two.run, str(two.step(1))).path == two.step(1)
    assert find(tmp_path / "new", str(two.step(1))).path == two.step(1)


def test_moved_run_resumes(two: Any) -> None:
    moved = two.run.with_name("moved")
    two.run.rename(moved)
    assert find(moved, "auto").path == moved / "checkpoints" / "step-2"


def test_run_behind_a_link_resumes_and_saves(two: Any, tmp_path: Path) -> None:
    """As where `output_dir` is a link to another disk."""
    (tmp_path / "disk").mkdir()
    real = two.run.rename(tmp_path / "disk" / "run")
    two.run.symlink_to(real)
    assert find(two.run, "auto").path == two.step(2)
    two.save(3, keep_last=2)
    assert find(two.run, "auto").path == two.step(3)
    assert sorted(path.name for path in (real / "checkpoints").glob("step-*")) == ["step-2", "step-3"]


def test_steps_are_ordered_numerically(maker: Any) -> None:
    for step in (9, 10):
        maker.save(step)
    assert find(maker.run, "auto").path == maker.step(10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_range_is_read_from_any_layout(maker: Any, ranks: int, data: st.DataObject) -> None:
    if not maker.step(ranks).exists():
        maker.save(ranks, ranks=ranks)
    name = data.draw(st.sampled_from(sorted(maker.tensors)))
    flat = maker.tensors[name].flatten()
    start = data.draw(st.integers(0, flat.numel()))
    stop = data.draw(st.integers(start, flat.numel()))
    assert torch.equal(
        CheckpointReader.open(maker.step(ranks)).read(name, "value", start, stop), flat[start:stop]
    )


def test_a_missing_range_is_refused_by_name(maker: Any) -> None:
    maker.save(1)
    checkpoint = CheckpointReader.open(maker.step(1))
    with pytest.raises(CheckpointError, match=r"has no value of lm_head.weight from element 800 on"):
        checkpoint.read("lm_head.weight", "value", 0, 801)
    with pytest.raises(CheckpointError, match="has no exp_avg_sq of model.norm.weight from element 0 on"):
        checkpoint.read("model.norm.weight", "exp_avg_sq", 0, 16)


def test_other_checkpoint_format_is_reported(maker: Any) -> None:
    maker.save(1)
    path = maker.step(1) / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99; this dsft reads format 1"):
        CheckpointReader.open(maker.step(1))


def test_wrong_manifest_is_found(maker: Any) -> None:
    maker.save(1)
    path = maker.step(1) / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]["model/config.json"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="MANIFEST.json has changed since"):
        CheckpointReader.open(maker.step(1))


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that says other things, and has the SHA-256 of what it says."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text())
    del manifest["sha256"]
    change(manifest)
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest | {"sha256": seal(manifest)}))


def listing(name: str) -> Callable[[dict[str, Any]], None]:
    file = Path("/etc/passwd").read_bytes()
    facts = {"size": len(file), "sha256": hashlib.sha256(file).hexdigest()}
    return lambda manifest: manifest["files"].update({name: facts})


def sized(size: float) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest["files"]["rank-00000.safetensors"].update(size=size)


FORGED = {
    "a path upwards": (listing("../" * 20 + "etc/passwd"), "lists '../../"),
    "a path upwards from model": (listing("model/../" + "../" * 20 + "etc/passwd"), "lists 'model/../"),
    "an absolute path": (listing("/etc/passwd"), "lists '/etc/passwd'"),
    "a NUL in a name": (listing("model/a\0b"), r"lists 'model/a\\x00b'"),
    "half a character in a name": (listing("\ud800"), r"lists '\\ud800'"),
    "an infinite size": (sized(math.inf), "holds the number Infinity"),
}


@pytest.mark.parametrize("what", FORGED)
def test_malformed_manifest_is_skipped_with_a_message(two: Any, what: str) -> None:
    change, message = FORGED[what]
    forge(two.step(2), change)
    found = find(two.run, "auto")
    assert found.path == two.step(1)
    (note,) = found.notes
    assert re.search(f"^step-2 is skipped: .*MANIFEST.json {message}", note)


STATES: dict[str, tuple[Any, str]] = {
    "parameters": ("x", "parameters: Input should be a valid dictionary"),
    "parameters.b": (["a"], "parameters.b.0: Input should be a valid integer"),
    "parameters.c": ([-1], "parameters.c.0: Input should be greater than or equal to 0"),
    "parameters.d": ([10**18, 10**18], "parameters.d: Value error, is the shape of 10000000000000000000"),
    "kinds": (None, "kinds: Input should be a valid list"),
    "kinds.0": ("values", "kinds.0: Input should be 'value', "),
    "progress.step": ("2", "progress.step: Input should be a valid integer"),
    "progress.epoch": (-1.0, "progress.epoch: Input should be greater than or equal to 0"),
    "progress.other": (1, "progress.other: Extra inputs are not permitted"),
    "batch": ({}, "batch.global_batch_size: Field required"),
    "spec": (None, "spec: Input should be"),
    "spec.train.precision": ("fp8", "spec.train.precision: Input should be 'bf16', "),
    "spec.model": ("a", "spec.model: Input should be"),
    "data": ({"data.train": {}}, "data.data.train.rows: Field required"),
    "base": ({"model.safetensors": 1}, "base.dict"),
    "carried": ({"mean": "2"}, "carried.mean: Input should be a valid number"),
}


@pytest.mark.parametrize("key", STATES)
def test_malformed_state_is_skipped_with_a_message(two: Any, key: str) -> None:
    value, message = STATES[key]
    path = two.step(2) / "state.json"
    content = json.loads(path.read_text())
    *above, last = key.split(".")
    container = content
    for part in above:
        container = container[part]
    if isinstance(container, list):
        container[int(last)] = value
    else:
        container[last] = value
    path.write_text(json.dumps(content))
    forge(two.step(2), lambda manifest: manifest["files"].update({"state.json": asdict(digest_of(path))}))
    found = find(two.run, "auto")
    assert found.path == two.step(1)
    (note,) = found.notes
    assert f"state.json is not a checkpoint's state ({message}" in note


def test_a_file_in_place_of_the_folder_of_checkpoints_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="is a file where the folder of checkpoints should be"):
        find(tmp_path, "auto")


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "9" * 5_000, "/dev/zero"])
@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json"])
def test_unparsable_json_is_skipped_with_a_message(two: Any, name: str, text: str) -> None:
    path = two.step(2) / name
    path.unlink()
    path.symlink_to(text) if text == "/dev/zero" else path.write_text(text)
    if name == "state.json" and text != "/dev/zero":
        written = {"size": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        forge(two.step(2), lambda manifest: manifest["files"].update({name: written}))
    found = find(two.run, "auto")
    assert found.path == two.step(1)
    assert len(found.notes) == 1 and f"{name} " in found.notes[0]


@pytest.mark.parametrize("name", ["step-99", "step-02"])
def test_checkpoint_under_another_steps_name_is_skipped(two: Any, name: str) -> None:
    shutil.copytree(two.step(2), two.run / "checkpoints" / name)
    two.step(2).rename(two.run / "elsewhere")
    found = find(two.run, "auto")
    assert found.path == two.step(1)
    assert len(found.notes) == 1
    assert found.notes[0].startswith(f"{name} is skipped: ")
    assert "is the checkpoint of step 2; rename it to step-2" in found.notes[0]
    with pytest.raises(CheckpointError, match="is the checkpoint of step 2"):
        find(two.run, str(two.run / "checkpoints" / name))
    assert verify(two.run / "elsewhere").startswith(f"{two.run / 'elsewhere'} is whole: step 2, ")


def test_verify_reports_what_it_found(maker: Any) -> None:
    maker.save(1)
    assert verify(maker.step(1)).startswith(f"{maker.step(1)} is whole: step 1, ")
