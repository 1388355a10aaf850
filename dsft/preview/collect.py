"""What a run would train on, read as a run reads it. Takes a spec; gives its rows, or why there are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsft.data.dataset import Dataset, RowPart
from dsft.data.load import Loaded, load_data
from dsft.data.store import Cache, Pace, cache_folder
from dsft.data.template import choose_template
from dsft.data.tokenizer import notes, open_tokenizer
from dsft.errors import DataError
from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.layout import layout
from dsft.preview.problems import Source
from dsft.spec.schema import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Collected:
    """loaded: None where no example is left; told: what a run says of its tokens and rows; refusal: why it
    would not start with them."""

    spec: Spec
    tokenizer: PreTrainedTokenizerBase
    batch: BatchSizes
    loaded: Loaded | None
    told: tuple[str, ...]
    refusal: DataError | None

    @property
    def train(self) -> Dataset:
        return self.loaded.train if self.loaded else Dataset(())

    @property
    def sources(self) -> tuple[Source, ...]:
        """The rows of data.train, then those of data.eval."""
        if self.loaded is None:
            return ()
        data = self.spec.data
        sets = [self.train, *(one.data for one in self.loaded.held_out)]
        parts = [part for one in sets for part in one.parts if isinstance(part, RowPart)]
        names = [*data.train, *data.eval]  # behind their parts stand those that are held out of data.train
        return tuple(
            Source(
                part.rows,
                min(len(part.rows.lengths), source.max_rows or len(part.rows.lengths)),
                tuple(other for other in parts if other.rows is part.rows),
            )
            for part, source in zip(parts, names, strict=False)
        )

    @property
    def ledgers(self) -> Mapping[str, Mapping[str, Any]]:
        """By source, as data.json has it."""
        return self.loaded.account["train"]["sources"] if self.loaded else {}


def collect(
    spec: Spec,
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[Pace], None] = lambda pace: None,
) -> Collected:
    """`say` and `progress` are told of tokens that are made. Raises MissingInputError for what is not there,
    SpecError where the batch sizes fit no ranks."""
    batch = sizes(spec)
    tokenizer, added = open_tokenizer(spec.model)
    new_tokens = tuple(notes(tokenizer, added))
    choose_template(tokenizer, spec.data.chat_template)
    cache = Cache(cache_folder(spec), spec.data.num_workers, say, progress)  # the one that the run will read
    refusal = None
    for tried in (spec, lenient(spec)):
        try:
            loaded = load_data(tried, tokenizer, cache)
            return Collected(spec, tokenizer, batch, loaded, (*new_tokens, *loaded.lines), refusal)
        except DataError as error:
            refusal = refusal or error
    return Collected(spec, tokenizer, batch, None, new_tokens, refusal)


def lenient(spec: Spec) -> Spec:
    """The spec with every row left out for which a run would stop."""
    data = spec.data
    changed = {
        "on_bad_row": "drop",
        "on_too_long": "drop" if data.on_too_long == "error" else data.on_too_long,
        "max_dropped_fraction": None,
        "max_truncated_fraction": None,
        "max_duplicate_fraction": None,
    }
    return spec.model_copy(update={"data": data.model_copy(update=changed)})


def sizes(spec: Spec) -> BatchSizes:
    """The batch sizes on the spec's cluster; without one, on the fewest processes that they fit."""
    processes = sum(spec.cluster.hosts.values()) if spec.cluster else _fewest(spec)
    return batch_sizes(spec.train, layout(spec.parallel, processes).data_parallel, spec.data)


def _fewest(spec: Spec) -> int:
    train = spec.train
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    ranks = total // (micro * steps) if total and micro and steps else 1
    return ranks * spec.parallel.pipeline_stages
