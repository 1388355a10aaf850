import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsft.errors import SpecError
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.schema import Data, Train

sizes = st.integers(1, 50)


@given(
    sizes,
    sizes,
    sizes,
    st.sampled_from(["global_batch_size", "micro_batch_size", "accumulation_steps", None]),
)
def test_the_third_size_follows_from_two(micro: int, steps: int, ranks: int, left_out: str | None) -> None:
    values: dict[str, Any] = {
        "global_batch_size": micro * steps * ranks,
        "micro_batch_size": micro,
        "accumulation_steps": steps,
    }
    train = Train(**{key: value for key, value in values.items() if key != left_out})
    assert batch_sizes(train, ranks) == BatchSizes(micro * steps * ranks, micro, steps, ranks)


@pytest.mark.parametrize(("ranks", "total", "micro", "steps", "message"), [
    (16, 100, 3, None, "100 = micro_batch_size 3 × accumulation_steps ? × data-parallel ranks 16"),
    (16, 100, 3, None, "96 and 144"),
    (16, 10, 3, None, "the nearest value of global_batch_size that works is 48"),
    (8, 64, 3, None, "micro_batch_size 2 or 4 with 64"),
    (8, 64, None, 5, "accumulation_steps 4 or 8 with 64"),
    (4, 64, 2, 2, "the product is 16"),
    (4, None, 2, None, "two of the three"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused_with_the_nearest_that_do(
    ranks: int, total: int | None, micro: int | None, steps: int | None, message: str
) -> None:
    train = Train(global_batch_size=total, micro_batch_size=micro, accumulation_steps=steps)
    with pytest.raises(SpecError, match=re.escape(message)):
        batch_sizes(train, ranks)


def test_groups_of_ranks_are_named_where_they_split_rows() -> None:
    with pytest.raises(SpecError) as error:
        batch_sizes(Train(global_batch_size=100, micro_batch_size=3), 4, sequence_parallel=2)
    assert "accumulation_steps ? × data-parallel groups 4 (of 2 ranks) does not hold" in str(error.value)
    data = Data.model_validate({"train": [{"path": "x"}], "packing": True})
    packed = batch_sizes(Train(global_batch_size=100, micro_batch_size=5), 4, data, "sft", 2)
    assert packed.equation().endswith("as possible, equally many in every group")
    assert packed.accumulation_steps == 5
