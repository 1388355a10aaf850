"""A reference whose config has dropout: its scores are those without it, wherever they come from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsft.data.steps.batch import MicroBatch
from dsft.data.steps.steps import micro_batches_of
from dsft.engine.frozen import FrozenEngine
from dsft.model.attention_choice import requirements_of
from dsft.model.build import build_model
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.plan.reference import reference_model
from dsft.reference import model as reference_of
from dsft.reference.key import key_of
from dsft.reference.precomputed import AnswerScorer, ScoringPass, scoring_batch
from dsft.reference.refer import refer_to_engine
from dsft.reference.store import Store
from dsft.setup.inputs import Inputs, read_inputs
from dsft.spec.schema import Spec
from tests.unit.reference.small import ALONE, model, spec

PAIRS = 5


@pytest.fixture
def folder(folder: Path) -> Path:
    model(folder / "other")
    for name in ("model", "other"):
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attention_dropout": 0.5}))
    return folder


def opened(asked: Spec, inputs: Inputs) -> tuple[Policy, FrozenEngine]:
    """As `open_reference` gives it, without DeepSpeed. The modules begin in training mode."""
    policy = build_model(reference_model(asked), inputs.facts, asked.train.seed, torch.float32).train()
    return policy.requires_grad_(False), FrozenEngine(policy, policy, ALONE)


def micro_batches(asked: Spec, inputs: Inputs) -> list[MicroBatch]:
    return list(
        micro_batches_of(inputs.train, np.arange(PAIRS), scoring_batch(asked, 2, 1), 0, inputs.pad_id)
    )


def plain(policy: Policy, batches: Sequence[MicroBatch], *, dropout: bool) -> Tensor:
    """(n, 2), in the order of the pairs."""
    policy.train(dropout)
    found = [(b, answer_logps(policy(b.tokens.input_ids, b.tokens).logps, b)) for b in batches]
    numbers = torch.cat([b.answers.ids for b, _ in found if b.answers is not None])
    return torch.cat([logps for _, logps in found])[numbers.argsort()]


def live(asked: Spec, inputs: Inputs, frozen: FrozenEngine, policy: Policy) -> Tensor:
    batches = list(refer_to_engine(frozen)(micro_batches(asked, inputs)))
    pairs = [batch.answers for batch in batches if batch.answers is not None]
    found = torch.cat([each.reference for each in pairs if each.reference is not None])
    return found[torch.cat([each.ids for each in pairs]).argsort()]


def precomputed(asked: Spec, inputs: Inputs, frozen: FrozenEngine, policy: Policy) -> Tensor:
    key = key_of(asked, reference_model(asked), inputs)
    store = Store.of(asked, key)
    store.prepare()
    kept = ScoringPass(asked, store, 2, [inputs.train], store.read([(PAIRS, 2)], pytest.fail), ())
    AnswerScorer(kept, inputs.pad_id, ALONE, frozen).score(lambda pace: None)
    return torch.from_numpy(store.read([(PAIRS, 2)], pytest.fail).logps[0])


@pytest.mark.parametrize("other", [False, True], ids=["of the policy's start", "dpo.reference_model"])
@pytest.mark.parametrize("scored", [precomputed, live])
def test_dropout_has_no_part_in_the_scores(scored: Any, other: bool, folder: Path) -> None:
    changed = {"reference": scored.__name__}
    if other:
        changed["reference_model"] = str(folder / "other")
    asked = spec(folder, {"dpo": changed})
    inputs = read_inputs(asked, lambda text: None)
    policy, frozen = opened(asked, inputs)
    found = scored(asked, inputs, frozen, policy)
    batches = micro_batches(asked, inputs)
    torch.testing.assert_close(found, plain(policy, batches, dropout=False), rtol=0, atol=1e-5)
    assert (plain(policy, batches, dropout=True) - found).abs().max() > 1e-3, "dropout would be seen"


def test_the_attention_of_packed_rows_is_chosen_without_dropout(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """As it is for the policy: torch's one call has no dropout."""
    asked = spec(folder, {"data": {"packing": True}})
    inputs = read_inputs(asked, lambda text: None)
    chosen: list[float] = []
    monkeypatch.setattr(
        reference_of,
        "attend",
        lambda causal_lm, *_: chosen.append(requirements_of(causal_lm).dropout),
    )
    monkeypatch.setattr(reference_of, "build_frozen_engine", lambda policy, config, world: None)
    reference_of.open_reference(asked, inputs.facts, ALONE)
    assert chosen == [0.0]
