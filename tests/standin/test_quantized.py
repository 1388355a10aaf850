"""The plan's memory of weights in 4 bits against torch's own allocator, on the stand-in GPU: what rank 0 of
one or several has of models with the widths of Llama 3.1 8B and Qwen3-30B-A3B."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.selected import selected, tiered
from tests.specs import dims, llama, minimal_spec
from tests.standin.gpu import run

pytestmark = pytest.mark.standin

CLOSE, TOKENS = 0.03, 4096
DENSE = llama(4096, 14336, 32, 32, 8, vocab_size=128_256, max_position_embeddings=TOKENS)
MIXTURE = dims(2048, 6144, 12, 32, 4, vocab_size=151_936, max_position_embeddings=TOKENS, head_dim=128)
MIXTURE |= {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
MIXTURE |= {"moe_intermediate_size": 768}
FEW = {"num_hidden_layers": 8}
DORA, ON_EXPERTS = {"use_dora": True}, {"target_modules": ["experts", "q_proj"]}
ALWAYS: dict[str, dict[str, Any]] = {
    "8 layers, ZeRO 3, 4 ranks": {"zero": 3, "ranks": 4, "config": FEW},
    "8 layers, ZeRO 0, DoRA": {"zero": 0, "lora": DORA, "config": FEW},
    "4 layers, ZeRO 0, adapters on experts": {
        "zero": 0, "lora": ON_EXPERTS, "config": MIXTURE | {"num_hidden_layers": 4},
    },
}  # fmt: skip
CASES = ALWAYS | {
    "ZeRO 3, 4 ranks": {"zero": 3, "ranks": 4},
    "ZeRO 1, stage 0 of 4, 8 ranks": {"zero": 1, "ranks": 8, "stages": 4},
    "ZeRO 0, no checkpointing": {"zero": 0, "checkpointing": False},
    "ZeRO 2": {"zero": 2},
    "ZeRO 2, 2 ranks, no checkpointing": {"zero": 2, "ranks": 2, "checkpointing": False},
    "ZeRO 3, 4 ranks, no checkpointing": {"zero": 3, "ranks": 4, "checkpointing": False},
    "ZeRO 3, 4 ranks, two to a row": {"zero": 3, "ranks": 4, "split": 2},
    "ZeRO 1, stage 0 of 2, no checkpointing": {"zero": 1, "ranks": 2, "stages": 2, "checkpointing": False},
    "ZeRO 0, DoRA, no checkpointing": {"zero": 0, "lora": DORA, "checkpointing": False},
    "experts, ZeRO 0": {"zero": 0, "config": MIXTURE},
    "experts, ZeRO 3, 4 ranks": {"zero": 3, "ranks": 4, "config": MIXTURE},
    "experts, ZeRO 3, 4 ranks, adapters on them": {
        "zero": 3,
        "ranks": 4,
        "lora": ON_EXPERTS,
        "config": MIXTURE,
    },
    "experts, ZeRO 0, adapters on them": {"zero": 0, "lora": ON_EXPERTS, "config": MIXTURE},
}


def given(  # noqa: PLR0913, PLR0917  a case
    zero: int,
    ranks: int = 1,
    stages: int = 1,
    split: int = 1,
    lora: Any = None,
    config: Any = None,
    checkpointing: bool = True,
) -> str:
    model: dict[str, Any] = {"from_config": DENSE | (config or {}), "quantize": "nf4", "attention": "sdpa"}
    model |= {"lora": {"rank": 16} | (lora or {}), "gradient_checkpointing": checkpointing}
    spec = minimal_spec(
        model=model,
        data={"packing": True, "max_length": TOKENS, "max_tokens_per_micro_batch": TOKENS},
        parallel={"zero_stage": zero, "pipeline_stages": stages, "sequence_parallel": split},
        train={"precision": "bf16", "accumulation_steps": 2 * stages if stages > 1 else 1},
    )
    return json.dumps({"ranks": ranks, "spec": spec.model_dump(mode="json")})


@pytest.fixture(scope="module")
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """By name, of the cases that are selected."""
    output = tmp_path_factory.mktemp("quantized") / "cases.jsonl"
    names = selected(request, "name")
    done = run(
        "rehearse_worker", str(output), *(given(**CASES[name]) for name in names),
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", tiered(tuple(CASES), tuple(ALWAYS)))
def test_planned_memory_is_what_torch_allocates(name: str, cases: dict[str, dict[str, Any]]) -> None:
    case = cases[name]
    assert "error" not in case, case["error"]
    errors = {phase: round(one["planned"] / one["peak"] - 1, 3) for phase, one in case.items()}
    assert {phase: error for phase, error in errors.items() if abs(error) > CLOSE} == {}
