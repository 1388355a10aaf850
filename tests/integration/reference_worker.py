"""Scores or trains as dsft does, and says what a test wants to know of it.

python reference_worker.py score SPEC RANKS [stall] `dsft reference`, with a shard for every micro-batch; with
                                                    `stall` each rank writes two of them and then waits to be
                                                    killed
torchrun … reference_worker.py train SPEC KEY=VALUE training; prints how many models a rank built, and by how
                                                    much making the store raised its peak of memory
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dsft.model import build
from dsft.reference import precomputed
from dsft.reference.passes import Pass
from dsft.system.process import end
from tests.launching import LATE


class Stalls(float):
    """As the seconds after which a rank writes a shard: with each micro-batch, twice."""

    def __le__(self, other: object) -> bool:
        Stalls.written += 1
        if Stalls.written > 2:
            time.sleep(LATE)
        return True

    written = 0


def score(spec: str, ranks: str, stall: str = "") -> int:
    from dsft.reference.command import score as scored
    from tests.integration.reference_worker import Stalls  # by this name the processes that score know it

    seconds = Stalls() if stall else 0.0
    precomputed.Pass = partial(Pass, shard_seconds=seconds)  # type: ignore[misc, assignment]
    scored(Path(spec), [], int(ranks))
    return 0


def train(*words: str) -> int:
    raised, models = [0.0], []
    plain_build, plain_precompute = build.build_model, precomputed.precompute

    def counted(*given: Any, **named: Any) -> Any:
        models.append(1)
        return plain_build(*given, **named)

    def measured(*given: Any, **named: Any) -> Any:
        before = peak()
        found = plain_precompute(*given, **named)
        raised.append(peak() - before)
        return found

    build.build_model, precomputed.precompute = counted, measured
    from dsft.train import main

    code = main(words)
    print(f"rank {os.environ['RANK']}: {len(models)} models, peak raised by {sum(raised):.1f} MB", flush=True)
    return code


def peak() -> float:
    """Of resident memory, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    modes: dict[str, Callable[..., int]] = {"score": score, "train": train}
    end(modes[sys.argv[1]](*sys.argv[2:]))
