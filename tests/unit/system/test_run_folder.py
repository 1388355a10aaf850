"""What a user may write for a run, a checkpoint or an export, and the error where there is none."""

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.errors import CheckpointError, DsftError, MissingInputError
from dsft.system.run_folder import named_checkpoint, named_export, named_run, newest_checkpoint, step_folders


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with three checkpoints, of which the last is not committed, and a new one without any."""
    monkeypatch.chdir(tmp_path)
    for step in (9, 10, 11):
        Path(f"runs/sft/checkpoints/step-{step}").mkdir(parents=True)
    for step in (9, 10):
        Path(f"runs/sft/checkpoints/step-{step}/MANIFEST.json").touch()
    Path("runs/sft/checkpoints/latest").write_text("step-10\n")
    Path("runs/sft/checkpoints/best").write_text("step-9\n")
    Path("runs/sft/export").mkdir()
    Path("runs/sft/export/config.json").touch()
    Path("runs/new/logs").mkdir(parents=True)
    Path("other").mkdir()


@pytest.mark.parametrize(("name", "step"), [
    ("sft", 10),
    ("runs/sft", 10),
    ("runs/sft/checkpoints", 10),
    ("runs/sft/checkpoints/latest", 10),
    ("runs/sft/checkpoints/best", 9),
    ("runs/sft/checkpoints/step-9", 9),
    ("runs/sft/checkpoints/step-11", 11),  # so that its reader names what is missing
])  # fmt: skip
def test_names_of_checkpoints(name: str, step: int) -> None:
    assert named_checkpoint(name) == Path(f"runs/sft/checkpoints/step-{step}")


def test_a_copy_of_a_checkpoint_may_have_any_name() -> None:
    Path("runs/sft/checkpoints/step-9").rename("other/mine")
    assert named_checkpoint("other/mine") == Path("other/mine")


@pytest.mark.parametrize(("name", "message"), [
    ("new", "runs/new has no checkpoint yet"),
    ("runs/new/checkpoints/best", "written if the spec has checkpoint.keep_best"),
    ("other", "other is neither a checkpoint, .* nor a run; runs/ has new, sft"),
    ("runs/new/checkpoints/latest", "latest does not name a checkpoint"),
    ("nothing", "nothing is neither a checkpoint, .* nor a run; runs/ has new, sft"),
])  # fmt: skip
def test_wrong_names_of_checkpoints(name: str, message: str) -> None:
    Path("runs/new/checkpoints").mkdir()
    Path("runs/new/checkpoints/latest").touch()
    os.truncate("runs/new/checkpoints/latest", 2**40)
    with pytest.raises(CheckpointError, match=message):
        named_checkpoint(name)


def test_names_of_exports() -> None:
    assert {named_export(name) for name in ("sft", "runs/sft", "runs/sft/export")} == {
        Path("runs/sft/export")
    }
    for name, message in {
        "new": "runs/new has no export yet; dsft export runs/new FOLDER makes one",
        "other": r"other has neither config.json nor adapter_config.json",
        "nothing": "neither a folder with an export nor the name of a run; runs/ has new, sft",
    }.items():
        with pytest.raises(MissingInputError, match=message):
            named_export(name)


def test_runs() -> None:
    assert named_run("sft") == named_run("runs/sft") == Path("runs/sft")
    assert [path.name for path in step_folders(Path("runs/sft"))] == ["step-11", "step-10", "step-9"]
    assert newest_checkpoint(Path("runs/sft")) == Path("runs/sft/checkpoints/step-10")
    assert newest_checkpoint(Path("runs/new")) is None


@pytest.mark.parametrize("command", [["chat", "other"], ["verify", "other"], ["export", "other", "out"]])
def test_a_wrong_name_is_reported_before_the_imports(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch and transformers take seconds."""
    for module in ("dsft.commands.chat", "dsft.checkpoint.read", "dsft.checkpoint.export"):
        monkeypatch.setitem(sys.modules, module, None)  # an import would fail
    assert isinstance(CliRunner().invoke(app, command).exception, DsftError)
