"""Tokenize the blocks of data files, in this process or in worker processes, which do not import torch.

Each block is written to a file or returned. A ProcessPoolExecutor spawns the workers; each unpickles the
renderer once and is killed when its parent dies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsft.data import formats
from dsft.data.cache.block import BlockAccount, BlockBuilder, TokenBlock, save_block
from dsft.data.read.files import Block, read_block
from dsft.data.render.renderer import Renderer, pair_mistake
from dsft.data.rows import BadRowError, Line, Row, Text
from dsft.data.tokenizer.load import num_ids
from dsft.errors import DsftError, WorldError
from dsft.spec.task import TASKS
from dsft.system.files import write_error
from dsft.system.process import die_with

MAX_BAD = 1000
"""Bad rows of a block whose reasons are stored; the others are only counted."""
_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 1 << 19  # of rows rendered together: the tokenizer needs about 50 bytes per character
_WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class BlockJob:
    """A block to tokenize.

    content  digest of the block's data file
    key      digest of everything that determines the result
    path     folder to write
    """

    block: Block
    format: formats.Format
    content: str = ""
    key: str = ""
    path: Path = Path()


# --- one block --------------------------------------------------------------------------------------------


def write_block(job: BlockJob, renderer: Renderer, dtype: str) -> int:
    """Write the block and return its number of rows. Raises StorageError and MissingInputError."""
    try:
        block = tokenize_block(job, renderer, dtype)
        save_block(job.path, block, job.key, job.block.index)
    except OSError as error:
        raise write_error(job.path, error, "set another data.cache_dir") from error
    return len(block)


def tokenize_block(job: BlockJob, renderer: Renderer, dtype: str) -> TokenBlock:
    """Read, convert and tokenize the rows of a block. dtype: numpy type of its tokens."""
    lines = blank = bad_rows = 0
    bad: list[tuple[int, str]] = []
    spelled: list[int] = []
    builder, absent = BlockBuilder(dtype, TASKS[job.format.task].stored), set(job.format.columns.values())
    for batch in _batches(read_block(job.block), job.format, absent):
        lines = max([lines, *(line.number for line in batch)])
        blank += sum(line.row is None and line.mistake is None for line in batch)
        mistakes = [(line.number, line.mistake) for line in batch if line.mistake is not None]
        mistakes += _render(batch, renderer, builder, spelled)
        bad_rows += len(mistakes)
        bad += sorted(mistakes)[: MAX_BAD - len(bad)]
    places = tuple(spelled[:MAX_BAD]), tuple(sorted(absent))
    return builder.block(BlockAccount(lines, blank, bad_rows, tuple(bad), len(spelled), *places))


@dataclass(frozen=True, slots=True)
class _ConvertedLine:
    """A line converted to a Row, or the mistake in it. content: hash of the row's content; size: characters
    of the row."""

    number: int
    row: Row | None = None
    mistake: str | None = None
    content: int = 0
    size: int = 0


def _batches(
    lines: Iterator[Line], format: formats.Format, absent: set[str]
) -> Iterator[list[_ConvertedLine]]:
    """Yield batches of converted lines, each for one call of the tokenizer. The columns that a line has are
    removed from `absent`."""
    batch: list[_ConvertedLine] = []
    size = 0
    for line in lines:
        if absent:
            absent.difference_update(line.row or ())
        batch.append(_converted(line, format))
        size += batch[-1].size
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _converted(line: Line, format: formats.Format) -> _ConvertedLine:
    if line.row is None:
        return _ConvertedLine(line.number, mistake=line.mistake)
    try:
        row = formats.convert(line.row, format)
    except BadRowError as error:
        return _ConvertedLine(line.number, mistake=str(error))
    size = 0
    for sample in row.samples:
        if isinstance(sample, Text):
            size += sum(len(part) for part, _ in sample.parts)
        else:
            size += sum(len(str(message.get("content"))) for message in sample.messages)
    return _ConvertedLine(line.number, row, None, formats.content_hash(row), size)


def _render(
    batch: Sequence[_ConvertedLine], renderer: Renderer, builder: BlockBuilder, spelled: list[int]
) -> list[tuple[int, str]]:
    """Tokenize a batch: add its rows to the block, and to `spelled` the lines whose content spells a token of
    the template. Return (line, reason) of the rows that are refused; a pair is if either half is."""
    good = [(line, line.row) for line in batch if line.row is not None]
    rendered = iter(renderer.render([sample for _, row in good for sample in row.samples]))
    refused = []
    for line, row in good:
        outcomes = [next(rendered) for _ in row.samples]
        samples = [one for one in outcomes if not isinstance(one, str)]
        mistake = next((one for one in outcomes if isinstance(one, str)), None)
        if mistake is None and len(samples) > 1:
            mistake = pair_mistake(*samples)
        if mistake is not None:
            refused.append((line.number, mistake))
            continue
        for number, sample in enumerate(samples):
            spelled += [line.number] * sample.spelled
            own = {name: values[number] for name, values in row.values.items()}
            builder.add(sample, line=line.number, content=line.content, own=own)
    return refused


# --- several processes ------------------------------------------------------------------------------------


class TokenizerPool:
    """Tokenizes blocks in up to `num_workers` processes, which are started on first use."""

    def __init__(self, renderer: Renderer, num_workers: int) -> None:
        self._renderer, self._num_workers = renderer, num_workers
        self._executor: ProcessPoolExecutor | None = None
        self._workers: list[Any] = []

    @cached_property
    def recipe(self) -> tuple[Renderer, str]:
        """The renderer, and the numpy type of tokens: <u2 if every token id fits in it, else <i4."""
        return self._renderer, "<u2" if num_ids(self._renderer.tokenizer) <= 2**16 else "<i4"

    def write(self, jobs: Sequence[BlockJob], *, here: bool = False) -> Iterator[int]:
        """Write all blocks and yield the number of rows of each that is finished. here: work in this process,
        without workers.

        Raises the first error of any block, and WorldError if a worker is killed.
        """
        if here or min(self._num_workers, len(jobs)) <= 1:
            yield from (write_block(job, *self.recipe) for job in jobs)
            return
        try:
            for future in as_completed(self._submit(jobs)):
                yield future.result()
        except BrokenProcessPool:
            raise self._broken() from None

    def close(self) -> None:
        """Kill the workers, even while they work."""
        for worker in self._workers:
            worker.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor, self._workers = None, []  # releases their semaphores

    def _submit(self, jobs: Sequence[BlockJob]) -> list[Future[int]]:
        with _worker_settings():
            if self._executor is None:
                context = multiprocessing.get_context("spawn")
                arguments = os.getpid(), pickle.dumps(self.recipe)
                self._executor = ProcessPoolExecutor(self._num_workers, context, _start_worker, arguments)
            futures = [self._executor.submit(_write_in_worker, job) for job in jobs]
        self._workers = list(self._executor._processes.values())
        return futures

    def _broken(self) -> WorldError:
        """Return the error for a worker that was killed. The executor then ends the others with SIGTERM."""
        assert self._executor is not None
        self._executor.shutdown()
        codes = [worker.exitcode for worker in self._workers]
        code = next((one for one in codes if one not in (0, None, -signal.SIGTERM)), -signal.SIGTERM)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        why = "; if the machine's memory was full, set a smaller data.num_workers" if code == -9 else ""
        return WorldError(f"data: a process that tokenized rows {how}{why}.")


@contextmanager
def _worker_settings() -> Iterator[None]:
    """Set what workers inherit: an environment for single-threaded work, and a signal mask without Ctrl-C."""
    before = {name: os.environ.get(name) for name in _WORKER_ENVIRONMENT}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.environ.update(_WORKER_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# --- a worker ---------------------------------------------------------------------------------------------

_worker: tuple[Renderer, str]
"""The renderer and the numpy type of tokens."""


def _start_worker(parent: int, recipe: bytes) -> None:
    """Initialize a worker. Must not raise, which would break the pool."""
    global _worker
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])  # the parent's mask may block SIGTERM
    _worker = pickle.loads(recipe)  # bytes of the parent process, not of a file


def _write_in_worker(job: BlockJob) -> int:
    try:
        return write_block(job, *_worker)
    except DsftError:
        raise
    except Exception:  # a bug in dsft; the exception itself may not be picklable
        what = f"block {job.block.index} of {job.block.file.name}"
        raise RuntimeError(f"{what}:\n{traceback.format_exc()}") from None
