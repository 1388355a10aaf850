"""The tables of docs/support.md are what validators and cases give. DSFT_UPDATE_GOLDEN=1 writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dsft.spec.architecture import MIXTURES, PIPELINE_MODEL_TYPES
from tests.architectures import cases, support
from tests.unit.spec.test_docs import check_block


@pytest.mark.parametrize(("name", "make"), [
    ("tasks", support.tasks_markdown),
    ("options", support.options_markdown),
    ("architectures", support.architectures_markdown),
    ("wholes", support.wholes_markdown),
])  # fmt: skip
def test_support_table_follows_from_validators_and_cases(name: str, make: Callable[[], str]) -> None:
    check_block("support.md", name, make())


def test_every_option_is_refused_and_accepted_somewhere() -> None:
    """A table of one kind of cell alone would be one whose generator sees nothing."""
    cells = [line.split(" | ") for line in support.options_markdown().splitlines() if line.startswith("| ")]
    assert {support.SHOWN, support.WORKS, "1"} <= {cell for row in cells for cell in row}
    zero_2, zero_3, pipeline, nvme = (support.OPTIONS[n] for n in (2, 3, 4, 7))
    assert "sharded gradients" in str(support.refusal(zero_2, pipeline))
    assert support.refusal(zero_3, nvme) is None
    assert "zero3_nvme-2ranks-adamw-four-clipped-fault" in support.cases_of([zero_3.title, nvme.title])


def test_validators_know_the_mixtures() -> None:
    assert cases.MIXTURES.keys() & PIPELINE_MODEL_TYPES == MIXTURES
