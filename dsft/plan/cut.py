"""Cut a model's layers into pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from dsft.errors import Problem, SpecError
from dsft.plan.census import Census
from dsft.spec.schema import Parallel


@dataclass(frozen=True)
class Cut:
    """The layers of each pipeline stage. counts: number of layers per stage, in order, each at least 1."""

    counts: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.counts)

    @property
    def num_layers(self) -> int:
        return sum(self.counts)

    def layers(self, stage: int) -> range:
        """Return the numbers of the layers of one stage, counted from 0."""
        start = sum(self.counts[:stage])
        return range(start, start + self.counts[stage])


def cut_of(parallel: Parallel, census: Census) -> Cut:
    """Return the cut that `parallel.pipeline_cut` asks for: the list in the spec, or stages balanced by
    number of parameters. Raise SpecError if the model cannot be cut like that."""
    if parallel.pipeline_stages == 1:
        return Cut((census.num_layers,))
    problem = _problem(parallel, census)
    if problem is not None:
        raise SpecError("The model cannot be cut.", [problem])
    if not isinstance(parallel.pipeline_cut, str):
        return Cut(parallel.pipeline_cut)
    layers = [0] * census.num_layers
    for parameter in census.parameters:
        if parameter.layer is not None:
            layers[parameter.layer] += parameter.numel
    halves = Cut((1, census.num_layers - 1))
    before, after = (sum(p.numel for p in census.stage(stage, halves) if p.layer is None) for stage in (0, 1))
    return balanced(layers, parallel.pipeline_stages, before, after)


def balanced(layers: Sequence[float], stages: int, before: float = 0.0, after: float = 0.0) -> Cut:
    """Divide consecutive layers of the given costs into stages such that the largest stage is as small as
    possible; among such cuts, take the one with the least sum of squares. before, after: extra cost of the
    first and of the last stage.

    The linear partition problem (Skiena, The Algorithm Design Manual, section 10.7), O(layers² × stages).
    """
    upto = [0.0, *accumulate(layers)]

    def cost(start: int, stop: int) -> float:
        ends = before * (start == 0) + after * (stop == len(layers))
        return upto[stop] - upto[start] + ends

    largest, _ = _least(len(layers), stages, lambda worst, start, stop: max(worst, cost(start, stop)))

    def squares(total: float, start: int, stop: int) -> float:
        here = cost(start, stop)
        return total + here**2 if here <= largest else math.inf

    return _least(len(layers), stages, squares)[1]


Join = Callable[[float, int, int], float]


def _least(num_layers: int, stages: int, join: Join) -> tuple[float, Cut]:
    """Return the first cut of least value, and the value. join: (value of the earlier stages, start, stop of
    this stage) -> value including this stage."""
    impossible: tuple[float, tuple[int, ...]] = (math.inf, ())
    best = [(0.0, ()), *[impossible] * num_layers]
    for stage in range(stages):
        best = [
            min(
                ((join(best[start][0], start, stop), (*best[start][1], stop - start))
                for start in range(stage, stop)),
                default=impossible,
            )
            for stop in range(num_layers + 1)
        ]  # fmt: skip
    value, counts = best[num_layers]
    return value, Cut(counts)


def _problem(parallel: Parallel, census: Census) -> Problem | None:
    stages, layers, counts = parallel.pipeline_stages, census.num_layers, parallel.pipeline_cut
    if census.uncuttable is not None:
        return Problem("parallel.pipeline_stages", f"{census.uncuttable}; set it to 1")
    if stages > layers:
        message = f"{stages} stages are more than the model's {layers} layers; set {layers} or fewer"
        return Problem("parallel.pipeline_stages", message)
    if not isinstance(counts, str) and (len(counts) != stages or sum(counts) != layers):
        message = (
            f"{list(counts)} has {sum(counts)} layers in {len(counts)} stages, but the model has {layers}, "
            f"and pipeline_stages is {stages}; write {stages} numbers that add up to {layers}, or parameters"
        )
        return Problem("parallel.pipeline_cut", message)
    return None
