"""Load the data of a spec as a run would load it, with its tokenizer and batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dsft.data.cache.store import Cache, TokenizeProgress, cache_folder
from dsft.data.render.template import choose_template
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import RunData, load_data
from dsft.data.tokenizer.load import notes, open_tokenizer
from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.layout import layout
from dsft.preview.problems import SourceSelections
from dsft.spec.schema import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreviewData:
    """The data of a spec. messages: a run's messages about its tokenizer and data."""

    spec: Spec
    tokenizer: PreTrainedTokenizerBase
    batch: BatchSizes
    loaded: RunData
    messages: tuple[str, ...]

    @property
    def train(self) -> Dataset:
        return self.loaded.train

    @property
    def ledgers(self) -> Mapping[str, Mapping[str, Any]]:
        """The ledger of each training source by name, as in data.json."""
        sources: Mapping[str, Mapping[str, Any]] = self.loaded.account["train"]["sources"]
        return sources

    @cached_property
    def sources(self) -> tuple[SourceSelections, ...]:
        """The sources of data.train, then of data.eval."""
        every = self.loaded.selections
        whole = [one for one in every if not one.is_split]
        return tuple(
            (read, *(one for one in every if one.is_split and one.rows is read.rows)) for read in whole
        )


def collect(
    spec: Spec,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[TokenizeProgress], None] = lambda pace: None,
) -> PreviewData:
    """Load the data of a spec. say, progress: callbacks, as in Cache. Raises MissingInputError for a missing
    file or tokenizer, SpecError if the batch sizes do not fit the ranks."""
    batch = sizes(spec)
    tokenizer, added = open_tokenizer(spec.model)
    new_tokens = notes(tokenizer, added)
    choose_template(tokenizer, spec.data.chat_template)
    cache = Cache(cache_folder(spec), spec.data.num_workers, say, progress)  # the cache that the run will use
    loaded = load_data(spec, tokenizer, cache, refuse=False)
    return PreviewData(spec, tokenizer, batch, loaded, (*new_tokens, *loaded.lines))


def sizes(spec: Spec) -> BatchSizes:
    """Return the batch sizes for the spec's cluster; without one, for the fewest processes that they fit."""
    processes = sum(spec.cluster.hosts.values()) if spec.cluster else _fewest(spec)
    return batch_sizes(spec.train, layout(spec.parallel, processes).data_parallel, spec.data, spec.task)


def _fewest(spec: Spec) -> int:
    train = spec.train
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    ranks = total // (micro * steps) if total and micro and steps else 1
    return ranks * spec.parallel.pipeline_stages
