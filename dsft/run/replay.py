"""Compute a step of a run again, from a checkpoint before it or from the run's start: what the ranks of
`dsft replay` do."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsft.checkpoint.read import CheckpointReader
from dsft.checkpoint.save import CheckpointState, save
from dsft.data.steps.batch import GlobalStep, MicroBatch
from dsft.engine.api import StepResult
from dsft.engine.ops import prepare_ops
from dsft.errors import Problem, SpecError
from dsft.objective.api import means
from dsft.plan.ds_entries import HostFacts
from dsft.report.jsonl import written
from dsft.run.loop import Progress, Schedule, Window, train_step
from dsft.run.main import checks, load, prepared, progress_at
from dsft.run.trainer import schedule, steps_of
from dsft.setup.inputs import Inputs, longest
from dsft.setup.read import read
from dsft.setup.resolve import swap_folders
from dsft.setup.run import Run
from dsft.system.run_folder import step_folder
from dsft.tasks.api import Model

LAYER = re.compile(r".*?\.\d+(?=\.)")
"""The part of a parameter's name that names its layer."""


def replayed(run: Run, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Train from the checkpoint to the end of the record of the step, and return what the step has done. A
    collective. Raises DsftError where the data or the model have changed since.

    asked: `step`; `checkpoint`, to start from; `compared`, a checkpoint with whose inputs these are compared;
    `since` and `end`, the steps after and up to which the run's record has the mean; `without`, rows to leave
    out; `rates`, pairs of a step and the learning rate that the run has recorded for it. `other_rate` of the
    result: the first step that has another rate here, with both; null if there is none."""
    with swap_folders(run) as swap:
        facts = HostFacts(swap=swap, cpu_adam=prepare_ops(run.spec, run.world, run.log))
        compared, start = (_opened(run, asked[key]) for key in ("compared", "checkpoint"))
        inputs = read(replace(run, start=compared))
        run = replace(run, start=start)
        if start is not None:
            run.world.first(start.verify)
        inputs, model, task = prepared(run, inputs, facts, longest(run, inputs)[0].shape.numel())
        progress = progress_at(start)
        if start is not None:
            load(run, model, start)
        for line in checks(run, inputs, model, task):
            run.log(line)
        found = Replay(run, inputs, model).result(progress, asked)
        layout = asdict(run.layout) | {"zero_stage": run.spec.parallel.zero_stage}
        result: dict[str, Any] = written({**asked, "layout": layout, **found})
        return result


def _opened(run: Run, path: str | None) -> CheckpointReader | None:
    return None if path is None else run.world.each(lambda: CheckpointReader.open(Path(path)))


@dataclass(frozen=True)
class Replay:
    """Training without its records, evaluations and checkpoints. Its methods are collectives."""

    run: Run
    inputs: Inputs
    model: Model

    def result(self, progress: Progress, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Train, and return the figures of the step and of the record that it is in."""
        run, model = self.run, self.model
        world, steps = run.world, steps_of(run, self.inputs)
        window, found, rates = Window(), dict[str, Any](other_rate=None), dict(asked["rates"])
        left_out = self._ids(steps.step(asked["step"] - 1), asked["without"])
        while progress.step < asked["end"]:
            batch = self._annotated(steps.step(progress.step))
            if progress.step + 1 != asked["step"]:
                result = self._step(batch, progress)
            else:
                if left_out:
                    self._save(progress)
                    others = self._annotated(steps.step(progress.step, left_out))
                    found["other"] = self._watched(others, batch, progress)[1]
                    saved = step_folder(run.folder, progress.step)
                    load(run, model, world.each(partial(CheckpointReader.open, saved)))
                result, figures = self._watched(batch, batch, progress)
                found |= figures
                if left_out:
                    for one, without in zip(found["rows"], found["other"].pop("rows"), strict=True):
                        one["without"] = without["after"]
            if progress.step >= asked["since"]:
                window.add(batch, result, 0.0, 0.0)
            rate = self._schedule().learning_rate(progress.applied_steps)
            recorded = rates.get(progress.step + 1, rate)
            if found["other_rate"] is None and not math.isclose(rate, recorded):
                found["other_rate"] = {"step": progress.step + 1, "recorded": recorded, "here": rate}
            progress = progress.after(batch, result)
        assert window.sums is not None and window.last is not None
        record = means(model.objective, world.sum(window.sums), window.counts, "train")
        found["record"] = {"loss": record["train/loss"], "grad_norm": float(window.last[0].grad_norm)}
        return found

    def _annotated(self, step: GlobalStep) -> GlobalStep:
        return self.model.annotator.now(self.model.annotator.ahead(step))

    def _step(self, batch: GlobalStep, progress: Progress) -> StepResult:
        model, rank = self.model, self.run.world.rank
        return train_step(model.engine, batch, self._schedule(), progress, rank, model.annotator.after)[0]

    def _schedule(self) -> Schedule:
        return schedule(self.run.spec, self.run.batch, self.inputs.total_steps)

    def _save(self, progress: Progress) -> None:
        """Save the state before the step into the folder of this replay, which is removed at its end."""
        run, engine = self.run, self.model.engine
        spec, batch = run.spec.model_dump(mode="json"), asdict(run.batch)
        carried = self.model.annotator.state()
        state = CheckpointState(asdict(progress), spec, batch, {}, layout={}, versions={}, carried=carried)
        fragments, shapes = engine.owned_fragments(), engine.shapes()
        save(run.folder, fragments, shapes, state, run.world, model_files={}, retention=run.spec.checkpoint)

    def _ids(self, batch: GlobalStep, rows: Sequence[str]) -> set[int]:
        """Return the examples that begin in these rows. Raises SpecError where there is none in the step, or
        none besides."""
        sources = {id: self.inputs.train.source(id) for id in batch.example_ids}
        found, problem = set[int](), None
        for row in rows:
            same = {id for id, source in sources.items() if source == row or source.endswith(f"/{row}")}
            found |= same
            if not same:
                problem = f"{row} is not among the rows of the step; without this option they are listed"
        if len(found) == len(sources):
            problem = "no row of the step would be left; leave out fewer"
        if problem is not None:
            raise SpecError("The step cannot be computed without rows.", [Problem("--without", problem)])
        return found

    def _watched(
        self, batch: GlobalStep, shown: GlobalStep, progress: Progress
    ) -> tuple[StepResult, dict[str, Any]]:
        """Make a step. Return its result and figures, with the loss of the rows of `shown` before and after
        it, computed without dropout."""
        world, model, data = self.run.world, self.model, self.inputs.train
        before = self._losses(shown)
        with model.engine.gradient_squares() as squares:
            result = self._step(batch, progress)
        after = self._losses(shown)
        main = next(term.count for term in model.objective.terms if term.weight)
        times = Counter(shown.example_ids)  # a mixture may have a row twice in a step
        weights = [times[id] * data.counts[main][id] / shown.counts[main] for id in before]
        shares = shares_of_loss(list(before.values()), weights)
        names = (name for of_rank in world.gather(list(model.engine.shapes())) for name in of_rank)
        total = dict.fromkeys(map(layer_of, names), 0.0)
        for of_rank in world.gather(dict(squares)):
            for name, square in of_rank.items():
                total[layer_of(name)] += square
        norm, whole = float(result.grad_norm), math.fsum(total.values())
        return result, {
            "loss": means(model.objective, world.sum(result.sums), batch.counts, "train")["train/loss"],
            "grad_norm": norm,
            "applied": result.applied,
            "rows": [
                {"row": data.source(id), "part": data.extent(id), "tokens": int(data.lengths[id])}
                | {"targets": int(data.target_counts[id]), "before": loss, "after": after[id], "share": share}
                for (id, loss), share in zip(before.items(), shares, strict=True)
            ],
            "layers": [
                {"layer": layer, "grad_norm": norm * math.sqrt(square / whole), "share": square / whole}
                for layer, square in total.items()
                if whole
            ],
        }

    def _losses(self, step: GlobalStep) -> dict[int, float]:
        """Return the loss of each example alone, by its number in the dataset, over all ranks."""
        world, objective, data = self.run.world, self.model.objective, self.inputs.train

        def sums(logps: Tensor, micro_batch: MicroBatch) -> Tensor:
            """Return (n, n_terms) of the n examples of a micro-batch."""
            lengths = data.lengths[list(micro_batch.ids)].tolist()
            parts = micro_batch.examples(lengths)
            found = [torch.stack(objective.sums(logps[rows, columns], one)) for rows, columns, one in parts]
            return torch.stack(found) if found else logps.new_zeros(0)

        mine: dict[int, float] = {}
        batches = step.micro_batches
        for scored, micro_batch in zip(self.model.engine.score(batches, sums), batches, strict=False):
            for id, values in zip(micro_batch.ids, scored.tolist(), strict=True):
                scales = objective.scales(data.count(np.array([id])))
                mine[id] = math.fsum(scale * value for scale, value in zip(scales, values, strict=True))
        everyones = world.gather(mine if world.sequence_rank == 0 else {})
        return {id: loss for of_rank in everyones for id, loss in of_rank.items()}


def layer_of(name: str) -> str:
    """Return the layer of a parameter by its Hugging Face name, or outside of the layers its module."""
    found = LAYER.match(name)
    return found[0] if found else name.rpartition(".")[0]


def shares_of_loss(losses: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return each row's share of what the rows add to the step's loss above the median row: weight × (loss -
    median), if that is positive. Rows whose loss is not finite have all of it, in equal parts."""
    excess = [0.0 if math.isfinite(loss) else 1.0 for loss in losses]
    if not any(excess):
        median = statistics.median(losses)
        excess = [max(0.0, weight * (loss - median)) for loss, weight in zip(losses, weights, strict=True)]
    whole = math.fsum(excess) or 1.0
    return [one / whole for one in excess]
