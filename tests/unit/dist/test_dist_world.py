"""What ranks compare before they join, through a real store between threads."""

import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from dsft.dist.world import compare_ranks
from dsft.errors import WorldError
from dsft.rank.places import CPU, RankPlace

SAME = {"spec": {"train": {"seed": 42}}, "versions": {"torch": "2.13.0", "dsft": "0.1.0, files 1a2b"}}


def met(*values: dict[str, Any]) -> list[str]:
    """What each rank raises, "" where it goes on."""
    store, raised = HashStore(), ["never ended"] * len(values)

    def one(rank: int) -> None:
        try:
            places = compare_ranks(store, rank, len(values), values[rank], RankPlace("node1", "x", rank, CPU))
            assert [place.local_rank for place in places] == list(range(len(values)))
            raised[rank] = ""
        except WorldError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(len(values))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def test_equal_ranks_go_on() -> None:
    assert met(SAME, dict(reversed(SAME.items())), SAME) == ["", "", ""]


@pytest.mark.parametrize(("other", "text"), [
    ({"versions": {"torch": "2.12.0", "dsft": "0.1.0, files 1a2b"}}, "versions.torch is '2.13.0'"),
    ({"versions": {"torch": "2.13.0", "dsft": "0.1.0, files ffff"}}, "versions.dsft is '0.1.0, files 1a2b'"),
    ({"device": "cuda"}, "device is (not set) on rank 0, 'cuda'"),
    ({"environment": {"NVIDIA_TF32_OVERRIDE": "1"}}, "environment.NVIDIA_TF32_OVERRIDE is (not set)"),
    ({"spec": {"train": {"seed": 7}}}, "spec.train.seed is 42 on rank 0, 7"),
], ids=["torch", "code", "device", "variable", "spec"])  # fmt: skip
def test_every_rank_refuses_by_key_and_rank(other: dict[str, Any], text: str) -> None:
    raised = met(SAME, SAME, SAME | other, SAME | other)
    assert text in raised[0] and "on ranks 2, 3" in raised[0]
    assert len(set(raised)) == 1, "all ranks raise the same"


def test_many_differences_are_counted() -> None:
    raised = met({"environment": {}}, {"environment": {str(number): "1" for number in range(20)}})
    assert "and 12 more" in raised[0]
