"""A bit of what ranks hold alike is flipped on one of them: the run stops at the next comparison, and names
rank and tensor. Runs without a fault are compared in each of the other tests, before every checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import shows_traceback, write_model, write_spec
from tests.launching import ROOT, forked

pytestmark = pytest.mark.filterwarnings("ignore")

FLIPPING = ROOT / "tests" / "integration" / "flipping.py"
PROJECTION = "model.layers.1.mlp.up_proj.weight"
FROZEN = "model.layers.1.mlp.up_proj.base_layer.weight"
TIED = "model.embed_tokens.weight"
TABLE = "model.rotary_emb.inv_freq"
ZERO_0, BF16 = "parallel.zero_stage=0", "train.precision=bf16"
LORA = "model.lora={rank: 4, alpha: 8, target_modules: [up_proj]}"


@pytest.mark.parametrize(
    ("ranks", "tensor", "words", "message"),
    [
        (
            3,
            PROJECTION,
            [ZERO_0],
            f") has values of {PROJECTION} that differ from those of the other ranks, and",
        ),
        pytest.param(  # as in fp32
            2, f"{PROJECTION} in float32", [ZERO_0, BF16], ") have values of", marks=pytest.mark.long
        ),
        (2, FROZEN, ["parallel.zero_stage=2", BF16, LORA], FROZEN),
        (2, TABLE, ["parallel.zero_stage=3"], TABLE),
        (2, TIED, [ZERO_0, "parallel.pipeline_stages=2"], TIED),
    ],
    ids=["zero0", "zero0-bf16", "frozen", "buffer", "tied"],
)
def test_a_flipped_bit_stops_the_run(
    tmp_path: Path, ranks: int, tensor: str, words: list[str], message: str
) -> None:
    spec = write_spec(tmp_path, tied=tensor == TIED)
    if tensor == FROZEN:
        words = [*words, f"model.name_or_path={write_model(tmp_path / 'model')}", "model.from_config=null"]
    settings = ["train.compare_ranks_every=2", "checkpoint.every=50", "train.micro_batch_size=2"]
    result = forked(FLIPPING, ranks, ["1", tensor, "3", str(spec), *words, *settings])
    assert result.returncode != 0 and message in result.stderr, result.stdout + result.stderr
    assert "step 4: " in result.stderr and not shows_traceback(result.stderr)
    assert not list(tmp_path.glob("runs/small/checkpoints/step-*")), (
        "ranks disagree on it, so it is not saved"
    )
