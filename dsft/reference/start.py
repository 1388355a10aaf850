"""Carry out `dsft reference` by replacing this process with dsft/train.py --reference_only."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dsft.plan.promised import load
from dsft.plan.reference import check_precomputed
from dsft.remote import without_a_place

SCRIPT = Path(__file__).parents[1] / "train.py"


def start(spec: Path, overrides: Sequence[str], ranks: int | None) -> None:
    """Start the scoring on `ranks` processes of this host, by default one per GPU, or one without a GPU. For
    more than one, train.py replaces itself with torchrun. Does not return. Raises SpecError where the spec
    has nothing to score."""
    check_precomputed(load(spec, overrides), "dsft reference")
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() or 1
    count = ["--num_gpus", str(ranks)] if ranks > 1 else []
    words = [str(spec), *overrides, "--reference_only", "--any_ranks", *count]
    os.execve(sys.executable, [sys.executable, str(SCRIPT), *words], without_a_place(os.environ))
