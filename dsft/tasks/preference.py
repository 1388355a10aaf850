"""Preference training (dpo): the chosen and the rejected answer of each pair are compared.

The values of all held-out pairs go into one table: each rank fills in those that it has scored, and the
tables are added up, so that the metrics do not depend on which rank scored a pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsft.data.steps.batch import Answers, unchanged
from dsft.dist.world import World
from dsft.engine.api import Engine
from dsft.objective.answers import answer_logps
from dsft.objective.api import Objective, evaluation_record
from dsft.objective.preference import rewards
from dsft.report.jsonl import write_margins
from dsft.setup.inputs import Inputs
from dsft.setup.run import Run
from dsft.spec.schema import Dpo, Spec
from dsft.tasks.api import Evaluation, EvaluationSet, Model, Record, evaluation_sets, section
from dsft.tasks.referenced import Referenced

ANSWERS = ("chosen", "rejected")
TOGETHER = 32  # micro-batches whose tokens are in memory at once


class Preference(Referenced):
    def beta(self, spec: Spec) -> float:
        return section(spec, Dpo).beta

    def evaluation(self, run: Run, inputs: Inputs, model: Model) -> Evaluation:
        """Compare the answers of each pair too, and write the margins of all pairs to a file."""
        sets = evaluation_sets(run, inputs, model)
        return pair_evaluation(
            sets, model.objective, section(run.spec, Dpo), model.engine, run.world, run.folder
        )


@dataclass(frozen=True)
class PairTable:
    """Values of n pairs: logps (n, 2) float64 of the policy, and their answers."""

    logps: Tensor
    answers: Answers


def pair_evaluation(
    sets: Sequence[EvaluationSet], objective: Objective, dpo: Dpo, engine: Engine, world: World, folder: Path
) -> Evaluation:
    """Return a function step -> the metrics of all sets. It is a collective; rank 0 writes
    FOLDER/margins/step-N.jsonl."""
    of_answers = objective.of_answers
    assert of_answers is not None, "an objective of preference pairs"

    def evaluate(step: int) -> Record:
        tables = [score_pairs(one, engine, world) for one in sets]
        sums = torch.stack([torch.stack(of_answers(table.logps, table.answers)) for table in tables])
        world.first(lambda: write_margins(folder, step, margin_rows(step, sets, tables, dpo)))
        names = [one.held_out.name for one in sets]
        return evaluation_record(objective, sums, [one.counts for one in sets], names)

    return evaluate


def score_pairs(one: EvaluationSet, engine: Engine, world: World) -> PairTable:
    """Score a set once, and return the same table on every rank. A collective."""
    columns = torch.zeros(len(one.held_out.data), 6, dtype=torch.float64, device=world.device)
    for start in range(0, len(one.micro_batches), TOGETHER):
        batches = one.annotate(one.micro_batches[start : start + TOGETHER])
        # a rank without the last stage has no scores
        for logps, micro_batch in zip(engine.score(batches, answer_logps), batches, strict=False):
            answers = micro_batch.answers
            assert answers is not None, "a micro-batch of preference pairs"
            figures = [logps, answers.num_targets]
            figures += [] if answers.reference is None else [answers.reference]
            row = torch.cat([figure.to(columns) for figure in figures], dim=1)
            columns[answers.ids.to(world.device), : row.shape[1]] = row
    columns = world.sum(columns if world.sequence_rank == 0 else torch.zeros_like(columns))
    reference = None if one.annotate is unchanged else columns[:, 4:]
    answers = Answers(torch.arange(len(columns)), columns[:, 2:4].long(), reference)
    return PairTable(columns[:, :2], answers)


def margin_rows(
    step: int, sets: Sequence[EvaluationSet], tables: Sequence[PairTable], dpo: Dpo
) -> Iterator[Mapping[str, float | str | None]]:
    """Yield the lines of margins/step-N.jsonl, one per pair, set by set, in the order of the data."""
    for one, table in zip(sets, tables, strict=True):
        figures = {"logps": table.logps, "rewards": rewards(table.logps, table.answers, dpo)}
        if table.answers.reference is not None:
            figures["reference_logps"] = table.answers.reference
        columns = {name: figure.tolist() for name, figure in figures.items()}
        for number, tokens in enumerate(table.answers.num_targets.tolist()):
            values = {name: column[number] for name, column in columns.items()} | {"tokens": tokens}
            chosen, rejected = values["rewards"]
            yield (
                {"step": step, "set": one.held_out.name, "source": one.held_out.data.source(number)}
                | {f"{name}/{which}": v[i] for name, v in values.items() for i, which in enumerate(ANSWERS)}
                | {"margin": chosen - rejected}
            )
