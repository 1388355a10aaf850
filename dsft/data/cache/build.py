"""Tokenize the blocks of data files, in this process or in worker processes, which do not import torch.

Each block is written to a file or returned. A ProcessPoolExecutor spawns the workers; each unpickles the
renderer once and is killed when its parent dies.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dsft.data import formats
from dsft.data.cache.block import BlockAccount, BlockBuilder, TokenBlock, save_block
from dsft.data.read.files import Block, read_block
from dsft.data.render.pair import pair_mistake
from dsft.data.render.renderer import Renderer
from dsft.data.rows import BadRowError, Line, Row, Sample, Text
from dsft.data.tokenizer.load import num_ids
from dsft.errors import DsftError, WorldError
from dsft.system.files import write_error
from dsft.system.process import die_with

MAX_BAD = 1000
"""Bad rows of a block whose reasons are stored; the others are only counted."""
_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 1 << 19  # of rows rendered together: the tokenizer needs about 50 bytes per character
_TELL_SECONDS = 0.5
_WORKER_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class BlockJob:
    """A block to tokenize.

    content  digest of the block's data file
    key      digest of everything that determines the result
    path     file to write
    """

    block: Block
    format: formats.Format
    content: str = ""
    key: str = ""
    path: Path = Path()


Progress = Callable[[int, int], None]
"""A callback with the number of blocks finished and of rows tokenized so far."""


# --- one block --------------------------------------------------------------------------------------------


def make_file(job: BlockJob, renderer: Renderer, dtype: str, tell: Callable[[int], None]) -> int:
    """Write the block's file and return its number of rows. `tell` is called with the rows so far.

    Raises StorageError and MissingInputError.
    """
    try:
        block = tokenize(job, renderer, dtype, tell, job.path.parent)
        save_block(job.path, block, job.key, job.block.index)
    except OSError as error:
        raise write_error(job.path, error, "set another data.cache_dir") from error
    return len(block)


def tokenize(
    job: BlockJob,
    renderer: Renderer,
    dtype: str,
    tell: Callable[[int], None] = lambda rows: None,
    folder: Path | None = None,
) -> TokenBlock:
    """Tokenize a block. dtype: numpy type of its tokens; folder: as in `BlockBuilder`."""
    with closing(BlockBuilder(dtype, folder)) as collected:
        return collected.block(gather(job.block, job.format, renderer, collected, tell))


def gather(
    block: Block, found: formats.Format, renderer: Renderer, rows: BlockBuilder, tell: Callable[[int], None]
) -> BlockAccount:
    """Read, convert and render a block's lines. Good rows are added to `rows`; the others are returned."""
    lines = blank = bad_rows = 0
    bad: list[tuple[int, str]] = []
    spelled: list[int] = []
    for batch in _batches(read_block(block), found):
        lines = max(lines, max((meant.line for meant in batch), default=0))
        blank += sum(meant.row is None and meant.mistake is None for meant in batch)
        mistakes = [(meant.line, meant.mistake) for meant in batch if meant.mistake is not None]
        mistakes += _render(batch, renderer, rows, spelled)
        bad_rows += len(mistakes)
        bad += sorted(mistakes)[: MAX_BAD - len(bad)]
        tell(len(rows))
    return BlockAccount(lines, blank, bad_rows, tuple(bad), len(spelled), tuple(spelled[:MAX_BAD]))


@dataclass(frozen=True, slots=True)
class _Meant:
    """A line converted to a Row, or the reason why it cannot be. content: hash of the row's content; size:
    characters of the row."""

    line: int
    row: Row | None = None
    mistake: str | None = None
    content: int = 0
    size: int = 0


def _batches(lines: Iterator[Line], found: formats.Format) -> Iterator[list[_Meant]]:
    """Yield batches of converted lines, each for one call of the tokenizer."""
    batch: list[_Meant] = []
    size = 0
    for line in lines:
        batch.append(_meant(line, found))
        size += batch[-1].size
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def _meant(line: Line, found: formats.Format) -> _Meant:
    if line.row is None:
        return _Meant(line.number, mistake=line.mistake)
    try:
        row = formats.convert(line.row, found)
    except BadRowError as error:
        return _Meant(line.number, mistake=str(error))
    return _Meant(line.number, row, None, formats.content_hash(row), sum(map(_size, row.samples)))


def _size(sample: Sample) -> int:
    if isinstance(sample, Text):
        return sum(len(part) for part, _ in sample.parts)
    return sum(len(str(message.get("content"))) for message in sample.messages)


def _render(
    batch: Sequence[_Meant], renderer: Renderer, rows: BlockBuilder, spelled: list[int]
) -> list[tuple[int, str]]:
    """Render a batch: add its tokens to `rows`, and to `spelled` the lines whose content spells a token of
    the template. Return (line, reason) of the rows that are refused; a pair is if either half is."""
    read = [(meant, meant.row) for meant in batch if meant.row is not None]
    rendered = iter(renderer.render([sample for _, row in read for sample in row.samples]))
    refused = []
    for meant, row in read:
        ones = [next(rendered) for _ in row.samples]
        whole = [one for one in ones if not isinstance(one, str)]
        mistake = next((one for one in ones if isinstance(one, str)), None)
        if mistake is None and len(whole) > 1:
            mistake = pair_mistake(*whole)
        if mistake is not None:
            refused.append((meant.line, mistake))
            continue
        for one in whole:
            spelled += [meant.line] * one.spelled
            rows.add(one, line=meant.line, content=meant.content, desirable=row.label is not False)
    return refused


# --- several processes ------------------------------------------------------------------------------------


class TokenizerPool:
    """Tokenizes blocks in up to `num_workers` processes, which are started on first use."""

    def __init__(self, renderer: Renderer, num_workers: int) -> None:
        self._renderer, self._num_workers = renderer, num_workers
        self._executor: ProcessPoolExecutor | None = None
        self._workers: list[Any] = []
        self._told: Any = None

    @cached_property
    def recipe(self) -> tuple[Renderer, str]:
        """The renderer, and the numpy type of tokens: <u2 if every token id fits in it, else <i4."""
        return self._renderer, "<u2" if num_ids(self._renderer.tokenizer) <= 2**16 else "<i4"

    def make(self, jobs: Sequence[BlockJob], progress: Progress, *, here: bool = False) -> None:
        """Write the files of all blocks. here: in this process, without workers.

        Raises the first error of any block, and WorldError if a worker is killed.
        """
        if not here and min(self._num_workers, len(jobs)) > 1:
            self._wait(jobs, self._submit(jobs), progress)
            return
        done = rows = 0

        def tell(count: int) -> None:
            progress(done, rows + count)

        for job in jobs:
            rows += make_file(job, *self.recipe, tell)
            done += 1
            tell(0)

    def close(self) -> None:
        """Kill the workers, even while they work."""
        for worker in self._workers:
            worker.kill()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._executor, self._workers, self._told = None, [], None  # releases their semaphores

    def _submit(self, jobs: Sequence[BlockJob]) -> list[Future[int]]:
        with _worker_settings():
            if self._executor is None:
                context = multiprocessing.get_context("spawn")
                self._told = context.SimpleQueue()
                given = os.getpid(), pickle.dumps(self.recipe), self._told
                self._executor = ProcessPoolExecutor(self._num_workers, context, _start, given)
            futures = [self._executor.submit(_make, number, job) for number, job in enumerate(jobs)]
        self._workers = list(self._executor._processes.values())
        return futures

    def _wait(self, jobs: Sequence[BlockJob], pending: Sequence[Future[int]], progress: Progress) -> None:
        rows = dict.fromkeys(pending, 0)
        at_work: dict[int, BlockJob] = {}
        left = set(pending)
        while left:
            finished, left = wait(left, _TELL_SECONDS, FIRST_COMPLETED)
            while not self._told.empty():
                worker, number, count = self._told.get()
                at_work[worker] = jobs[number]
                rows[pending[number]] = count
            for one in finished:
                try:
                    rows[one] = one.result()
                except BrokenProcessPool:
                    raise self._broken(at_work, jobs[pending.index(one)]) from None
            if any(rows.values()):
                progress(len(pending) - len(left), sum(rows.values()))

    def _broken(self, at_work: dict[int, BlockJob], undone: BlockJob) -> WorldError:
        """Return the error for a worker that was killed, after which the executor ends the others with
        SIGTERM. at_work: worker's pid -> the block it works on; undone: the block whose future failed."""
        assert self._executor is not None
        self._executor.shutdown()
        codes = {worker.pid: worker.exitcode for worker in self._workers}
        ended = [pid for pid, code in codes.items() if code not in (0, None, -signal.SIGTERM)]
        pid = (ended or [*codes])[0]
        code, name = codes[pid], undone.block.file.name
        what = (
            f"block {at_work[pid].block.index} of {at_work[pid].block.file.name}" if pid in at_work else name
        )
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        why = ", as a machine does whose memory is full; set a smaller data.num_workers" if code == -9 else ""
        return WorldError(f"data: the process that made tokens of {what} {how}{why}.")


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

_worker: tuple[Renderer, str, Any]
"""The renderer, the numpy type of tokens, and the queue to the parent."""


def _start(parent: int, recipe: bytes, told: Any) -> None:
    """Initialize a worker. Must not raise, which would break the pool."""
    global _worker
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])  # the parent's mask may block SIGTERM
    _worker = (*pickle.loads(recipe), told)  # bytes of the parent process, not of a file


def _make(number: int, job: BlockJob) -> int:
    """Write the file of block `number` and return its number of rows. Report progress to the parent."""
    renderer, dtype, queue = _worker
    last = 0.0

    def tell(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > _TELL_SECONDS:
            last = time.monotonic()
            queue.put((os.getpid(), number, rows))

    tell(0)
    try:
        return make_file(job, renderer, dtype, tell)
    except DsftError:
        raise
    except Exception:  # a bug in dsft; the exception itself may not be picklable
        what = f"block {job.block.index} of {job.block.file.name}"
        raise RuntimeError(f"{what}:\n{traceback.format_exc()}") from None
