"""What follows from `task` alone: one value per task, which every other package reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Task:
    """One of the things that can be learned.

    unit         what data.train consists of
    rows         rows of tokens of one example, each of at most data.max_length tokens
    formats      the formats of rows that it takes
    answers      whether a row is a prompt and an answer, which is kept whole; else it is text, which may be
                 split
    preference   whether the loss is one of the section dpo: of whole answers, and compared with a frozen
                 reference by all but `preferences.REFERENCE_FREE`. The policy then has to start as its
                 reference, so nothing random (dropout, noise) may change it
    """

    unit: Literal["row", "pair"]
    rows: int
    formats: tuple[str, ...]
    answers: bool = True
    preference: bool = False


TASKS: Mapping[str, Task] = {
    "sft": Task(
        "row", 1, ("messages", "alpaca", "text", "sharegpt", "prompt_completion", "preference", "kto")
    ),
    "pretrain": Task("row", 1, ("text",), answers=False),
    "dpo": Task("pair", 2, ("preference",), preference=True),
}
