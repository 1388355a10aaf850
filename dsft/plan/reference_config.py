"""Derive the DeepSpeed JSON of a frozen reference: every key, its value and the reason for the value.

No value is "auto", none depends on the machine. There is no optimizer: DeepSpeed then only gathers and
releases parameters at ZeRO 3 (engine.py:687 _configure_zero_optimizer), and refuses ZeRO 1 and 2
(engine.py:2659 DummyOptim).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsft.plan.census import Elements
from dsft.plan.ds_config import ConfigEntry, Row, gathering, nested, silence
from dsft.plan.reference import dpo_of, reference_stage
from dsft.spec.schema import Spec


def reference_config(spec: Spec, elements: Elements | None = None) -> dict[str, Any]:
    """Return the nested mapping for `deepspeed.initialize` of the reference. elements: size of the reference,
    None if unknown."""
    return nested(reference_entries(spec, elements))


def reference_entries(spec: Spec, elements: Elements | None = None) -> tuple[ConfigEntry, ...]:
    """Return all keys in the order of the file."""
    rows = (*_batch(), *_precision(spec), *_zero(spec, elements), *silence())
    return tuple(ConfigEntry(*row) for row in rows)


def _batch() -> Iterator[Row]:
    yield "train_micro_batch_size_per_gpu", 1, "no effect: DeepSpeed requires a value, and nothing is trained"


def _precision(spec: Spec) -> Iterator[Row]:
    precision = spec.train.precision
    for kind in ("bf16", "fp16"):
        yield f"{kind}.enabled", precision == kind, f"train.precision is {precision}, the reference's too"
    yield "torch_autocast.enabled", False, "weights already have the type of train.precision"


def _zero(spec: Spec, elements: Elements | None) -> Iterator[Row]:
    stage = reference_stage(spec)
    what = "parameters sharded over the ranks" if stage == 3 else "the whole model on every rank"
    yield "zero_optimization.stage", stage, f"{what}; ZeRO 1 and 2 shard nothing that a frozen model has"
    if stage == 0:
        return
    for key, value, reason in gathering(elements):
        yield f"zero_optimization.{key}", value, reason
    reason = "no backward to save memory in; it would change torch's own function for the policy, too"
    yield "zero_optimization.memory_efficient_linear", False, reason
    if dpo_of(spec).reference_offload == "cpu":
        yield "zero_optimization.offload_param.device", "cpu", "dpo.reference_offload: in host memory"
        yield "zero_optimization.offload_param.pin_memory", True, "pinned host memory: faster copies"
