"""Carry out one run on each of its ranks: `train.py` builds a Job and calls `run`."""

from dsft.job.api import Job
from dsft.job.run import run

__all__ = ["Job", "run"]
