"""The advice for a run that does not fit: an engine takes memory by the token, under a real limit."""

import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsft.data.steps.batch import Answers, MicroBatch
from dsft.errors import OutOfMemoryError
from dsft.plan.memory.sizes import GIB
from dsft.report.memory import MemoryMeter, Phase, is_out_of_memory
from dsft.setup.memory_probe import (
    PeakMemory,
    advice,
    explain_out_of_memory,
    probe_memory,
    tokens_that_fit,
)
from tests.make import make_micro_batch


def micro_batch(rows: int, length: int, lengths: tuple[int, ...] | None = None) -> MicroBatch:
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    return make_micro_batch(tokens, tokens, tokens, lengths)


def of_pairs(rows: int, length: int) -> MicroBatch:
    ids = torch.arange(rows // 2)
    return replace(micro_batch(rows, length), answers=Answers(ids, torch.ones(rows // 2, 2).long()))


def test_the_first_part_of_a_padded_and_of_a_packed_micro_batch() -> None:
    padded = micro_batch(3, 8).first(2)
    assert padded.shape == (3, 2) and padded.segments is None
    for length, lengths in ((10, (4, 5, 1)), (9, (4, 5)), (6, (4, 2)), (4, (4,)), (1, (1,))):
        packed = micro_batch(1, 10, (4, 5, 1)).first(length)
        assert packed.segments is not None and packed.segments.lengths == lengths
        assert packed.tokens.targets.shape == (1, length)


@pytest.mark.parametrize(("measured", "limit", "fit"), [
    ([PeakMemory(100, 1000), PeakMemory(200, 1400)], 2000, 350),  # 4 bytes a token above 600
    ([PeakMemory(100, 1000), PeakMemory(200, 1000)], 2000, 200),  # the update was the fullest moment
    ([PeakMemory(100, 1000)], 2000, 100),
    ([], 2000, None),
])  # fmt: skip
def test_what_fits_by_a_straight_line(measured: list[PeakMemory], limit: int, fit: int | None) -> None:
    assert tokens_that_fit(measured, limit) == fit


@pytest.mark.parametrize(("batch", "fit", "way_out"), [
    (micro_batch(4, 100), 250, "set train.micro_batch_size to 2 or less"),
    (micro_batch(4, 100), 80, "set train.micro_batch_size to 1 and data.max_length to 80 or less"),
    (micro_batch(1, 400, (200, 200)), 250, "set data.max_tokens_per_micro_batch to 250 or less"),
    (micro_batch(4, 100), 4000, "set train.micro_batch_size to 3 or less"),  # all of it did not fit
    (of_pairs(8, 100), 650, "set train.micro_batch_size to 3 or less"),
    (of_pairs(8, 100), 180, "set train.micro_batch_size to 1 and data.max_length to 90 or less"),
])  # fmt: skip
def test_the_way_out_is_a_size_of_the_spec(batch: MicroBatch, fit: int, way_out: str) -> None:
    measured = [PeakMemory(50, GIB), PeakMemory(60, GIB + 10 * 2**20)]
    text = advice(batch, measured, GIB + (fit - 50) * 2**20, "CUDA out of memory.\nTried")
    assert way_out in text and "CUDA out of memory. Tried" in text and "60 tokens took 1.01 GiB" in text


def test_only_failed_allocations_are_taken_for_such() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"))
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried …")
    )
    assert is_out_of_memory(MemoryError())
    for text in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "NCCL error … ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 "
        "'out of memory'",
        "NCCL error … ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA "
        "calloc 4194304 bytes",
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    assert not is_out_of_memory(
        RuntimeError("NCCL … ncclUnhandledCudaError: Cuda failure 700 'an illegal …'")
    )
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(("phase", "text"), [
    ("load", "The model and its engine do not fit into memory (CUDA out of memory. Tried to"),
    ("steady", "The memory is full in a step (CUDA out of memory. Tried to"),
    ("evaluation", "The memory is full in an evaluation (CUDA out of memory. Tried to"),
    ("save", "The memory is full in a save (CUDA out of memory. Tried to"),
])  # fmt: skip
def test_after_the_probe_a_full_memory_ends_the_run_with_advice(phase: Phase, text: str) -> None:
    meter = MemoryMeter(torch.device("cpu"))
    meter.enter(phase)
    with pytest.raises(OutOfMemoryError) as raised, explain_out_of_memory(meter):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.01 GiB")
    assert str(raised.value).startswith(text) and "model.gradient_checkpointing" in str(raised.value)
    assert raised.value.exit_code == 71


def test_other_faults_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(MemoryMeter(torch.device("cpu"))):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


ROOM = 250 * 2**20


class Engine:
    """Takes 128 KiB for each token of a step. evaluated: the tokens for which an evaluation takes memory."""

    def __init__(self, evaluated: int | None) -> None:
        self.evaluated = evaluated

    def probe(self, batch: MicroBatch) -> None:
        torch.ones(batch.shape.numel() * 2**15)

    def evaluate(self, batches: Any) -> None:
        torch.ones((self.evaluated or 0) * 2**15)


def refusal(length: int, evaluated: int | None = None) -> str:
    """Return what the probe of 4 rows says in a child of this process that may take ROOM bytes more."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        code = 1
        try:
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, -1))
            torch.set_num_threads(1)  # OpenMP's threads are not in a fork
            engine: Any = Engine(evaluated)
            batch, meter = micro_batch(4, length), MemoryMeter(torch.device("cpu"))
            try:
                probe_memory(engine, batch, batch if evaluated else None, meter)
            except OutOfMemoryError as error:
                os.write(writing, str(error).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return found


@pytest.mark.filterwarnings("ignore:.*fork")
def test_under_a_limit_the_size_that_fits_is_found_from_two_smaller_ones() -> None:
    """250 MiB hold 2,000 tokens of 128 KiB: 4 rows of 600 are too many, 4 × 300 are not."""
    text = refusal(600)
    assert "4 × 600 tokens, does not fit" in text and "DefaultCPUAllocator" in text
    fit = int(re.findall(r"about ([\d,]+) tokens would fit", text)[0].replace(",", ""))
    assert 1700 <= fit <= 2000
    assert "set train.micro_batch_size to 3 or less" in text or "set train.micro_batch_size to 2 or" in text
    assert refusal(400) == ""


@pytest.mark.filterwarnings("ignore:.*fork")
def test_evaluation_that_does_not_fit_is_refused_too() -> None:
    assert "does not fit" in refusal(100, 2400)
    assert refusal(100, 400) == ""
