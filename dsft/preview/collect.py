"""What a run would train on, read as runs do: takes a spec, gives its examples, or why there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsft.data.load import Loaded, load_data
from dsft.data.template import choose_template
from dsft.data.tokenizer import tokenizer_of
from dsft.errors import DataError
from dsft.plan.batch import BatchSizes, batch_sizes
from dsft.plan.layout import layout
from dsft.spec.schema import Spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Say = Callable[[str], None]


@dataclass(frozen=True)
class Collected:
    """loaded: None where no example is left; refusal: why a run would not start with this data."""

    spec: Spec
    tokenizer: PreTrainedTokenizerBase
    batch: BatchSizes
    loaded: Loaded | None
    refusal: DataError | None


def collect(spec: Spec) -> Collected:
    """Raises MissingInputError for what is not there, SpecError where the batch sizes fit no ranks."""
    batch = sizes(spec)
    tokenizer = tokenizer_of(spec.model)
    choose_template(tokenizer, spec.data.chat_template)
    loaded, refusal = None, None
    try:
        loaded = load_data(spec, tokenizer)
    except DataError as error:
        refusal = error
        try:
            loaded = load_data(lenient(spec), tokenizer)
        except DataError:
            pass
    return Collected(spec, tokenizer, batch, loaded, refusal)


def lenient(spec: Spec) -> Spec:
    """The spec with every row left out for which a run would stop."""
    on_too_long = "drop" if spec.data.on_too_long == "error" else spec.data.on_too_long
    changed = {
        "on_bad_row": "drop",
        "on_too_long": on_too_long,
        "max_dropped_fraction": None,
        "max_truncated_fraction": None,
        "max_duplicate_fraction": None,
    }
    return spec.model_copy(update={"data": spec.data.model_copy(update=changed)})


def sizes(spec: Spec) -> BatchSizes:
    """The batch sizes on the spec's cluster; without one, on as few processes as they fit."""
    processes = sum(spec.cluster.hosts.values()) if spec.cluster else _fewest(spec)
    return batch_sizes(spec.train, layout(spec.parallel, processes).data_parallel, spec.data)


def _fewest(spec: Spec) -> int:
    train = spec.train
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.accumulation_steps
    ranks = total // (micro * steps) if total and micro and steps else 1
    return ranks * spec.parallel.pipeline_stages
