"""Small specs for the tests of the plan."""

from collections.abc import Callable
from typing import Any

import pytest

from dsft.spec.schema import Spec
from tests.specs import llama, minimal_spec


def _spec(task: str = "pretrain", **sections: Any) -> Spec:
    """A valid spec; each keyword replaces or extends one section."""
    model = {"from_config": llama(64, 128, 4, 4, 2, tie_word_embeddings=False)} | sections.pop("model", {})
    train = {"micro_batch_size": 2, "accumulation_steps": 3, "precision": "fp32"} | sections.pop("train", {})
    return minimal_spec(task, model=model, train=train, **sections)


@pytest.fixture
def make_spec() -> Callable[..., Spec]:
    return _spec
