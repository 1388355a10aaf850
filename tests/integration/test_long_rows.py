"""A row of 32,768 tokens on one, two and four ranks: each has its share of the activations, with MLPs in
chunks less than half of that, and the all-to-alls send what the law of docs/long-context.md says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.integration.long_rows_worker import LLAMA
from tests.launching import forked, on_the_cpu

pytest.importorskip("deepspeed")

TOKENS, SEGMENT = 32_768, 256  # attention over segments takes part of a second, over the whole row minutes
SPLITS, CHUNKS = (1, 2, 4), (1, 8)


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, int], list[dict[str, Any]]]:
    """By ranks and chunks: what each rank measured."""
    results = {}
    for ranks in SPLITS:
        with on_the_cpu():
            worker = Path(__file__).with_name("long_rows_worker.py")
            done = forked(worker, ranks, [str(TOKENS), str(SEGMENT)])
        assert done.returncode == 0, done.stderr[-3000:]
        for line in done.stdout.splitlines():
            if line.startswith("FOUND "):
                one = json.loads(line[6:])
                results[ranks, one["chunks"]] = one["ranks"]
    return results


@pytest.mark.parametrize("chunks", CHUNKS)
def test_sequence_parallel_divides_activations(found: Any, chunks: int) -> None:
    whole = found[1, chunks][0]["peak"]
    shares = {n: max(rank["peak"] for rank in found[n, chunks]) / whole * n for n in SPLITS}
    assert 1 <= shares[2] < 1.05 and 1 <= shares[4] < 1.2, shares  # parameters and their buckets stay
    losses = [rank["loss"] for n in SPLITS for rank in found[n, chunks]]
    assert max(losses) - min(losses) < 1e-6


def test_mlp_chunks_halve_activations(found: Any) -> None:
    shares = {n: found[n, CHUNKS[1]][0]["peak"] / found[n, 1][0]["peak"] for n in SPLITS}
    # with 4 ranks, for which keys are repeated, the exchange of queries, keys and values is the peak
    assert max(shares[1], shares[2]) < 0.5 and shares[4] < 0.52, shares


def test_plan_predicts_activations(found: Any) -> None:
    off = {
        key: round(ranks[0]["planned"] / ranks[0]["peak"], 2)
        for key, ranks in found.items()
        if not 1 <= ranks[0]["planned"] / ranks[0]["peak"] <= 1.25
    }
    assert off == {}


def test_all_to_all_traffic_equals_the_formula(found: Any) -> None:
    heads, size = LLAMA["num_attention_heads"], LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    for ranks in SPLITS:
        keys = math.lcm(LLAMA["num_key_value_heads"], ranks)
        each = TOKENS // ranks * (ranks - 1) // ranks * (2 * heads + 2 * keys) * size * 4  # bytes in fp32
        law = 3 * LLAMA["num_hidden_layers"] * each  # forward, recomputation, backward
        for rank in found[ranks, 1] + found[ranks, CHUNKS[1]]:
            assert rank["sent"] == pytest.approx(law, rel=0.02)
            assert rank["to_send"] == pytest.approx(law, rel=0.02)
