"""What `dsft reference` starts, and what it and `--reference_only` say where there is nothing to score."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsft import cli
from dsft.errors import SpecError
from dsft.plan.reference import check_precomputed
from dsft.reference.score import micro_batch_size, scoring_batch
from tests.launching import ROOT
from tests.unit.reference.small import model, rows, spec


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"task": "sft"}, "task: task sft has no reference; start dsft/train.py"),
        ({"dpo": {"loss_type": "simpo"}}, "dpo.loss_type: simpo needs no reference"),
        ({"dpo": {"reference": "live"}}, "dpo.reference: live computes the reference while it trains"),
        ({"dpo": {"reference": "adapter"}}, "dpo.reference: adapter computes the reference while it trains"),
    ],
)
def test_nothing_to_score(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    sections = {name: keys for name, keys in changed.items() if name != "task"}
    asked = spec(tmp_path, sections).model_copy(update={k: v for k, v in changed.items() if k == "task"})
    with pytest.raises(SpecError) as raised:
        check_precomputed(asked, "dsft reference")
    assert "nothing for dsft reference to score" in str(raised.value) and said in str(raised.value)


def test_dsft_reference_becomes_train_py_on_its_own_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "model")
    rows(tmp_path / "a.jsonl", 2)
    rows(tmp_path / "b.jsonl", 1)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(spec(tmp_path).model_dump(mode="json", exclude_unset=True)))
    started: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *given: started.append(given))
    for name in ("RANK", "SLURM_PROCID", "NNODES", "KEPT"):
        monkeypatch.setenv(name, "1")
    cli.reference(path, ["train.seed=1"], 1)
    cli.reference(path, None, 3)
    for _, argv, environ in started:
        assert argv[:3] == [sys.executable, str(ROOT / "dsft" / "train.py"), str(path)]
        assert environ["KEPT"] == "1" and not {"RANK", "SLURM_PROCID", "NNODES"} & environ.keys()
    assert [argv[3:] for _, argv, _ in started] == [
        ["train.seed=1", "--reference_only", "--any_ranks"],
        ["--reference_only", "--any_ranks", "--num_gpus", "3"],
    ]
    with pytest.raises(SpecError, match="nothing for dsft reference to score"):
        cli.reference(path, ["dpo.reference=live"], 1)
    assert len(started) == 2


def test_a_pass_has_the_runs_micro_batches_on_any_number_of_ranks(tmp_path: Path) -> None:
    asked = spec(tmp_path)
    check_precomputed(asked, "dsft reference")
    assert micro_batch_size(asked, 3) == 2
    by_total = spec(tmp_path, {"train": {"micro_batch_size": None, "global_batch_size": 12}})
    assert [micro_batch_size(by_total, ranks) for ranks in (1, 3, 5, 100)] == [12, 4, 2, 1]
    for ranks in (1, 3, 5):
        sizes = scoring_batch(by_total, 4, ranks)
        assert (sizes.micro_batch_size, sizes.accumulation_steps, sizes.data_parallel) == (4, 1, ranks)
    packed = spec(tmp_path, {"data": {"packing": True}})
    assert scoring_batch(packed, 4, 2).tokens_per_micro_batch == 4 * 2 * 256
