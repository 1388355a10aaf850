"""`dsft rehearse` against torch's own allocator, on the stand-in GPU: the peaks of a rank of several."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from dsft.commands.rehearse import rehearse_rank, setup_of
from dsft.model import attention_choice
from dsft.plan.build import build_plan
from tests.specs import dims, minimal_spec
from tests.standin.gpu import run

pytestmark = pytest.mark.standin

CLOSE = 0.01
CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (2, 2, {}), (4, 3, {}), (2, 3, {"lora": {"rank": 16}, "quantize": "nf4"}),
)  # fmt: skip
"""Ranks, ZeRO stage and keys of model."""


def test_a_rehearsal_takes_what_torch_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "CUDNN_CAPABILITIES", ())  # the stand-in has no cuDNN
    config = {"model_type": "llama", "max_position_embeddings": 4096}
    config |= dims(2048, 5504, 8, 16, 16, vocab_size=32_000)
    longest = {"packing": True, "max_length": 4096, "max_tokens_per_micro_batch": 4096}
    specs = [
        minimal_spec(
            model={"from_config": config, **model},
            data=longest,
            parallel={"zero_stage": zero},
            train={"precision": "bf16"},
        )
        for _, zero, model in CASES
    ]
    given = [
        json.dumps({"ranks": ranks, "spec": spec.model_dump(mode="json")})
        for (ranks, *_), spec in zip(CASES, specs, strict=True)
    ]
    output = tmp_path / "cases.jsonl"
    done = run(
        "-m", "tests.standin.rehearse_worker", str(output), *given,
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    plans = [build_plan(spec, ranks) for (ranks, *_), spec in zip(CASES, specs, strict=True)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        rehearsed = pool.starmap(rehearse_rank, [(setup_of(plan), plan, 0) for plan in plans], chunksize=1)
    wrong: dict[str, Any] = {}
    for case, found, peaks in zip(CASES, rehearsed, runs, strict=True):
        assert "error" not in peaks, peaks["error"]
        for phase, one in found["phases"].items():
            if abs(one["peak"] / peaks[phase]["peak"] - 1) > CLOSE:
                wrong[f"{case} {phase}"] = one["peak"], peaks[phase]["peak"]
    assert wrong == {}
