"""Check the types of what a checkpoint's state.json holds: see `CheckpointState` in save.py."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Annotated, Any

from annotated_types import Len
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from dsft.engine.api import StateKind
from dsft.spec.schema import Spec

_MOST = 2**48  # elements of a tensor: a petabyte of fp32
_OTHER_KEYS = ("extra_forbidden", "missing")  # errors of pydantic


class _Values(BaseModel):
    """Values of a newer or an older dsft may be more or fewer."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _countable(shape: list[int]) -> list[int]:
    if math.prod(shape) > _MOST:
        raise ValueError(f"is the shape of {math.prod(shape)} elements")
    return shape


class _Progress(_Values):
    """Of `dsft.run.loop.Progress`, which takes no other values."""

    model_config = ConfigDict(extra="forbid")

    step: NonNegativeInt
    applied_steps: NonNegativeInt = 0
    num_tokens: NonNegativeInt = 0
    epoch: NonNegativeFloat = 0.0
    nonfinite_in_a_row: NonNegativeInt = 0
    loss_scale: PositiveFloat | None = None
    loss_scale_steps: NonNegativeInt = 0
    owes_evaluation: bool = False


class _Batch(_Values):
    global_batch_size: PositiveInt


class _Rows(_Values):
    rows: NonNegativeInt
    tokens: NonNegativeInt
    fingerprint: str


class _NewRows(_Values):
    first: NonNegativeInt
    stop: NonNegativeInt


class _ReferenceOfCard(_Values):
    which: str
    unchanged: bool | None = None  # of earlier versions


class _Origin(_Values):
    digest: str | None = None
    is_folder: bool = False
    reference: _ReferenceOfCard | None = None


class _Software(_Values):
    versions: dict[str, str | None]
    environment: dict[str, Any] = {}


class _Reference(_Values):
    digest: str | None = None
    components: dict[str, Any] = {}


class _Train(_Values):
    precision: str


class _Spec(_Values):
    train: _Train


class _State(_Values):
    progress: _Progress
    spec: _Spec
    parameters: dict[str, Annotated[list[NonNegativeInt], AfterValidator(_countable)]]
    kinds: Annotated[list[StateKind], Len(1)]
    batch: _Batch
    data: dict[str, _Rows]
    versions: dict[str, str] = {}
    layout: dict[str, Any] = {}
    held_out_loss: FiniteFloat | None = None
    base: dict[str, str] | list[list[str | int]] | None = None
    built_from: dict[str, Any] | None = None
    software: _Software | None = None
    new_rows: _NewRows | None = None
    origin: _Origin | None = None
    reference: _Reference | None = None
    carried: dict[str, FiniteFloat] | None = None


def problem_of(state: Any) -> str | None:
    """Return what is wrong with the content of a state.json, in a clause; None where nothing is. Keys of its
    spec that this dsft does not know, and those that it has beside, are for the comparison with the run's."""
    return _first_error(_State, state) or _first_error(Spec, state["spec"], "spec.", _OTHER_KEYS)


def _first_error(
    schema: type[BaseModel], content: Any, where: str = "", ignored: Collection[str] = ()
) -> str | None:
    try:
        schema.model_validate(content)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            if one["type"] not in ignored:
                return f"{where}{'.'.join(map(str, one['loc']))}: {one['msg']}"
    return None
