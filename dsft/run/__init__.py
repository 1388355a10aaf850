"""Carry out one run on each of its ranks: `train.py` builds a Job and calls `run`."""

from dsft.run.job import Job
from dsft.run.main import run

__all__ = ["Job", "run"]
