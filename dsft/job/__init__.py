"""One run, as each of its ranks lives it: `train.py` makes a Job and calls `run`."""

from dsft.job.api import Job
from dsft.job.run import run

__all__ = ["Job", "run"]
