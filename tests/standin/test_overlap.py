"""What the backward pass of several GPUs waits for at ZeRO 1 and 2: rank 0 of two, whose stand-in sends
nothing, under torch's sanitizer of streams. The order in which waits are asked for is a GPU's; no time is."""

from __future__ import annotations

from typing import Any

import pytest

from dsft.engine.reduction import BUFFERS
from tests.standin import overlap_worker
from tests.standin.gpu import answer

pytestmark = pytest.mark.standin


@pytest.fixture(scope="module")
def report() -> Any:
    return answer("overlap_worker", mode="numbers")


def test_backward_waits_only_for_its_next_buffer(report: Any) -> None:
    """And neither the host nor the device as a whole waits; sums are right (the worker compares them)."""
    for name in overlap_worker.CASES.keys() - {"on the host"}:
        case = report[name]
        assert "race" not in case, name
        assert case["device_syncs"] == case["stream_syncs"] == case["reused"] == 0, name
        orders = [order for order in case["orders"] if order]
        assert len(orders) == (1 if "ZeRO 1" in name else overlap_worker.MICRO_BATCHES)
        for order in orders:
            *buckets, last = order.split("s")[1:]
            assert len(buckets) > 2 * BUFFERS and last.endswith("W") and "W" not in last[:-1]
            assert [bucket.count("w") for bucket in buckets] == [
                int(number >= BUFFERS - 1) for number in range(len(buckets))
            ]
            assert all(bucket.startswith("r") for bucket in buckets)


def test_optimizer_offload_waits_once_per_micro_batch(report: Any) -> None:
    assert "race" not in report["on the host"]
    assert report["on the host"]["device_syncs"] == overlap_worker.MICRO_BATCHES


def test_deepspeed_waits_are_found(report: Any) -> None:
    found = report["deepspeed"]
    assert all(order.startswith("sWrsWrsWr") for order in found["orders"])
    reductions = sum(order.count("r") for order in found["orders"])
    assert found["device_syncs"] == reductions + overlap_worker.MICRO_BATCHES == 26
    assert report["all-reduce"]["device_syncs"] == overlap_worker.MICRO_BATCHES


def test_missing_wait_is_found(report: Any) -> None:
    assert all(report[fault]["race"] == "detected 1 errors" for fault in ("w", "s", "W"))
    assert report["memory"]["reused"] > 0
