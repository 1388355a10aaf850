"""Runs dsft's train.py for each job of a JSON file, one after another, each in a fork of this process, which
has imported what they share. A job is {"args": what train.py takes, "log": file for all that it writes,
"from": a run's folder of which the job's run begins as a copy stopped at step 2, "run": the job's}.

    python -m tests.standin.jobs_worker FILE

The exit codes are written to `codes.json` beside FILE, under the names of the logs.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tests.forked import SHARED, child, launch, make_once

TRAIN = Path(__file__).resolve().parents[2] / "dsft" / "train.py"


def stopped(run: Path, at: Path) -> None:
    """Makes a copy of a run as it was after its checkpoint of step 2."""
    shutil.copytree(run, at)
    shutil.rmtree(at / "checkpoints" / "step-4")
    shutil.rmtree(at / "export")


def work(job: dict[str, Any]) -> int:
    """Return the exit code of a job."""
    if "from" in job:
        stopped(Path(job["from"]), Path(job["run"]))
    streams = {"stdout": job["log"], "stderr": job["log"]}
    script = {"script": str(TRAIN), "args": job["args"], "ranks": 0, "cwd": str(TRAIN.parents[1])}
    _, status = os.waitpid(child(lambda: launch(script | streams | {"environ": dict(os.environ)})), 0)
    return os.waitstatus_to_exitcode(status)


def share() -> None:
    """Imports what all jobs import. The number of devices, which DeepSpeed asks for meanwhile, is given
    without asking CUDA: torch refuses CUDA to the forks of a process that has. So peft is left out, which
    imports bitsandbytes."""
    import torch

    counted = getattr(torch._C, "_cuda_getDeviceCount", None)  # a build for CPUs has none
    if counted:
        torch._C._cuda_getDeviceCount = lambda: int(os.environ["STANDIN_DEVICES"])
    for name in SHARED:
        if name == "peft":
            continue
        importlib.import_module(name)
    make_once()
    if counted:
        torch._C._cuda_getDeviceCount = counted
        torch.cuda._cached_device_count = None


if __name__ == "__main__":
    share()
    file = Path(sys.argv[1])
    codes = {Path(job["log"]).stem: work(job) for job in json.loads(file.read_text())}
    (file.parent / "codes.json").write_text(json.dumps(codes))
