from __future__ import annotations

import pytest

from dsft.errors import SpecError
from dsft.plan.layout import layout_of
from dsft.spec.schema import Parallel


def test_ranks_are_numbered_stage_by_stage() -> None:
    ranks = layout_of(Parallel(pipeline_stages=2), 6)
    assert ranks.data_parallel == 3
    assert [ranks.stage(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [ranks.data_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_stages_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(SpecError, match="4 does not divide the 6 processes.*set 3 or 6"):
        layout_of(Parallel(pipeline_stages=4), 6)
