import re
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.errors import SpecError
from dsft.spec.layout import divided_group, fewest_ranks, hosts_of_ranks, layout_of
from dsft.spec.schema import Parallel


def test_ranks_are_numbered_stage_by_stage() -> None:
    ranks = layout_of(Parallel(pipeline_stages=2), 6)
    assert ranks.data_parallel == 3
    assert [ranks.stage(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [ranks.data_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_stages_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(SpecError, match="4 does not divide the 6 processes.*set 3 or 6"):
        layout_of(Parallel(pipeline_stages=4), 6)


def test_ranks_of_a_group_follow_each_other() -> None:
    ranks = layout_of(Parallel(pipeline_stages=2, sequence_parallel=2), 8)
    assert (ranks.shards, ranks.data_parallel) == (4, 2)
    assert [ranks.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [ranks.sequence_rank(rank) for rank in range(8)] == [0, 1] * 4
    with pytest.raises(SpecError, match="4 does not divide the 6 processes, and all groups need.*set 3 or 6"):
        layout_of(Parallel(sequence_parallel=4), 6)
    with pytest.raises(SpecError, match="3 does not divide the 4 processes of each stage.*multiple of 6"):
        layout_of(Parallel(pipeline_stages=2, sequence_parallel=3), 8)


def test_a_group_is_on_one_host_unless_the_spec_allows_more() -> None:
    four = Parallel(sequence_parallel=4)
    assert divided_group(four, hosts_of_ranks({"a": 4, "b": 8})) is None
    key, message = divided_group(four, hosts_of_ranks({"a": 4, "b": 6, "c": 2})) or ("", "")
    assert key == "parallel.sequence_parallel"
    assert message.startswith("4 would put ranks 8-11, which split the same rows, on 2 hosts")
    assert "a multiple of 4 ranks, numbered one after the other, set 2, or" in message
    assert (
        "ranks 0-3" in (divided_group(four, ["a", "b"] * 4) or ("", ""))[1]
    )  # as mpirun numbers them by node
    assert divided_group(Parallel(), ["a", "b"]) is None
    allowed = Parallel(sequence_parallel=4, sequence_parallel_across_hosts=True)
    assert divided_group(allowed, ["a", "b"] * 4) is None


def test_several_groups_have_a_copy_of_the_parameters_each_on_one_host() -> None:
    two = Parallel(zero_stage=3, zero_hpz_partition_size=2)
    assert layout_of(two, 6).shards == 6
    for parallel in (
        two, Parallel(), Parallel(sequence_parallel=3, zero_stage=3, zero_hpz_partition_size=4),
        Parallel(sequence_parallel=4, zero_stage=3, zero_hpz_partition_size=2),
    ):  # fmt: skip
        assert next(filter(partial(is_layout, parallel), count(1))) == fewest_ranks(parallel)
    for size in (2, 5):
        with pytest.raises(SpecError, match="2 does not divide .* into several groups.*2, at least 4"):
            layout_of(two, size)
    assert divided_group(two, hosts_of_ranks({"a": 2, "b": 4})) is None
    key, message = divided_group(two, hosts_of_ranks({"a": 3, "b": 3})) or ("", "")
    assert key == "parallel.zero_hpz_partition_size" and message.endswith("or set 1")
    assert message.startswith("2 would put ranks 2-3, which share a copy of the parameters, on 2 hosts")


def is_layout(parallel: Parallel, ranks: int) -> bool:
    try:
        return layout_of(parallel, ranks).world_size == ranks
    except SpecError:
        return False


HOSTS = st.lists(st.integers(1, 8), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(HOSTS, st.integers(1, 4))
def test_the_value_that_a_message_proposes_is_on_one_host(slots: list[int], size: int) -> None:
    on = hosts_of_ranks({str(host): count * size for host, count in enumerate(slots)})
    assert divided_group(Parallel(sequence_parallel=size), on) is None
    found = divided_group(Parallel(sequence_parallel=size + 1), on)
    if found:
        set_to = int(re.search(r"set (\d+), or", found[1])[1])  # type: ignore[index]
        assert set_to <= size and divided_group(Parallel(sequence_parallel=set_to), on) is None
