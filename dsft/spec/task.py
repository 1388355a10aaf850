"""Define the properties of each task, which all other packages read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticKnownError


@dataclass(frozen=True)
class TaskFacts:
    """Properties of a task.

    unit        unit of data.train, by which examples are cut from rows: see `dsft.data.sets.load.CUTS`
    rows        token sequences per example, each of at most data.max_length tokens
    formats     row formats that the task accepts
    whole       whether the objective compares whole answers, of which an example has `rows`
    answers     True if a row is a prompt and an answer, which is never split; False if it is text, which may
                be
    preference  whether the loss is one of section dpo: it is computed over whole answers and, except for
                `preferences.REFERENCE_FREE`, compared with a frozen reference. The policy must then start
                equal to its reference, so nothing random (dropout, noise) may change it
    """

    unit: str
    rows: int
    formats: tuple[str, ...]
    whole: bool = False
    answers: bool = True
    preference: bool = False


TASKS: dict[str, TaskFacts] = {
    "sft": TaskFacts(
        "row", 1, ("messages", "alpaca", "text", "sharegpt", "prompt_completion", "preference", "kto")
    ),
    "pretrain": TaskFacts("row", 1, ("text",), answers=False),
    "dpo": TaskFacts("pair", 2, ("preference",), whole=True, preference=True),
}
"""The facts of each task; `dsft.tasks.registry` has what it does."""


def _known_task(name: object) -> object:
    if not isinstance(name, str) or name not in TASKS:
        *most, last = map(repr, TASKS)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
    return name


TaskName = Annotated[
    str, BeforeValidator(_known_task), WithJsonSchema({"enum": list(TASKS), "type": "string"})
]
"""The name of a task in `TASKS`."""
