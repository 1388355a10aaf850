"""`dsft/train.py`, but one rank kills itself with SIGKILL, or asks itself to stop, at a chosen instant.

    dying.py INSTANT RANK STEP SPEC [key=value …]

The ranks' clocks are two hours apart, since nothing may depend on them.

INSTANT: asked (SIGTERM in place of SIGKILL, in a step), step (before the step's forward), part (half of a
rank's file written), manifest (before MANIFEST.json), rename (before the folder gets its name), latest
(before `latest` names it).

The script TASK of the environment, where there is one, registers a task of its own.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import dsft.checkpoint.save as saving
import dsft.run.loop as loop
from dsft.train import main


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(
    function: Callable[..., Any], is_time: Callable[..., bool], do: Callable[[], None] = die
) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if is_time(*arguments):
            do()
        return function(*arguments, **named)

    return wrapped


def arm(instant: str, step: int) -> None:
    folder = f"step-{step}"
    if instant == "asked":
        ask = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
        loop.seed_step = before(loop.seed_step, lambda seed, index, rank: index == step, ask)
    elif instant == "step":
        loop.seed_step = before(loop.seed_step, lambda seed, index, rank: index == step)
    elif instant == "part":
        whole = saving.write_tensors

        def torn(path: Path, *arguments: Any) -> Any:
            written = whole(path, *arguments)
            if path.parent.name.startswith(f"{folder}.tmp"):
                os.truncate(path, written.size // 2)
                die()
            return written

        saving.write_tensors = torn
    elif instant == "manifest":
        saving.write_json = before(
            saving.write_json, lambda path, value: path.name == "MANIFEST.json" and value["step"] == step
        )
    elif instant == "rename":
        os.rename = before(os.rename, lambda source, target: Path(target).name == folder)
    elif instant == "latest":
        saving.write_aside = before(
            saving.write_aside, lambda path, text: path.name == "latest" and text.strip() == folder.encode()
        )


if __name__ == "__main__":
    instant, rank, step, *arguments = sys.argv[1:]
    now, ahead = time.time, 3600 if os.environ["RANK"] == "1" else -3600
    time.time = lambda: now() + ahead
    if os.environ["RANK"] == rank:
        arm(instant, int(step))
    if "TASK" in os.environ:
        runpy.run_path(os.environ["TASK"])
    sys.exit(main(arguments))
