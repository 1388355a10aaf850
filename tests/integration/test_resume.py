"""Whole runs that stop in one layout and resume in another, and starts that must be refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.integration.runs import TRAIN, records, shows_traceback, train, trained, write_spec
from tests.launching import ROOT, alone

MEDDLING = ROOT / "tests" / "integration" / "meddling.py"
PIPELINE = ("parallel.pipeline_stages=2", "parallel.zero_stage=1", "train.micro_batch_size=3")
FOUR_HEADS = ("model.from_config.num_attention_heads=4", "model.from_config.num_key_value_heads=2")
METRICS = ("train/loss", "train/grad_norm", "eval/loss")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a tied model on a pipeline of two stages that saved at steps 4, 8 and
    10."""
    folder = tmp_path_factory.mktemp("pipeline")
    trained(write_spec(folder, tied=True, layers=4), *PIPELINE, "checkpoint.keep_last=null")
    return folder


def copy_stopped_at_4(stopped: Path, folder: Path) -> Path:
    """Return a folder in which that run is as it was after its first checkpoint."""
    run = folder / "runs" / "small"
    shutil.copytree(stopped / "runs" / "small", run)
    for later in ("step-8", "step-10"):
        shutil.rmtree(run / "checkpoints" / later)
    shutil.rmtree(run / "export")
    return write_spec(folder, tied=True, layers=4)


@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        # the chain below resumes under ZeRO 3
        pytest.param(4, ("parallel.zero_stage=3", "train.micro_batch_size=1"), marks=pytest.mark.long),
        (1, ("parallel.zero_stage=0", "data.packing=true")),
        pytest.param(  # tests/parity/test_state.py always resumes into stages on four
            4,
            (*PIPELINE[:2], "train.micro_batch_size=2", "data.packing=true", "parallel.pipeline_cut=[3,1]"),
            marks=pytest.mark.long,
        ),
    ],
    ids=["zero3-on-4", "zero0-packed-on-1", "pipeline-packed-on-4"],
)
def test_pipeline_run_resumes_in_another_layout(
    stopped: Path, tmp_path: Path, nproc: int, layout: tuple[str, ...]
) -> None:
    check_goes_on(stopped, tmp_path, nproc, layout)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `stopped`, of a run whose rows were split over two ranks."""
    folder = tmp_path_factory.mktemp("split")
    layout = ("parallel.sequence_parallel=2", "parallel.zero_stage=2")
    trained(write_spec(folder, tied=True, layers=4), *FOUR_HEADS, *layout, "checkpoint.keep_last=null")
    return folder


@pytest.mark.long  # the chain below resumes from sequence parallelism, and with it
@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        (2, ("parallel.zero_stage=1",)),
        (4, ("parallel.zero_stage=3", "train.micro_batch_size=1")),
        (4, ("parallel.sequence_parallel=4", "parallel.zero_stage=1", "data.packing=true")),
        (4, ("parallel.sequence_parallel=2", "parallel.zero_stage=3")),
        (4, ("parallel.sequence_parallel=2", *PIPELINE)),
    ],
    ids=["zero1-on-2", "zero3-on-4", "split4-packed-on-4", "split2-on-4", "split2-in-a-pipeline-on-4"],
)
def test_sequence_parallel_run_resumes_in_another_layout(
    split: Path, tmp_path: Path, nproc: int, layout: tuple[str, ...]
) -> None:
    check_goes_on(split, tmp_path, nproc, (*FOUR_HEADS, *layout))


def check_goes_on(stopped: Path, folder: Path, nproc: int, layout: tuple[str, ...]) -> None:
    """Resume the run of `stopped` in `folder` from step 4; it must train as without a break."""
    spec = copy_stopped_at_4(stopped, folder)
    output = trained(spec, *layout, nproc=nproc)
    assert "going on from step 4" in output
    for key in METRICS:
        expected = records(stopped / "runs" / "small", key)
        assert records(folder / "runs" / "small", key) == pytest.approx(expected, rel=1e-6), key
    assert (exported(folder) - exported(stopped)).abs().max() < 1e-5


def exported(folder: Path) -> Tensor:
    """Return logits of the run's export."""
    model = AutoModelForCausalLM.from_pretrained(folder / "runs" / "small" / "export")
    with torch.no_grad():
        logits: Tensor = model(torch.arange(3, 40)[None]).logits
    return logits


CHAIN = (
    ("parallel.zero_stage=0",),
    ("parallel.zero_stage=2", "parallel.sequence_parallel=2"),
    ("parallel.zero_stage=3",),
    ("parallel.zero_stage=1",),
    PIPELINE[:2],
)


def test_run_resumes_through_all_zero_stages_into_a_pipeline(tmp_path: Path) -> None:
    """Two steps under each: ZeRO 0 → 2 with split rows → 3 → 1 → pipeline, against ten steps of ZeRO 1."""
    steady = ("optim.lr_scheduler_type=constant_with_warmup", "train.eval_every=2")  # whatever max_steps is
    for folder in ("whole", "changing"):
        (tmp_path / folder).mkdir()
    trained(write_spec(tmp_path / "whole"), *steady, "parallel.zero_stage=1")
    spec = write_spec(tmp_path / "changing")
    for stop, layout in enumerate(CHAIN, start=1):
        output = trained(spec, *steady, *layout, f"train.max_steps={2 * stop}")
        assert stop == 1 or f"going on from step {2 * stop - 2}: " in output
    for key in METRICS:
        expected = records(tmp_path / "whole" / "runs" / "small", key)
        found = records(tmp_path / "changing" / "runs" / "small", key)
        assert found == pytest.approx(expected, rel=1e-6), key


def test_changed_spec_is_refused_by_key(stopped: Path, tmp_path: Path) -> None:
    spec = copy_stopped_at_4(stopped, tmp_path)
    result = train(spec, *PIPELINE, "optim.learning_rate=1e-4", "train.seed=7", "data.max_length=200")
    assert result.returncode != 0 and not shows_traceback(result.stderr)
    for difference in (
        "optim.learning_rate was 0.003, now 0.0001",
        "train.seed was 42, now 7",
        "data.max_length was 256",
    ):
        assert difference in result.stderr
    assert records(tmp_path / "runs" / "small", "train/loss") == records(
        stopped / "runs" / "small", "train/loss"
    )


def test_damaged_checkpoints_are_skipped_but_never_for_step_0(stopped: Path, tmp_path: Path) -> None:
    spec = copy_stopped_at_4(stopped, tmp_path)
    checkpoints = tmp_path / "runs" / "small" / "checkpoints"
    shutil.copytree(stopped / "runs" / "small" / "checkpoints" / "step-8", checkpoints / "step-8")
    flip_a_bit(checkpoints / "step-8" / "rank-00001.safetensors")
    output = trained(spec, *PIPELINE, "train.max_steps=5")
    assert "warning: step-8 is skipped" in output and "going on from step 4" in output

    for folder in checkpoints.glob("step-*"):
        flip_a_bit(folder / "rank-00000.safetensors")
    refused = alone(TRAIN, [str(spec), "parallel.zero_stage=0", "train.max_steps=6"])
    assert refused.returncode == 76 and "does not start again from step 0" in " ".join(refused.stderr.split())
    assert not shows_traceback(refused.stderr)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_folder_in_use_or_with_checkpoints_is_refused(stopped: Path, tmp_path: Path) -> None:
    spec = copy_stopped_at_4(stopped, tmp_path)
    run = tmp_path / "runs" / "small"
    never = alone(TRAIN, [str(spec), "checkpoint.resume=never"])
    assert never.returncode == 73 and "checkpoint.resume is never" in never.stderr
    with FileLock(run / ".lock"):
        (run / ".lock").write_text("process 1 on elsewhere")
        used = alone(TRAIN, [str(spec)])
    assert used.returncode == 73 and f"{run} is used by process 1 on elsewhere" in used.stderr
    for result in (never, used):
        assert not shows_traceback(result.stderr)


def test_run_whose_folder_is_changed_during_training(stopped: Path, tmp_path: Path) -> None:
    """Checkpoints have the chat template of the start; without the lock nothing is saved."""
    run = tmp_path / "runs" / "small"
    result = alone(MEDDLING, [str(run), str(copy_stopped_at_4(stopped, tmp_path)), "parallel.zero_stage=0"])
    assert result.returncode == 73 and not shows_traceback(result.stderr)
    output = " ".join(result.stderr.split())
    assert f"This run has lost the lock of {run}: .lock was removed" in output
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-4", "step-8"]
    template = (run / "checkpoints" / "step-4" / "model" / "chat_template.jinja").read_text()
    assert (run / "model" / "chat_template.jinja").read_text() != template
    assert (run / "checkpoints" / "step-8" / "model" / "chat_template.jinja").read_text() == template


def test_malformed_rows_stop_the_run_before_training(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_bytes(b'{"text": "fine"}\n{"text": "cut\n{"text": 5}\n{"text": "\xff"}\n')
    overrides = [f"data.train=[{{path: {data}}}]", "data.eval=[]", "train.eval_every=null"]
    result = alone(TRAIN, [str(write_spec(tmp_path)), *overrides])
    assert result.returncode == 65 and not shows_traceback(result.stderr)
    for line in (2, 3, 4):
        assert f"rows.jsonl:{line}: " in result.stderr
