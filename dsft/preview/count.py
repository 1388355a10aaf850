"""Count the rows of a spec and their tokens for `dsft plan`, in a second or two: from the cache of tokens if
they were tokenized before, all of them if they are few, else from a sample. Nothing is downloaded or
written."""

from __future__ import annotations

from collections.abc import Callable
from os.path import isdir  # False for a name that is too long
from pathlib import Path

import numpy as np

from dsft.data.cache.store import IN_MEMORY, Cache, NotCachedError, cache_folder
from dsft.data.read.files import data_files
from dsft.data.read.sample import NotSampledError
from dsft.data.render.template import choose_template
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import RunData, load_data
from dsft.data.sets.order import quotas
from dsft.data.tokenizer.load import open_tokenizer
from dsft.errors import DsftError, MissingInputError
from dsft.plan.build import Plan
from dsft.plan.duration import Duration, Measured, Rows, duration
from dsft.preview.figures import step_stats
from dsft.report.speed import measured_speed
from dsft.spec.batch import BatchSizes
from dsft.spec.listing import NoDataFileError, local_files
from dsft.spec.schema import Spec
from dsft.spec.sources import hub_data
from dsft.system.hub import cache_only, is_hub_id

FEW_BYTES = 1 << 20  # of data files of which all rows are counted
SAMPLE_BYTES = 1 << 20  # of rows of which a sample consists
PACKED = 2000  # examples that are packed to see how much is padding


def durations(like: str | None) -> Callable[[Plan], Duration]:
    """Return a function that returns what the run of a plan takes. like: a run whose speed is taken."""

    def of(plan: Plan) -> Duration:
        measured: Measured | None = None if like is None else measured_speed(like, plan.spec)
        return duration(plan, count_rows(plan.spec, plan.batch), measured)

    return of


def count_rows(spec: Spec, batch: BatchSizes) -> Rows | str:
    """Return what the rows of data.train give, or why they cannot be read."""
    name = spec.model.tokenizer or spec.model.name_or_path
    try:
        loaded, sampled = _load(spec)
    except (NoDataFileError, NotSampledError) as error:
        return f"{error} (dsft preview counts them)"
    except MissingInputError as error:
        if name is not None and is_hub_id(name) and name in str(error):
            return f"the tokenizer {name} is not on this machine, and dsft plan downloads nothing"
        return str(error)
    except DsftError as error:
        return f"{str(error).splitlines()[0].rstrip('.:')} (dsft preview shows it)"
    if not len(loaded.train):
        return "no row is left to train on (dsft preview says why)"
    return _rows(spec, batch, loaded, sampled=sampled)


def _load(spec: Spec) -> tuple[RunData, bool]:
    """Return the training data, and whether it is that of a sample, of which nothing is held out."""
    data, folder = spec.data.model_copy(update={"eval": ()}), cache_folder(spec)
    spec = spec.model_copy(update={"data": data})
    paths = [source.path for source in data.train]
    of_hub = [path for path in paths if hub_data(path) is not None and local_files(path) is None]
    files = [file for path in paths if path not in of_hub for file in data_files(path) if file.path]
    if of_hub and not isdir(folder):
        raise NotSampledError(f"{of_hub[0]} is a data set of the hub, and not tokenized yet")
    with cache_only(bool(of_hub) or is_hub_id(spec.model.tokenizer or spec.model.name_or_path or ".")):
        tokenizer, _ = open_tokenizer(spec.model)
        choose_template(tokenizer, data.chat_template, data.thinking)
        if isdir(folder):
            try:
                return load_data(spec, tokenizer, Cache(folder, tokenizes=False), refuse=False), False
            except (NotCachedError, MissingInputError):  # the latter of the hub's, as files were found before
                pass
        if of_hub:
            raise NotSampledError(f"{of_hub[0]} is a data set of the hub, and not tokenized yet")
        if sum(Path(file.path).stat().st_size for file in files) <= FEW_BYTES:
            return load_data(spec, tokenizer, IN_MEMORY, refuse=False), False
        whole = data.model_copy(update={"eval_fraction": None, "eval_count": None})
        cache = Cache(sample=SAMPLE_BYTES // len(paths))
        return load_data(spec.model_copy(update={"data": whole}), tokenizer, cache, refuse=False), True


def _rows(spec: Spec, batch: BatchSizes, loaded: RunData, *, sampled: bool) -> Rows:
    train, data = loaded.train, spec.data
    sizes = np.array(train.sizes, dtype=float)
    if sampled:
        sizes = sizes * [
            _scale(one.records.rows.account.share, len(one.records.lengths), one.source.max_rows)
            for one in loaded.sources
        ]
        sizes = sizes * (1 - (data.eval_fraction or 0))
        sizes = sizes * (1 - min(1.0, (data.eval_count or 0) / max(1.0, sizes.sum())))
    examples = max(1, round(sizes.sum()))
    slots = np.array(quotas([round(size) for size in sizes], train.weights))
    tokens = squares = 0.0
    for which, part in enumerate(np.split(np.arange(len(train)), train.ends[:-1])):
        if len(part):
            tokens += int(slots[which]) * float(train.lengths[part].mean())
            squares += int(slots[which]) * float(train.squares[part].mean())
    return Rows(
        examples,
        tokens / int(slots.sum()),
        squares / tokens,
        _positions(train, spec, batch),
        sum(len(one.records.lengths) for one in loaded.sources) if sampled else None,
        loaded.refusal.title.rstrip(":") if loaded.refusal else "",
    )


def _scale(share: float, records: int, max_rows: int | None) -> float:
    """Return how many rows of a source there are for each one of the sample."""
    return 1 / share if max_rows is None else min(1 / share, max_rows / max(1, records))


def _positions(train: Dataset, spec: Spec, batch: BatchSizes) -> float:
    """Return the positions that ranks compute, or for which they wait, for each token."""
    stats = step_stats(train, spec, batch, PACKED)
    share = stats.idle if len(train) >= batch.global_batch_size else stats.padding
    return 1 / (1 - share["padded" if batch.tokens_per_micro_batch is None else "packed"])
