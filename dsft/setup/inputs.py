"""Read the inputs of a run, the same on every rank: tokenizer, config and tokenized rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dsft.data.cache.store import Cache, cache_folder
from dsft.data.render.renderer import Renderer
from dsft.data.render.template import choose_template
from dsft.data.sets.dataset import Dataset, Example
from dsft.data.sets.load import HeldOutSet, RunData, load_data
from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import longest_micro_batch
from dsft.data.tokenizer.load import notes, open_tokenizer, pad_id
from dsft.model.attention import check_can_pack
from dsft.model.config import TokenFacts, config_around, new_rows, resolve_config, token_facts
from dsft.model.split_check import check_can_split
from dsft.model.vocabulary import NewRows
from dsft.plan.reference import other_model, reference_model
from dsft.report.console import task_progress
from dsft.setup.run import Run
from dsft.spec.schema import Spec

SAMPLE_ROWS = 200


@dataclass(frozen=True)
class Inputs:
    """The inputs of a run, the same on every rank.

    rows         the new rows of the embeddings; None where there are none
    around       the config of the multimodal model whose text model is trained; None for a text model
    files        of a training run: the SHA-256 of each weight file, by `dsft.setup.identity.file_digests`
    built_from   of a training run: by `build_identity`
    software     of a training run: by `software_identity`, with the kind of device
    total_steps  from the run's first step to its last
    also_scored  further examples that a reference scores: by `Task.also_scored`
    """

    tokenizer: PreTrainedTokenizerBase
    facts: TokenFacts
    rows: NewRows | None
    config: PreTrainedConfig
    loaded: RunData
    around: PreTrainedConfig | None = None
    files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    built_from: Mapping[str, Any] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    total_steps: int = 0
    also_scored: Sequence[Dataset] = ()

    @property
    def train(self) -> Dataset:
        return self.loaded.train

    @property
    def held_out(self) -> Sequence[HeldOutSet]:
        return self.loaded.held_out

    @cached_property
    def pad_id(self) -> int:
        return pad_id(self.tokenizer)

    @cached_property
    def turn_end(self) -> int | None:
        """The token with which the chat template ends an answer; None where rows are not trained on it, as in
        plain texts."""
        token = Renderer(self.tokenizer).turn_end()
        is_trained = token is not None and any(token in row.input_ids[row.trained] for row in self.sample())
        return token if is_trained else None

    def sample(self) -> Iterator[Example]:
        """Yield about SAMPLE_ROWS training examples, spread over all sources."""
        return map(self.train.__getitem__, range(0, len(self.train), max(1, len(self.train) // SAMPLE_ROWS)))


def read_inputs(spec: Spec, log: Callable[[str], None], *, first: bool = True) -> Inputs:
    """Load the tokenizer, the config and the rows, tokenizing those that are not cached. The `first` rank
    shows a progress bar."""
    tokenizer, added = open_tokenizer(spec.model)
    choose_template(tokenizer, spec.data.chat_template, spec.data.thinking)
    if spec.model.head == "score":  # transformers scores the last token that is not for padding
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id(tokenizer))
    facts = token_facts(tokenizer, added.first_id)
    config = resolve_config(spec.model, facts)
    if spec.model.head == "score":
        config.pad_token_id = facts.pad_token_id
    rows = new_rows(spec.model, facts)
    for line in (*notes(tokenizer, added), *([str(rows)] if rows else [])):
        log(line)
    if spec.data.packing:
        check_can_pack(config, spec.data.max_length)
    if (size := spec.parallel.sequence_parallel) > 1:
        check_can_split(config, size, spec.data.max_length)
        if (other := other_model(spec)) is not None:
            named = f"{spec.own_key('reference_model')}, {other!r}"
            check_can_split(resolve_config(reference_model(spec), facts), size, spec.data.max_length, named)
    name = spec.model.name_or_path
    around = config_around(name) if name else None

    with task_progress(log, first=first) as progress:
        cache = Cache(cache_folder(spec), spec.data.num_workers, log, progress)
        loaded = load_data(spec, tokenizer, cache)
    for line in loaded.lines:
        log(line)
    if (
        spec.model.head == "score"
        and len(loaded.train)
        and loaded.train[0].input_ids[-1] == pad_id(tokenizer)
    ):
        log(
            f"warning: the tokenizer pads with the token that ends answers, {tokenizer.pad_token!r}, so the "
            "score is that of the token before it, as transformers computes it; with another pad_token the "
            "score would depend on whether an answer ends"
        )
    return Inputs(tokenizer, facts, rows, config, loaded, around)


def longest(run: Run, inputs: Inputs) -> tuple[MicroBatch, MicroBatch | None]:
    """Return the largest micro-batch of training, and that of the held-out rows if it is larger."""
    sizes, train, pad = run.batch, run.spec.train, inputs.pad_id
    trained = longest_micro_batch(inputs.train, sizes, pad, train.seed, inputs.total_steps)
    if train.neftune_alpha is not None:
        trained = replace(trained, tokens=trained.tokens._replace(noise_scale=torch.zeros(trained.shape)))
    as_one_step = [(rows.data, replace(sizes, global_batch_size=len(rows.data))) for rows in inputs.held_out]
    held_out = [longest_micro_batch(rows, batch, pad, train.seed, 1) for rows, batch in as_one_step]
    larger = [found for found in held_out if found.shape.numel() > trained.shape.numel()]
    return trained, max(larger, key=lambda found: found.shape.numel(), default=None)
