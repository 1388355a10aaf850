from __future__ import annotations

import time

import pytest
import torch

from dsft.data.steps.batch import MicroBatch
from dsft.model.config import TokenFacts, resolve_config
from dsft.model.joints import one_of_each
from dsft.model.timing import Seconds, seconds_of
from dsft.spec.schema import Lora, Model

WORDS = 64
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": KINDS,
}


def batch() -> MicroBatch:
    ids = torch.arange(12).view(1, 12)
    positions = torch.cat([torch.arange(7), torch.arange(5)]).view(1, 12)
    return MicroBatch(ids, positions, ids.roll(-1, 1), (7, 5))


def measured(model: Model) -> Seconds:
    config = resolve_config(model, TokenFacts(WORDS, 1, 2, None))
    assert one_of_each(config) == [0, 0, 2, 0, 0, 2]
    return seconds_of(model, config, batch(), torch.float32, torch.device("cpu"), 64)


def test_each_kind_of_layer_is_measured_once_and_the_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1, 1000))
    monkeypatch.setattr(
        time, "perf_counter", lambda: next(ticks) ** 2
    )  # each interval is longer than the last
    drawn = torch.get_rng_state()
    found = measured(Model(from_config=GEMMA, gradient_checkpointing=True))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [found.layers.index(seconds) for seconds in found.layers] == [0, 0, 2, 0, 0, 2]
    parts = [
        found.before,
        *sorted(set(found.layers)),
        found.after,
    ]  # each has four passes, of which the 2nd counts
    assert parts == sorted(parts) and len(set(parts)) == 4


def test_frozen_weights_are_measured_too() -> None:
    found = measured(Model(from_config=GEMMA, lora=Lora(rank=2)))
    assert min(*found.layers, found.before, found.after) > 0
