"""Every architecture that can be cut into pipeline stages: two and three unequal stages, in one process, give
the log-probabilities and the gradients of the whole, of padded and of packed rows. The others are refused."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from dsft.data.steps.batch import NO_TARGET, MicroBatch
from dsft.model.attention import attend_per_segment
from dsft.model.build import switch_off_dropout
from dsft.model.older import checkpoint_activations
from dsft.model.policy import Policy
from dsft.model.split_points import find_split_points
from dsft.model.stage import SplitPoints, cut_to_stage
from dsft.plan.cut import Cut
from dsft.spec.architecture import PIPELINE_MODEL_TYPES
from tests.architectures.cases import ARCHITECTURES, PACKED, USUAL, deeper, small_config, small_model
from tests.launching import allowed
from tests.make import make_micro_batch
from tests.selected import tiered

BOUND = 1e-6
ROWS = ([5, 9, 2, 7, 1, 8, 3], [4, 4, 6, 11], [3, 1, 12, 6, 2])
REFUSED = {"gemma3n_text": "looks up tokens again", "gemma4_text": "looks up tokens again"}


def padded() -> MicroBatch:
    longest = max(map(len, ROWS))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in ROWS])
    targets = torch.tensor([row[1:] + [NO_TARGET] * (longest - len(row) + 1) for row in ROWS])
    return make_micro_batch(ids, torch.arange(longest).repeat(len(ROWS), 1), targets)


def packed() -> MicroBatch:
    ids = torch.tensor([[token for row in ROWS for token in row]])
    positions = torch.tensor([[index for row in ROWS for index in range(len(row))]])
    targets = torch.tensor([[token for row in ROWS for token in (*row[1:], NO_TARGET)]])
    return make_micro_batch(ids, positions, targets, tuple(map(len, ROWS)))


def stages_of(model: PreTrainedModel, joints: SplitPoints, cut: Cut) -> list[Policy]:
    parts = [copy.deepcopy(model) for _ in range(cut.stages)]
    for stage, part in enumerate(parts):
        cut_to_stage(part, joints, stage, cut)
    last = cut.stages - 1
    return [Policy(part, is_first=n == 0, is_last=n == last) for n, part in enumerate(parts)]


def outcome(stages: list[Policy], batch: MicroBatch) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Log-probabilities, and each stage's gradients of a weighed sum of them."""
    carried: Any = batch.tokens.input_ids
    for stage in stages:
        carried = stage(carried, batch.tokens, batch.segments)
    logps = carried.logps
    (logps * torch.linspace(1, 2, logps.numel()).view_as(logps)).sum().backward()
    gradients = [{n: p.grad for n, p in s.named_trained().items() if p.grad is not None} for s in stages]
    for stage in stages:
        stage.zero_grad()
    return logps.detach(), gradients


def summed(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, gradient in part.items():
            total[name] = total[name] + gradient if name in total else gradient
    return total


def check(whole: Policy, stages: list[Policy], batch: MicroBatch) -> None:
    expected, (all_gradients,) = outcome([whole], batch)
    found, parts = outcome(stages, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    gradients = summed(parts)
    assert gradients.keys() == all_gradients.keys()
    largest = max(gradient.abs().max() for gradient in all_gradients.values())
    for name, one in all_gradients.items():
        scale = one.abs().max()
        scale = largest if scale < 1e-6 * largest else scale  # of nothing but rounding
        assert (gradients[name] - one).abs().max() <= BOUND * scale, name


@pytest.mark.parametrize("kind", tiered(sorted(ARCHITECTURES.keys() - REFUSED.keys()), USUAL))
def test_stages_equal_the_whole_model(kind: str) -> None:
    """Padded rows through three stages, packed ones through two; with gradient checkpointing."""
    model = small_model(kind, **deeper(kind)).train()
    switch_off_dropout(model)
    joints = find_split_points(model.config)
    assert isinstance(joints, SplitPoints), joints
    checkpoint_activations(model)
    two, three = (stages_of(model, joints, Cut(counts)) for counts in ((1, 3), (1, 2, 1)))
    whole = Policy(model)
    check(whole, three, padded())
    held = [set(policy.named_trained()) for policy in three]
    assert not held[1] & (held[0] | held[2])
    assert len(held[0] & held[2]) == (1 if model.config.tie_word_embeddings else 0)
    assert set().union(*held) == set(whole.named_trained())
    attention = PACKED.get(kind, "auto")
    if attention != "refused":
        for policy in (whole, *two):
            attend_per_segment(policy.causal_lm, attention, 64)
        check(whole, two, packed())


def test_splitting_a_model_with_many_experts_takes_seconds() -> None:
    """512 experts; computed one after the other they took 70 seconds."""
    start = time.process_time()
    assert isinstance(find_split_points(CONFIG_MAPPING["qwen3_next"]()), SplitPoints)
    assert time.process_time() - start < allowed(10)


def test_splittable_architectures_are_listed() -> None:
    assert PIPELINE_MODEL_TYPES == ARCHITECTURES.keys() - REFUSED.keys()


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_by_name(kind: str) -> None:
    found = find_split_points(small_config(kind))
    assert isinstance(found, str) and kind in found and REFUSED[kind] in found
