"""The quickstart's losses, which no change and no version of torch or transformers may move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import records, trained
from tests.launching import ROOT


@pytest.mark.long
def test_quickstart_losses_are_those_of_the_readme(tmp_path: Path) -> None:
    trained(ROOT / "specs" / "quickstart.yaml", f"output_dir={tmp_path}", "wandb.mode=disabled")
    losses = records(tmp_path / "quickstart", "train/loss")
    assert [f"{losses[step]:.4f}" for step in (1, 200)] == ["5.6857", "0.0368"]
    held_out = records(tmp_path / "quickstart", "eval/loss")
    assert f"{held_out[200]:.4f}" == "0.0403"
