"""Small specs for the tests of the plan."""

from collections.abc import Callable
from typing import Any

import pytest

from dsft.spec.schema import Spec
from tests.specs import llama


def _spec(**sections: Any) -> Spec:
    """A valid spec; each keyword replaces or extends one section."""
    values: dict[str, Any] = {
        "name": "small",
        "task": "pretrain",
        "model": {"from_config": llama(64, 128, 4, 4, 2, tie_word_embeddings=False)},
        "data": {"train": [{"path": "builtin:quickstart"}]},
        "train": {"micro_batch_size": 2, "accumulation_steps": 3, "precision": "fp32"},
        "optim": {"learning_rate": 1e-3},
    }
    for name, section in sections.items():
        merged = isinstance(section, dict) and isinstance(values.get(name), dict)
        values[name] = {**values[name], **section} if merged else section
    return Spec.model_validate(values)


@pytest.fixture
def make_spec() -> Callable[..., Spec]:
    return _spec
