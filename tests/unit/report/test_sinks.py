"""TensorBoard and SwanLab: the same numbers by the same names, and never in the way."""

import math
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsft.errors import MissingInputError
from dsft.report.packages import check_installed
from dsft.report.sinks import BackgroundSink, open_sinks
from dsft.spec.schema import Spec
from tests.specs import minimal_spec

RECORDS: tuple[Mapping[str, float], ...] = (
    {"train/global_step": 1, "train/loss": 2.5, "train/grad_norm": math.inf},
    {"train/global_step": 2, "train/loss": 2.25, "eval/a/loss": 3.0},
)
SECRET = "sk-0123456789abcdef0123456789abcdef"


def needs(package: str) -> Any:
    missing = find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package}, an extra, is not installed")


def spec(**sections: Any) -> Spec:
    given = {"model": {"name_or_path": "m"}, "wandb": {"mode": "disabled"}, **sections}
    return minimal_spec("sft", name="run", **given)


def report(asked: Spec, folder: Path, resume_step: int = 0, records: Any = RECORDS) -> list[str]:
    printed: list[str] = []
    sinks = open_sinks(asked, folder, resume_step, {"name": "run", "api_key": SECRET}, printed.append)
    for sink in sinks:
        for record in records:
            sink.metrics(record)
        sink.close({})
    return printed


def test_nothing_is_opened_that_was_not_asked_for(tmp_path: Path) -> None:
    check_installed(spec())
    assert open_sinks(spec(), tmp_path, 0, {}, print) == []


@needs("tensorboard")
def test_tensorboard_has_the_same_names_and_a_resume_replaces_what_came_later(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    asked = spec(tensorboard=True)
    assert report(asked, tmp_path) == []
    assert report(asked, tmp_path, 1, [{"train/global_step": 2, "train/loss": 9.0}]) == []
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert set(read.Tags()["scalars"]) == {"train/loss", "train/grad_norm", "eval/a/loss"}
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(1, 2.5), (2, 9.0)]


@needs("swanlab")
def test_swanlab_records_offline_and_keeps_no_secret(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert report(spec(swanlab={"project": "p", "mode": "offline"}), tmp_path) == []
    files = [path for path in (tmp_path / "swanlog").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert b"train/loss" in content and b"eval/a/loss" in content
    assert SECRET.encode() not in content


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("dsft.report.packages.find_spec", lambda name: None)
    with pytest.raises(MissingInputError, match=r"pip install tensorboard"):
        check_installed(spec(tensorboard=True))
    with pytest.raises(MissingInputError, match=r"pip install swanlab"):
        check_installed(spec(swanlab={}))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(MissingInputError, match=r"pip install wandb"):
        check_installed(spec(wandb={"mode": "offline"}))
    check_installed(spec(wandb={"mode": "disabled"}))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    check_installed(spec(wandb={"mode": "auto"}))


def test_a_sink_that_fails_is_reported_once_and_accepts_records() -> None:
    class Broken:
        def write(self, record: Any) -> None:
            raise OSError("disk gone")

        def close(self, summary: Any) -> None: ...

    printed: list[str] = []
    sink = BackgroundSink("Sink", lambda _: Broken(), printed.append)
    for record in RECORDS:
        sink.metrics(record)
    sink.close({})
    assert printed == ["Sink: stopped, disk gone; metrics.jsonl has everything."]


def test_a_sink_that_hangs_is_left_behind(monkeypatch: Any) -> None:
    monkeypatch.setattr("dsft.report.sinks.FINISH_SECONDS", 0.1)
    printed: list[str] = []
    sink = BackgroundSink("Sink", lambda _: time.sleep(60), printed.append)  # type: ignore[arg-type, return-value]
    sink.close({})
    assert printed == [
        "Sink: not finished after 0 s; the run ends without waiting for it. metrics.jsonl has everything."
    ]
