"""Tokenize the rows of a source once, cache them on disk and memory-map them.

The cache has a folder per data file, named by a digest of everything that determines its content. If several
processes, on any hosts, need the same rows at once, one tokenizes them and the others wait for its file lock;
no collective is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

from dsft.data import formats
from dsft.data.cache.block import VERSION, BlockAccount, DamagedBlockError, open_block, remove_block
from dsft.data.cache.build import MAX_BAD, BlockJob, TokenizerPool, tokenize_block
from dsft.data.cache.rows import BlockIndex, FileHead, StoredRows, join_blocks
from dsft.data.formats.values import quoted
from dsft.data.read.files import Block, DataFile, blocks, data_files, file_digest, file_lines, readable
from dsft.data.read.sample import sample
from dsft.data.render.renderer import Renderer
from dsft.data.rows import BadRowError, Line, data_error, printable
from dsft.errors import DataError, Problem, StorageError
from dsft.spec.listing import local_files
from dsft.spec.schema import Source, Spec
from dsft.spec.sources import BUILTIN_PREFIX
from dsft.spec.task import TASKS
from dsft.system.digest import FileState, known_digest
from dsft.system.files import TEMPORARY
from dsft.system.host import cores
from dsft.system.lock import lock_folder

_PLACEHOLDER = re.compile(r"\{\{ ?\w+ ?\}\}")
_SMALL = 8 << 20  # bytes of data below which workers are not worth starting
_FILES_AT_ONCE = 64  # files locked at the same time: each lock takes a file descriptor
DIGESTS = "digests"
"""Subfolder of the cache with the digests of data files."""


@dataclass(frozen=True)
class TokenizeProgress:
    """Progress of tokenizing a source. name: its path; total, done: blocks that were missing from the cache,
    and how many of them are finished; rows: tokenized so far."""

    name: str
    done: int
    total: int
    rows: int

    def text(self, seconds: float) -> str:
        speed = f" ({self.rows / seconds:,.0f} rows/s)" if seconds > 0 else ""
        return f"{self.name}: tokenized {self.rows:,} rows{speed}"

    def count(self) -> str:
        return f"{self.done} of {self.total} blocks"


@dataclass(frozen=True)
class CacheSummary:
    """What the cache has of a source. tokenized: blocks that were missing, which took `seconds`; num_bytes:
    of all blocks."""

    name: str
    rows: int
    blocks: int
    tokenized: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        count = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        text = f"{self.name}: {count}, {self.num_bytes / 1e6:,.1f} MB of tokens"
        if not self.tokenized:
            return f"{text}, already in the cache"
        return f"{text}, tokenized {self.tokenized} of {self.blocks} blocks in {self.seconds:.1f} s"


class NotCachedError(Exception):
    """Rows are not in the cache."""


@dataclass(frozen=True)
class Cache:
    """Where tokens are cached, and how rows are tokenized.

    folder       the cache folder; None: tokens stay in memory, and this process tokenizes
    num_workers  number of worker processes; None: one per core
    log          called with a sentence for each wait and each problem
    progress     called while rows are tokenized
    report       called once per source, with a summary of its blocks
    tokenizes    False: NotCachedError is raised if rows are not in the cache
    sample       None: all rows are read; else about this number of bytes of each source's rows, spread over
                 its files. Needs folder None
    """

    folder: Path | None = None
    num_workers: int | None = 0
    log: Callable[[str], None] = field(default=lambda text: None)
    progress: Callable[[TokenizeProgress], None] = field(default=lambda progress: None)
    report: Callable[[CacheSummary], None] = field(default=lambda summary: None)
    tokenizes: bool = True
    sample: int | None = None


IN_MEMORY = Cache()


def cache_folder(spec: Spec) -> Path:
    """Return the cache folder of a spec."""
    return Path(spec.data.cache_dir) if spec.data.cache_dir else Path(spec.output_dir, ".cache", "data")


def tokenized_rows(
    source: Source,
    renderer: Renderer,
    *,
    task: str,
    labels: tuple[str, ...] = (),
    cache: Cache = IN_MEMORY,
    max_rows: int | None = None,
) -> StoredRows:
    """Return the tokens of all rows of the source, or of the first `max_rows`, from the cache where possible.
    labels: as in `Format`.

    Raises MissingInputError for a missing file, DataError if a file changes while it is read, StorageError if
    the cache cannot be written, WorldError if a worker is killed. Bad rows are listed in the account.
    """
    began = time.monotonic()
    files, parts, share = data_files(source.path), list[Block](), 1.0
    if cache.sample is not None:
        parts, share = sample(files, cache.sample)
        files = tuple(dict.fromkeys(part.file for part in parts))
    heads = [_head(file, source, task, labels) for file in files]
    jobs = [job for head in heads for job in _jobs(head, renderer, cache, parts)]
    opened: list[tuple[BlockJob, BlockIndex]] = []
    with closing(_BlockStore(source.path, renderer, cache)) as store:
        for wave in _waves(jobs, store.num_workers if max_rows is not None else None):
            opened += zip(wave, store.open(wave), strict=True)
            if max_rows is not None and sum(len(index) for _, index in opened) >= max_rows:
                break
    rows = join_blocks(heads, opened, max_rows, share, TASKS[task].stored)
    if cache.folder is not None:
        num_bytes, seconds = sum(index.num_bytes for _, index in opened), time.monotonic() - began
        counts = len(rows.lengths), len(opened), store.num_tokenized
        cache.report(CacheSummary(source.path, *counts, seconds, num_bytes))
    return rows


# --- the blocks of a file ---------------------------------------------------------------------------------


def _head(file: DataFile, source: Source, task: str, labels: tuple[str, ...]) -> FileHead:
    """Detect a file's format from its first rows, which are read at every start, cached or not."""
    rows: list[Line] = []
    bad: list[tuple[int, str]] = []
    blank = bad_rows = 0
    for line in file_lines(file):
        if line.row is not None:
            rows.append(line)
        elif line.mistake is None:
            blank += 1
        else:
            bad_rows += 1
            bad += [(line.number, line.mistake)] * (len(bad) < MAX_BAD)
        if len(rows) == formats.HEAD_ROWS:
            break
    format = refusal = None
    try:
        format = formats.choose(source, rows, task, labels) if rows else None
    except BadRowError as error:
        refusal = (rows[0].number, str(error))
        bad_rows, bad = bad_rows + 1, [*bad, refusal]
    unfilled = tuple(line.number for line in rows if _PLACEHOLDER.search(repr(line.row)))
    account = BlockAccount(0, blank, bad_rows, tuple(sorted(bad)))
    columns = tuple(dict.fromkeys(key for line in rows for key in line.row or ()))
    return FileHead(file, format, account, refusal, unfilled, columns)


def check_first_rows(spec: Spec) -> list[str]:
    """Check the first rows of each source's first file that has any, and return a warning for each source
    whose `columns` names some that these rows lack: a run, which reads all rows, refuses what none has.
    Nothing is tokenized, and a data set of the hub is not looked up.

    Raises DataError if a source has no rows, or if its first rows do not fit the task or their format.
    """
    problems, warnings = list[Problem](), list[str]()
    for source in (*spec.data.train, *spec.data.eval):
        if not source.path.startswith(BUILTIN_PREFIX) and local_files(source.path) is not None:
            heads = (_head(file, source, spec.task, spec.labels) for file in data_files(source.path))
            head = next((head for head in heads if head.format or head.account.bad), None)
            if head is None:
                problems.append(Problem(source.path, "has no rows; name a file with rows"))
                continue
            file = head.file
            if absent := sorted(set(source.columns.values()) - set(head.columns)):
                has = f"which its first rows, with {quoted(head.columns)}, do not have"
                refused = "a run refuses what no row has"
                warnings.append(f"{file.name}: columns names {quoted(absent)}, {has}; {refused}")
            bad = list(_bad_rows(file, head)) if spec.data.on_bad_row == "error" else [head.refusal]
            problems += [Problem(f"{file.name}:{one[0]}", printable(one[1])) for one in bad if one]
    if problems:
        raise data_error(problems, "The first rows of the data have mistakes:", len(problems))
    return warnings


def _bad_rows(file: DataFile, head: FileHead) -> Iterator[tuple[int, str]]:
    """Yield the mistakes in the first rows of a file."""
    yield from head.account.bad
    if head.format is None:
        return
    for line in islice(file_lines(file), formats.HEAD_ROWS):
        if line.row is not None:
            try:
                formats.convert(line.row, head.format)
            except BadRowError as error:
                yield line.number, str(error)


def _jobs(head: FileHead, renderer: Renderer, cache: Cache, sampled: Sequence[Block]) -> list[BlockJob]:
    """Return the blocks of a file, or those `sampled`; none if it has no format."""
    if head.format is None:
        return []
    parts = [part for part in sampled if part.file == head.file] or blocks(head.file)
    if cache.folder is None:
        return [BlockJob(part, head.format) for part in parts]
    if not cache.tokenizes and head.file.path:
        with readable(head.file):
            state = FileState.of(Path(head.file.path))
        if known_digest(state, cache.folder / DIGESTS) is None:
            raise NotCachedError
    content = file_digest(head.file, cache.folder / DIGESTS)
    # Everything that determines the content of a block, including where the file is cut into blocks.
    cuts = [[part.start, part.stop] for part in parts]
    of_format = {name: value for name, value in vars(head.format).items() if name not in ("reason", "by")}
    own = TASKS[head.format.task].fields
    inputs = json.dumps([VERSION, content, cuts, of_format, renderer.digest, *own], sort_keys=True)
    key = hashlib.sha256(inputs.encode()).hexdigest()
    folder = cache.folder / key[:32]
    return [BlockJob(part, head.format, content, key, folder / f"block-{part.index:05}") for part in parts]


def _waves(jobs: Sequence[BlockJob], size: int | None) -> Iterator[Sequence[BlockJob]]:
    """Yield the first block, then `size` blocks at a time; size None: the blocks of _FILES_AT_ONCE files."""
    if size is not None:
        yield jobs[:1]  # often holds enough rows
        yield from (jobs[i : i + max(1, size)] for i in range(1, len(jobs), max(1, size)))
        return
    of_file = [list(group) for _, group in groupby(jobs, key=lambda job: job.path.parent)]
    for i in range(0, len(of_file), _FILES_AT_ONCE):
        yield [job for group in of_file[i : i + _FILES_AT_ONCE] for job in group]


# --- the cache folder -------------------------------------------------------------------------------------


class _BlockStore:
    """The blocks of one source; missing ones are tokenized."""

    def __init__(self, name: str, renderer: Renderer, cache: Cache) -> None:
        self._name, self._cache = name, cache
        self.num_tokenized = 0
        self.num_workers = cores() if cache.num_workers is None else cache.num_workers
        self._pool = TokenizerPool(renderer, self.num_workers)

    def open(self, jobs: Sequence[BlockJob]) -> list[BlockIndex]:
        if self._cache.folder is None:
            in_memory = [tokenize_block(job, *self._pool.recipe) for job in jobs]
            return [BlockIndex.of(block, block) for block in in_memory]
        found = {job.path: _open(job) for job in jobs}
        of_path = {job.path: job for job in jobs}  # files of the same content have the same blocks
        missing = [job for path, job in of_path.items() if not isinstance(found[path], BlockIndex)]
        if missing and not self._cache.tokenizes:
            raise NotCachedError
        names = {job.path.parent: job.block.file.name for job in missing}
        with ExitStack() as locks:
            for folder in sorted(names):

                def log(holder: str, name: str = names[folder]) -> None:
                    self._cache.log(f"{name}: waiting for {holder}, which tokenizes this file")

                locks.enter_context(lock_folder(folder, key="data.cache_dir", waiting=log))
                os.listdir(folder)  # NFS caches for a minute that a file is missing; listing refreshes that
            self._tokenize([job for job in missing if self._is_missing(job)])
        found |= {job.path: _open(job) for job in missing}
        opened = []
        for job in jobs:
            index = found[job.path]
            if not isinstance(index, BlockIndex):
                raise StorageError(
                    f"{job.path} was just written and cannot be read back ({index or 'it is missing'}); set "
                    "data.cache_dir to another disk."
                )
            opened.append(index)
        return opened

    def close(self) -> None:
        self._pool.close()

    def _is_missing(self, job: BlockJob) -> bool:
        """Check again under the lock: another process may have written the block while this one waited."""
        now = _open(job)
        if isinstance(now, DamagedBlockError):
            self._cache.log(f"{job.path}: {now}; its rows are tokenized again")
        return not isinstance(now, BlockIndex)

    def _tokenize(self, jobs: Sequence[BlockJob]) -> None:
        """Write the files of blocks. Raises DataError if a data file changed meanwhile, and then removes the
        blocks of that file."""
        if not jobs:
            return
        for folder in {job.path.parent for job in jobs}:
            for left in folder.glob(f"*{TEMPORARY}"):  # of killed processes
                remove_block(left)
        of_file = {job.block.file: job for job in jobs}
        num_bytes = sum(Path(file.path).stat().st_size for file in of_file if file.path)
        rows = 0
        for done, count in enumerate(self._pool.write(jobs, here=num_bytes < _SMALL), 1):
            rows += count
            self._cache.progress(TokenizeProgress(self._name, done, len(jobs), rows))
        assert self._cache.folder is not None
        digests = self._cache.folder / DIGESTS
        changed = [file for file, job in of_file.items() if file_digest(file, digests) != job.content]
        if changed:
            for job in jobs:
                if job.block.file in changed:
                    remove_block(job.path)
            rule = "was written to while its rows were read; start again when it is complete"
            raise DataError("a data file changed:", [Problem(file.name, rule) for file in changed])
        self.num_tokenized += len(jobs)


def _open(job: BlockJob) -> BlockIndex | DamagedBlockError | None:
    """Return the block's index, the reason why its file cannot be used, or None if there is no file."""
    try:
        block = open_block(job.path, job.key, job.block.index, TASKS[job.format.task].stored)
        return BlockIndex.of(block, job.path)
    except DamagedBlockError as error:
        return error
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return DamagedBlockError(f"it cannot be read ({error.strerror})")
