"""Runs dsft/train.py, and prints what a test asks about its reference.

reference_worker.py SIGNAL RANKS SPEC …   each rank writes a shard for every micro-batch, two of them; when
                                          all have, those of RANKS get the signal and the others wait
reference_worker.py train SPEC …          prints beside how many models each model of a rank was built, and
                                          how much more memory was resident than when the one before it was
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from dsft.model.policy import Policy
from dsft.reference import model as reference
from dsft.report.memory import resident
from dsft.run import build as policy
from dsft.system.process import end
from dsft.train import main
from tests.launching import LATE


def interrupt(what: signal.Signals, ranks: Sequence[str]) -> None:
    from dsft.reference import precomputed

    plain, written = precomputed.Store.write, []
    precomputed.SHARD_SECONDS, precomputed._ROUND = 0.0, 1

    def write(store: Any, *given: Any) -> None:
        if len(written) == 2:
            assert not psutil.Process().children(), "a rank scores by itself"
            while len(list(store.folder.glob("shard-*.safetensors"))) < 4:
                time.sleep(0.01)
            if os.environ["RANK"] in ranks:
                os.kill(os.getpid(), what)
            time.sleep(LATE)
        plain(store, *given)
        written.append(given)

    precomputed.Store.write = write  # type: ignore[method-assign]


def train() -> None:
    plain, before = policy.build_model, list[int]()

    def counted(*given: Any, **named: Any) -> Any:
        gc.collect()
        models = sum(isinstance(one, Policy) for one in gc.get_objects())
        more = (resident() - before[-1]) / 2**20 if before else 0.0
        before.append(resident())
        print(f"rank {os.environ['RANK']}: built beside {models} models and {more:.1f} MiB", flush=True)
        return plain(*given, **named)

    policy.build_model = reference.build_model = counted


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    if how == "train":
        train()
    else:
        interrupt(signal.Signals[how], arguments.pop(0))
    end(main(arguments))
