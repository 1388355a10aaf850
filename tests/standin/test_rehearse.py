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
LORA = {"lora": {"rank": 16}}
NF4 = {"model": LORA | {"quantize": "nf4"}}
EIGHT = {"optim": {"name": "adamw_8bit"}}
LIVE = {"task": "dpo", "dpo": {"reference": "live"}}
HOST = {"device": "cpu"}
Case = tuple[int, dict[str, Any], dict[str, Any]]
ALWAYS: tuple[Case, ...] = (
    (2, {"zero_stage": 2}, EIGHT),
    (4, {"zero_stage": 3, "offload_optimizer": HOST}, {}),
    (2, {"zero_stage": 3}, NF4),
)
"""Ranks, section parallel and other sections."""
MORE: tuple[Case, ...] = (
    (2, {"zero_stage": 2}, {}),
    (4, {"zero_stage": 3}, {}),
    (2, {"zero_stage": 2}, {"model": LORA}),
    (2, {"zero_stage": 3}, {"model": LORA}),
    (2, {"zero_stage": 0}, NF4),
    (2, {"zero_stage": 2}, NF4),
    (2, {"zero_stage": 1, "pipeline_stages": 2}, NF4),
    (2, {"zero_stage": 0}, EIGHT),
    (2, {"zero_stage": 3}, EIGHT),
    (2, {"zero_stage": 1, "offload_optimizer": HOST}, {}),
    (2, {"zero_stage": 2, "offload_optimizer": HOST}, {}),
    (2, {"zero_stage": 2}, LIVE),
    (2, {"zero_stage": 3}, LIVE),
    (2, {"zero_stage": 3}, LIVE | {"dpo": {"reference": "live", "reference_offload": "cpu"}}),
    (2, {"zero_stage": 3}, NF4 | {"task": "dpo"}),
    (2, {"zero_stage": 1, "pipeline_stages": 2}, LIVE),
)


@pytest.mark.parametrize("cases", [ALWAYS, pytest.param(MORE, marks=pytest.mark.long)])
def test_a_rehearsal_takes_what_torch_allocates(
    cases: tuple[Case, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_choice, "CUDNN_CAPABILITIES", ())  # the stand-in has no cuDNN
    config = {"model_type": "llama", "max_position_embeddings": 2048}
    config |= dims(2048, 5504, 6, 16, 16, vocab_size=32_000)
    longest = {"packing": True, "max_length": 2048, "max_tokens_per_micro_batch": 2048}
    specs = [
        minimal_spec(
            **sections | {"model": {"from_config": config} | sections.get("model", {})},
            data=longest,
            parallel=parallel,
            train={"precision": "bf16"},
        )
        for _, parallel, sections in cases
    ]
    given = [
        json.dumps({"ranks": ranks, "spec": spec.model_dump(mode="json")})
        for (ranks, *_), spec in zip(cases, specs, strict=True)
    ]
    output = tmp_path / "cases.jsonl"
    done = run(
        "rehearse_worker", str(output), *given,
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    plans = [build_plan(spec, ranks) for (ranks, *_), spec in zip(cases, specs, strict=True)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        rehearsed = pool.starmap(rehearse_rank, [(setup_of(plan), plan, 0) for plan in plans], chunksize=1)
    wrong: dict[str, Any] = {}
    for case, found, peaks in zip(cases, rehearsed, runs, strict=True):
        assert "error" not in peaks, peaks["error"]
        for phase, one in found["phases"].items():
            if abs(one["peak"] / peaks[phase]["peak"] - 1) > CLOSE:
                wrong[f"{case} {phase}"] = one["peak"], peaks[phase]["peak"]
    assert wrong == {}
