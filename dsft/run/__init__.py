"""Carry out one run on each of its ranks: `train.py` builds a Job and calls `run`."""

from dsft.run.main import run
from dsft.setup.run import Job

__all__ = ["Job", "run"]
