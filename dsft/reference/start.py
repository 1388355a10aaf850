"""Run `dsft reference`: dsft/train.py --reference_only on a number of ranks of this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dsft.plan.reference import check_precomputed, reference_parallel
from dsft.rank.start import run_ranks
from dsft.remote import without_rank_variables
from dsft.spec.layout import fewest_ranks
from dsft.spec.load import load_spec

SCRIPT = Path(__file__).parents[1] / "train.py"
KEPT = "the pairs scored so far are stored, and the same command continues from there."


def start(spec: Path, overrides: Sequence[str], ranks: int | None) -> int:
    """Start the ranks and return the exit code; a single rank replaces this process, which then does not
    return. ranks: by default one per GPU; where there is none, the fewest that can score. Raises SpecError
    where the spec has nothing to score, and as `run_ranks` does."""
    loaded = load_spec(spec, overrides)
    check_precomputed(loaded, "dsft reference")
    if ranks is None:
        import torch

        ranks = torch.cuda.device_count() or fewest_ranks(reference_parallel(loaded))
    argv = [sys.executable, str(SCRIPT), str(spec), *overrides, "--reference_only", "--any_ranks"]
    environ = without_rank_variables(os.environ)
    if ranks > 1:
        return run_ranks(argv, environ, ranks, KEPT)
    os.execve(sys.executable, argv, environ)
