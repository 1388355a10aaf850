import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.errors import SpecError
from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut, balanced, cut_of
from dsft.spec.schema import Parallel


def loads(cut: Cut, layers: list[int], before: int, after: int) -> list[int]:
    of_layers = [sum(layers[layer] for layer in cut.layers(stage)) for stage in range(cut.stages)]
    of_layers[0] += before
    of_layers[-1] += after
    return of_layers


COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


@given(COSTS, st.integers(1, 7), st.integers(0, 20), st.integers(0, 20))
def test_no_cut_has_a_smaller_largest_stage_or_is_as_even(
    layers: list[int], stages: int, before: int, after: int
) -> None:
    stages = min(stages, len(layers))
    cut = balanced(layers, stages, before, after)
    assert [layer for stage in range(stages) for layer in cut.layers(stage)] == list(range(len(layers)))
    assert min(cut.counts) >= 1
    borders = itertools.combinations(range(1, len(layers)), stages - 1)
    others = [
        loads(
            Cut(tuple(b - a for a, b in itertools.pairwise((0, *inner, len(layers))))), layers, before, after
        )
        for inner in borders
    ]
    ours = loads(cut, layers, before, after)
    assert (max(ours), sum(n**2 for n in ours)) == min((max(o), sum(n**2 for n in o)) for o in others)


def census(*, tied: bool, layers: int = 6, uncuttable: str | None = None) -> Census:
    """Embedding and head as large as four layers."""
    aliases = ("lm_head.weight",) if tied else ()
    inside = tuple(Parameter(f"model.layers.{n}.w", (10, 10), n, False, ()) for n in range(layers))
    head = () if tied else (Parameter("lm_head.weight", (40, 10), None, False, ()),)
    norm = Parameter("model.norm.weight", (10,), None, False, ())
    embedding = Parameter("model.embed_tokens.weight", (40, 10), None, True, aliases)
    return Census("A", layers, None, (embedding, *inside, norm, *head), uncuttable)


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_counted_tied_or_not(tied: bool) -> None:
    counted = census(tied=tied)
    cut = cut_of(Parallel(pipeline_stages=3), counted)
    assert cut.counts == (1, 4, 1)
    named = [{p.name for p in counted.stage(stage, cut) if p.layer is None} for stage in range(3)]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert named == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", head}]


def test_a_list_is_used_unchanged() -> None:
    assert cut_of(Parallel(pipeline_stages=2, pipeline_cut=(5, 1)), census(tied=False)).counts == (5, 1)


@pytest.mark.parametrize(("parallel", "counted", "message"), [
    (Parallel(pipeline_stages=7), census(tied=False), "7 stages are more than the model's 6 layers"),
    (Parallel(pipeline_stages=2, pipeline_cut=(4, 3)), census(tied=False),
     r"pipeline_cut: \[4, 3\] has 7 layers in 2 stages, but the model has 6, and pipeline_stages is 2"),
    (Parallel(pipeline_stages=3, pipeline_cut=(3, 3)), census(tied=False),
     r"\[3, 3\] has 6 layers in 2 stages, but the model has 6, and pipeline_stages is 3"),
    (Parallel(pipeline_stages=2), census(tied=False, uncuttable="it is odd"), "it is odd; set it to 1"),
])  # fmt: skip
def test_what_cannot_be_cut_is_refused(parallel: Parallel, counted: Census, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        cut_of(parallel, counted)


def test_one_stage_asks_nothing() -> None:
    assert cut_of(Parallel(), census(tied=True, uncuttable="it is odd")).counts == (6,)
