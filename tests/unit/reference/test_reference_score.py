"""The pass over the pairs: messages on a full memory and on values that are not finite."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsft.dist.world import World
from dsft.errors import NonFiniteError, OutOfMemoryError
from dsft.plan.reference import reference_model
from dsft.reference import precomputed
from dsft.reference.key import key_of
from dsft.reference.precomputed import AnswerScorer, ScoringPass, score
from dsft.reference.store import Store, StoreContents
from dsft.setup.inputs import read_inputs
from dsft.spec.layout import Layout
from tests.unit.reference.small import ALONE, Alone, spec

PAIRS = 5
ADVICE = (
    "set dpo.reference_zero_stage to 3, dpo.reference_offload to cpu, or a smaller train.micro_batch_size"
)


def scored(folder: Path, values: Callable[[Any], Any], world: World = ALONE) -> None:
    """A pass whose engine gives `values` of each micro-batch."""
    asked = spec(folder)
    inputs = read_inputs(asked, lambda text: None)
    key = key_of(asked, reference_model(asked), inputs)
    store = Store(folder / "store", key, "dpo.reference_store")
    stored = StoreContents((np.full((PAIRS, 2), np.nan),))
    store.prepare()
    engine: Any = SimpleNamespace(score=lambda batches, kept: tuple(values(batch) for batch in batches))
    given = ScoringPass(asked, store, 2, [inputs.train], stored, ())
    AnswerScorer(given, inputs.pad_id, world, engine).score(lambda pace: None)


def test_a_micro_batch_that_does_not_fit_is_reported_with_its_tokens(folder: Path) -> None:
    def full(batch: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with pytest.raises(OutOfMemoryError, match=r"beside a micro-batch of \d+ tokens \(CUDA out") as raised:
        scored(folder, full)
    assert ADVICE in str(raised.value)


def test_a_reference_that_does_not_fit_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(precomputed, "open_reference", full)
    asked = spec(folder)
    inputs = read_inputs(asked, lambda text: None)
    store = Store.of(asked, key_of(asked, reference_model(asked), inputs))
    given = ScoringPass(asked, store, 2, [], StoreContents(()), ())
    with pytest.raises(OutOfMemoryError, match="the reference does not fit into memory") as raised:
        score(given, inputs, ALONE, print, print)
    assert ADVICE in str(raised.value)


def test_another_error_is_left_as_it_is(folder: Path) -> None:
    def wrong(batch: Any) -> Any:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        scored(folder, wrong)


def test_a_value_that_is_not_finite_ends_the_pass_with_its_row(folder: Path) -> None:
    def values(batch: Any) -> Any:
        found = torch.full((len(batch.answers.ids), 2), -1.0)
        found[batch.answers.ids == 3, 1] = float("nan")
        return found

    with pytest.raises(NonFiniteError, match=r"a\.jsonl:4: the reference gives .* -1, nan, from which"):
        scored(folder, values)
    scored(folder, lambda batch: torch.full((len(batch.answers.ids), 2), -1.0))


def test_one_rank_of_a_group_writes_its_pairs(folder: Path) -> None:
    """All three ranks of the group score them."""
    calls, of_group = list[int](), Layout(3, 1, 3)
    for rank in (2, 1, 0):
        assert not list((folder / "store").glob("shard-*"))
        world = Alone(rank, 3, rank, of_group, torch.device("cpu"))
        scored(folder, lambda batch: calls.append(0) or torch.full((len(batch.answers.ids), 2), -1.0), world)
    assert len(calls) == 3 * 3 and len(list((folder / "store").glob("shard-*"))) == 1
