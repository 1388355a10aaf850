"""Makes blocks of tokens: in this process, or in several that import no torch.

Takes the blocks of files with what their rows become. Writes a file per block, or gives its bytes. A worker
is a fresh interpreter that gets the renderer once and then block after block over a socket; it dies with its
parent, however that dies.

    python -m dsft.data.cache.build DESCRIPTOR PARENT    a worker: the socket it inherited, who started it
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from dsft.data import formats
from dsft.data.cache.block import Found, Gathered
from dsft.data.read.files import Block, read_block
from dsft.data.render.pair import pair_mistake
from dsft.data.render.renderer import Renderer
from dsft.data.rows import BadRowError, Line, Row, Sample, Text
from dsft.errors import DsftError, WorldError
from dsft.system.files import atomic_write, write_error
from dsft.system.process import die_with

MAX_BAD = 1000
"""Bad rows of a block that are kept; the others are counted."""
_BATCH_ROWS = 1000
_BATCH_CHARACTERS = 1 << 19  # of rows that are rendered together: the tokenizer holds some 50 bytes for each
_SPILL = 64 << 20  # bytes of a block's tokens that wait in memory, more of them on the disk
_TELL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """A block to be made. content: its file's digest; key: a digest of all that decides what is made of it;
    path: where it goes."""

    block: Block
    format: formats.Format
    content: str = ""
    key: str = ""
    path: Path = Path()


Progress = Callable[[int, int], None]
"""Is given blocks that are made, and rows that are tokens, since the start."""


# --- one block --------------------------------------------------------------------------------------------


def make_file(job: Job, renderer: Renderer, token_type: str, tell: Callable[[int], None]) -> int:
    """Write the block's file, and give its number of rows. `tell` is called with the rows so far.

    Raises StorageError and MissingInputError.
    """
    try:
        with tempfile.SpooledTemporaryFile(_SPILL, dir=str(job.path.parent)) as spill:
            gathered = Gathered(token_type, spill)
            found = gather(job.block, job.format, renderer, gathered, tell)
            with atomic_write(job.path) as out:
                gathered.write(out, found, job.key, job.block.index)
            return len(gathered)
    except OSError as error:
        raise write_error(job.path, error, "set another data.cache_dir") from error


def make_bytes(job: Job, renderer: Renderer, token_type: str) -> bytes:
    """The block as its file would have it."""
    gathered, out = Gathered(token_type, io.BytesIO()), io.BytesIO()
    found = gather(job.block, job.format, renderer, gathered, lambda rows: None)
    gathered.write(out, found, job.key, job.block.index)
    return out.getvalue()


def gather(
    block: Block, found: formats.Format, renderer: Renderer, rows: Gathered, tell: Callable[[int], None]
) -> Found:
    """Read, convert and render the block's lines; what becomes of each is in `rows` or in the result."""
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
    return Found(lines, blank, bad_rows, tuple(bad), len(spelled), tuple(spelled[:MAX_BAD]))


@dataclass(frozen=True, slots=True)
class _Meant:
    """A line with what it means. `content` and `size` (characters) of its row."""

    line: int
    row: Row | None = None
    mistake: str | None = None
    content: int = 0
    size: int = 0


def _batches(lines: Iterator[Line], found: formats.Format) -> Iterator[list[_Meant]]:
    """As many lines at a time as one call of the tokenizer takes."""
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
    batch: Sequence[_Meant], renderer: Renderer, rows: Gathered, spelled: list[int]
) -> list[tuple[int, str]]:
    """Add the batch's rows, and the lines of those whose contents spell a token of the template; give (line,
    reason) of those that it refuses. A pair of which it refuses one is refused whole."""
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


class Makers:
    """`num_workers` processes that make blocks, started when they are needed; none where that is below 2."""

    def __init__(self, renderer: Renderer, token_type: str, num_workers: int) -> None:
        self._recipe = renderer, token_type
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def make(self, jobs: Sequence[Job], progress: Progress) -> None:
        """Write the files of all blocks.

        Raises the first error that one meets; WorldError where a worker ends without a word.
        """
        wanted = min(self._num_workers, len(jobs))
        if wanted < 2:
            self._make_here(jobs, progress)
            return
        if wanted > len(self._workers):
            recipe = pickle.dumps(self._recipe)
            self._workers += [_Worker(recipe) for _ in range(wanted - len(self._workers))]
        _share(jobs, self._workers[:wanted], progress)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _make_here(self, jobs: Sequence[Job], progress: Progress) -> None:
        rows = 0
        for done, job in enumerate(jobs):
            rows += make_file(job, *self._recipe, partial(_told, progress, done, rows))
            progress(done + 1, rows)


def _told(progress: Progress, done: int, before: int, rows: int) -> None:
    progress(done, before + rows)


def _share(jobs: Sequence[Job], workers: Sequence[_Worker], progress: Progress) -> None:
    """Give each worker that is free the next block, until none is left."""
    waiting = list(reversed(jobs))
    rows: dict[Path, int] = {}
    for worker in workers:
        worker.start(waiting.pop())
    done = 0
    while done < len(jobs):
        at_work = {worker.connection: worker for worker in workers if worker.job is not None}
        for ready in wait(list(at_work)):
            worker = at_work[cast(Connection, ready)]
            path, answer = worker.answer()
            rows[path] = answer.rows
            if answer.is_done:
                done += 1
                if waiting:
                    worker.start(waiting.pop())
        progress(done, sum(rows.values()))


@dataclass(frozen=True)
class _Answer:
    """rows: of the block so far. error: why it is not made; what, where it is no DsftError."""

    rows: int = 0
    is_done: bool = False
    error: DsftError | None = None
    what: str | None = None


class _Worker:
    """A worker as its parent sees it. recipe: the pickled renderer and type of tokens."""

    def __init__(self, recipe: bytes) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            words = [str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dsft.data.cache.build", *words],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for the parent, which ends its workers
            )
            self.connection = Connection(ours.detach())
        self.job: Job | None = None
        self._recipe: bytes | None = recipe

    def start(self, job: Job) -> None:
        self.job = job
        try:
            if self._recipe is not None:
                self.connection.send_bytes(self._recipe)
                self._recipe = None
            self.connection.send(job)
        except OSError:
            raise self._gone() from None

    def answer(self) -> tuple[Path, _Answer]:
        assert self.job is not None
        path = self.job.path
        try:
            answer: _Answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if answer.error is not None:
            raise answer.error
        if answer.what is not None:
            raise RuntimeError(f"{self._what()}:\n{answer.what}")
        if answer.is_done:
            self.job = None
        return path, answer

    def end(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()

    def _what(self) -> str:
        return f"block {self.job.block.index} of {self.job.block.file.name}" if self.job else "no block"

    def _gone(self) -> WorldError:
        code = self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        why = ", as a machine does whose memory is full; set a smaller data.num_workers" if code == -9 else ""
        return WorldError(f"data: the process that made tokens of {self._what()} {how}{why}.")


def _environment() -> dict[str, str]:
    """A worker is one thread, and imports the dsft that runs here."""
    root = str(Path(__file__).resolve().parents[3])
    path = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }


# --- a worker ---------------------------------------------------------------------------------------------


def work(descriptor: int, parent: int) -> None:
    """Make blocks until the parent says no more."""
    die_with(parent)
    connection = Connection(descriptor)
    told = 0.0

    def tell(rows: int) -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_SECONDS:
            told = time.monotonic()
            connection.send(_Answer(rows))

    with suppress(EOFError, ConnectionError):  # the parent is gone, or needs no more
        recipe: tuple[Renderer, str] = pickle.loads(connection.recv_bytes())
        while True:
            job: Job = connection.recv()
            try:
                answer = _Answer(make_file(job, *recipe, tell), is_done=True)
            except DsftError as error:
                answer = _Answer(error=error)
            except Exception:  # told by the parent, as what it is: a fault of dsft
                answer = _Answer(what=traceback.format_exc())
            connection.send(answer)


if __name__ == "__main__":
    # Not this copy of the module, which is named __main__: what is sent belongs to the other.
    from dsft.data.cache.build import work as work_there

    work_there(int(sys.argv[1]), int(sys.argv[2]))
