"""What a run would train on, read as a run reads it. Takes a spec; gives its rows, or why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsft.data.cache.store import Cache, Pace, cache_folder
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import choose_template
from dsft.data.rows import TokenRows
from dsft.data.sets.dataset import Dataset
from dsft.data.sets.load import Loaded, load_data, rows_of
from dsft.data.sets.pairs import PairRows
from dsft.data.tokenizer.load import notes, open_tokenizer
from dsft.errors import DataError
from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.layout import layout
from dsft.preview.problems import Source, parts_of
from dsft.spec.preferences import shares_prompts
from dsft.spec.schema import Data, Spec
from dsft.spec.schema import Source as SpecSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Collected:
    """loaded: None where no example is left; sources: the rows of data.train, then of data.eval; told: what a
    run says of its tokens and rows; refusal: why it would not start with them."""

    spec: Spec
    tokenizer: PreTrainedTokenizerBase
    batch: BatchSizes
    loaded: Loaded | None
    sources: tuple[Source, ...]
    told: tuple[str, ...]
    refusal: DataError | None

    @property
    def train(self) -> Dataset:
        return self.loaded.train if self.loaded else Dataset(())

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
    for tried in (spec, lenient(spec), lenient(spec, held_out=False)):
        try:
            loaded = load_data(tried, tokenizer, cache, share_prompts=shares_prompts(spec))
        except DataError as error:
            refusal = refusal or error
            continue
        sources, told = tuple(_sources(tried.data, loaded)), (*new_tokens, *loaded.lines)
        return Collected(spec, tokenizer, batch, loaded, sources, told, refusal)
    sources = tuple(_rows_alone(spec, tokenizer, cache))
    return Collected(spec, tokenizer, batch, None, sources, new_tokens, refusal)


def _sources(data: Data, loaded: Loaded) -> Iterator[Source]:
    sets = [loaded.train, *(one.data for one in loaded.held_out)]
    parts = parts_of([part for one in sets for part in one.parts])
    # behind the parts of data.train and data.eval stand those that are held out of data.train
    for part, source in zip(parts, [*data.train, *data.eval], strict=False):
        yield Source(
            part.rows, _count(part.rows, source), tuple(one for one in parts if one.rows is part.rows)
        )


def _rows_alone(spec: Spec, tokenizer: PreTrainedTokenizerBase, cache: Cache) -> Iterator[Source]:
    """Rows that give no example; none where no row can be made tokens of."""
    renderer = Renderer(tokenizer, train_on=spec.data.train_on, name=spec.data.chat_template)
    for source in (*spec.data.train, *spec.data.eval):
        with suppress(DataError):
            rows = rows_of(source, renderer, spec.task, cache)
            yield Source(rows, _count(rows, source), ())


def _count(rows: TokenRows | PairRows, source: SpecSource) -> int:
    return min(len(rows.lengths), source.max_rows or len(rows.lengths))


def lenient(spec: Spec, *, held_out: bool = True) -> Spec:
    """The spec with every row left out for which a run would stop, with its held-out rows or without."""
    data = spec.data
    changed: dict[str, Any] = {
        "on_bad_row": "drop",
        "on_too_long": "drop" if data.on_too_long == "error" else data.on_too_long,
        "max_dropped_fraction": None,
        "max_truncated_fraction": None,
        "max_duplicate_fraction": None,
    }
    if not held_out:
        changed |= {"eval": (), "eval_fraction": None, "eval_count": None}
    return spec.model_copy(update={"data": data.model_copy(update=changed)})


def sizes(spec: Spec) -> BatchSizes:
    """The batch sizes on the spec's cluster; without one, on the fewest processes that they fit."""
    processes = sum(spec.cluster.hosts.values()) if spec.cluster else _fewest(spec)
    return batch_sizes(spec.train, layout(spec.parallel, processes).data_parallel, spec.data, spec.task)


def _fewest(spec: Spec) -> int:
    train = spec.train
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    ranks = total // (micro * steps) if total and micro and steps else 1
    return ranks * spec.parallel.pipeline_stages
