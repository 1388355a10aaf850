"""Runs dsft/train.py, and prints what a test asks about its reference.

reference_worker.py stall SPEC …   each rank writes a shard for every micro-batch, and waits after two of them
reference_worker.py train SPEC …   prints beside how many models each model of a rank was built, and how much
                                   more memory was resident than when the one before it was built
"""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any

from dsft.model import build
from dsft.model.policy import Policy
from dsft.report.memory import resident
from dsft.system.process import end
from dsft.train import main
from tests.launching import LATE


def stall() -> None:
    from dsft.reference import precomputed

    plain, written = precomputed.Store.write, []
    precomputed.SHARD_SECONDS, precomputed._ROUND = 0.0, 1

    def write(*given: Any) -> None:
        if len(written) == 2:
            time.sleep(LATE)
        plain(*given)
        written.append(given)

    precomputed.Store.write = write  # type: ignore[method-assign]


def train() -> None:
    plain, before = build.build_model, []

    def counted(*given: Any, **named: Any) -> Any:
        gc.collect()
        models = sum(isinstance(one, Policy) for one in gc.get_objects())
        more = (resident() - before[-1]) / 2**20 if before else 0.0
        before.append(resident())
        print(f"rank {os.environ['RANK']}: built beside {models} models and {more:.1f} MiB", flush=True)
        return plain(*given, **named)

    build.build_model = counted


if __name__ == "__main__":
    {"stall": stall, "train": train}[sys.argv[1]]()
    end(main(sys.argv[2:]))
