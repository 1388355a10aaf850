"""A teacher's log-probabilities of each target: taken from its engine, and filled into micro-batches.

A target has one row of 2 k + 1 float32 values, as `TopTokens` gives it: the k most probable tokens, as whole
numbers, their log-probabilities, greatest first, and the log-probability of the rest of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsft.data.steps.batch import Annotate, LazyMicroBatches, MicroBatch
from dsft.engine.frozen import FrozenEngine
from dsft.errors import Problem, SpecError, StorageError
from dsft.model.config import TokenFacts, resolve_config
from dsft.model.head import Top, target_rows
from dsft.model.policy import Policy
from dsft.plan.reference import reference_model
from dsft.reference.target_rows import TargetRows
from dsft.spec.schema import Distill, Spec


def ask_for_top(policy: Policy, spec: Spec, facts: TokenFacts) -> None:
    """Let a teacher score its most probable tokens from here on. Tokens that only one of the two models has
    belong to the rest. Raises SpecError where `top_k` is more than the tokens that both have."""
    own = spec.of_task
    assert isinstance(own, Distill), "the task has a teacher"
    models = reference_model(spec), spec.model
    teacher, student = (resolve_config(model, facts).get_text_config().vocab_size for model in models)
    # where one model has fewer tokens, its rest must have some mass too, or a divergence would be infinite
    most = student if student == teacher else min(student, teacher) - 1
    if own.top_k > most:
        message = (
            f"{own.top_k:,}, but the teacher has {teacher:,} tokens and the student {student:,}; set at "
            f"most {most:,}"
        )
        raise SpecError("The teacher cannot be scored.", [Problem("distill.top_k", message)])
    policy.score_top(Top(own.top_k, min(teacher, student)), own.temperature)


def rows_of_targets(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Return the rows of the targets alone: (B, T, C) -> (N, C)."""
    rows = target_rows(micro_batch.tokens.targets, micro_batch.num_targets)
    return values.flatten(0, 1).index_select(0, rows)


def with_teacher(micro_batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """Fill in the rows (N, 2 k + 1) of a micro-batch's targets."""
    targets, top_k = micro_batch.tokens.targets, rows.shape[1] // 2
    places = target_rows(targets, micro_batch.num_targets).to(rows.device)
    whole = rows.new_zeros(targets.numel(), rows.shape[1]).index_copy_(0, places, rows)
    tokens, logps = torch.split(whole.view(*targets.shape, -1), [top_k, top_k + 1], dim=-1)
    return replace(micro_batch, tokens=micro_batch.tokens._replace(others=tokens.int()), teacher=logps)


def refer_to_teacher(engine: FrozenEngine) -> Annotate:
    """Score with a teacher's engine beside the policy's. All micro-batches of a call are scored right away. A
    collective."""

    def refer(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        rows = engine.score(micro_batches, rows_of_targets)
        if not rows:  # this rank does not have the last stage
            return micro_batches
        return LazyMicroBatches(len(rows), lambda which: with_teacher(micro_batches[which], rows[which]))

    return refer


def look_up_rows(table: TargetRows) -> Annotate:
    """Return a function that reads the rows of a store when a micro-batch is accessed: on the host, in any
    thread. It raises StorageError where they cannot be read."""

    def build(micro_batch: MicroBatch) -> MicroBatch:
        try:
            return with_teacher(micro_batch, torch.from_numpy(table[micro_batch.ids]))
        except OSError as error:
            raise StorageError(
                f"{error.filename} cannot be read any more ({error.strerror}), but the run reads the "
                "teacher's log-probabilities while it trains; put it back and start again."
            ) from None

    return lambda micro_batches: LazyMicroBatches(
        len(micro_batches), lambda which: build(micro_batches[which])
    )
