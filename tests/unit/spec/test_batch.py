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


def refusal(ranks: int, **values: Any) -> str:
    with pytest.raises(SpecError) as error:
        batch_sizes(Train(**values), ranks)
    return str(error.value)


def test_a_batch_that_does_not_divide_shows_the_whole_equation_and_the_nearest() -> None:
    message = refusal(16, global_batch_size=100, micro_batch_size=3)
    assert (
        "global_batch_size 100 = micro_batch_size 3 × accumulation_steps ? × data-parallel ranks 16"
        in message
    )
    assert "96 and 144" in message


def test_groups_of_ranks_are_named_where_they_split_rows() -> None:
    with pytest.raises(SpecError) as error:
        batch_sizes(Train(global_batch_size=100, micro_batch_size=3), 4, sequence_parallel=2)
    assert "accumulation_steps ? × data-parallel groups 4 (of 2 ranks) does not hold" in str(error.value)
    data = Data.model_validate({"train": [{"path": "x"}], "packing": True})
    packed = batch_sizes(Train(global_batch_size=100, micro_batch_size=5), 4, data, "sft", 2)
    assert packed.equation().endswith("as possible, equally many in every group")
    assert packed.accumulation_steps == 5


def test_a_batch_below_one_micro_batch_has_one_nearest() -> None:
    assert "the nearest value of global_batch_size that works is 48" in refusal(
        16, global_batch_size=10, micro_batch_size=3
    )


def test_the_ways_out_name_the_size_that_could_change() -> None:
    message = refusal(8, global_batch_size=64, micro_batch_size=3)
    assert "micro_batch_size 2 or 4 with 64" in message
    message = refusal(8, global_batch_size=64, accumulation_steps=5)
    assert "accumulation_steps 4 or 8 with 64" in message


def test_three_sizes_that_contradict_are_refused() -> None:
    message = refusal(4, global_batch_size=64, micro_batch_size=2, accumulation_steps=2)
    assert "the product is 16" in message


def test_one_size_is_not_enough() -> None:
    assert "two of the three" in refusal(4, micro_batch_size=2)
