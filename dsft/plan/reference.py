"""What the reference of a preference run is, and how it is laid out: takes a spec, pure.

The reference is a model of its own to everything that reads weights: a `model` section in which nothing is
trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsft.errors import Problem, SpecError
from dsft.plan.layout import Layout, layout
from dsft.spec.preferences import REFERENCE_FREE
from dsft.spec.schema import Dpo, Lora, Model, Parallel, Spec


def reference_model(spec: Spec) -> Model:
    """The section of the frozen model: dpo.reference_model, or the policy's own start, which with
    model.lora.path has that adapter. It reads the policy's tokens, and has its attention."""
    policy, other = spec.model, dpo_of(spec).reference_model
    own: dict[str, object] = {
        "gradient_checkpointing": False,
        "activation_offload": False,
        "trainable": None,
        "lora": None,
    }
    if other is not None:
        own |= {
            "name_or_path": other,
            "from_config": None,
            "tokenizer": policy.tokenizer or policy.name_or_path,
        }
    elif policy.lora is not None and policy.lora.path is not None:
        own["lora"] = policy.lora.model_copy(update={"dropout": Lora.model_fields["dropout"].default})
    return policy.model_copy(update=own)


def needs_reference(spec: Spec) -> bool:
    """Whether the loss has one."""
    return spec.task_kind.preference and dpo_of(spec).loss_type not in REFERENCE_FREE


def has_engine(spec: Spec) -> bool:
    """Whether the reference has an engine of its own, before training or beside it."""
    return needs_reference(spec) and dpo_of(spec).reference != "adapter"


def in_stages(spec: Spec) -> bool:
    """Whether it is cut into the policy's pipeline stages, where DeepSpeed has no part in it."""
    return spec.parallel.pipeline_stages > 1 and dpo_of(spec).reference_zero_stage is None


def reference_stage(spec: Spec) -> int:
    """The ZeRO stage of the frozen model, 0 or 3: what stages 1 and 2 divide, it does not have."""
    asked = dpo_of(spec).reference_zero_stage
    if asked is not None:
        return asked
    return 3 if spec.parallel.zero_stage == 3 else 0


def reference_layout(spec: Spec, world_size: int) -> Layout:
    """The frozen model's own: by default in the policy's pipeline stages; whole or sharded over all ranks
    where the spec says which. SpecError where the stages do not divide the ranks."""
    return layout(reference_parallel(spec), world_size)


def reference_parallel(spec: Spec) -> Parallel:
    """How it is divided. Another model than the policy has its own layers, which are then balanced by their
    parameters."""
    stages = spec.parallel.pipeline_stages if dpo_of(spec).reference_zero_stage is None else 1
    listed = stages > 1 and not isinstance(spec.parallel.pipeline_cut, str)
    as_policy = listed and dpo_of(spec).reference_model is None
    cut = spec.parallel.pipeline_cut if as_policy else "parameters"
    return Parallel(zero_stage=reference_stage(spec), pipeline_stages=stages, pipeline_cut=cut)


def reference_line(spec: Spec) -> str:
    """Which reference a run has, how it is laid out, and why so."""
    dpo = dpo_of(spec)
    if dpo.reference == "adapter":
        return f"reference: {_which(spec)}, by the policy's own engine (dpo.reference adapter)"
    return f"reference: {_which(spec)}, {_how(spec)} (dpo.reference {dpo.reference})"


def reference_facts(spec: Spec, *, unchanged: bool | None) -> dict[str, Any] | None:
    """For an export's card, without folders of this machine; None where the loss has no reference. unchanged:
    whether it was found to be what it was at the start, None where that was not looked at."""
    if not needs_reference(spec):
        return None
    return {"which": f"{_which(spec)} ({dpo_of(spec).reference})", "unchanged": unchanged}


def check_precomputed(spec: Spec, command: str) -> None:
    """Raises SpecError where there is no reference to score ahead of training, as `command` does."""
    dpo = dpo_of(spec)
    if not spec.task_kind.preference:
        where, why = "task", f"task {spec.task} has no reference; start dsft/train.py, or set dpo"
    elif dpo.loss_type in REFERENCE_FREE:
        where, why = "dpo.loss_type", f"{dpo.loss_type} needs no reference; start dsft/train.py"
    elif dpo.reference != "precomputed":
        where = "dpo.reference"
        why = (
            f"{dpo.reference} computes the reference while it trains; start dsft/train.py, or set precomputed"
        )
    else:
        return
    raise SpecError(f"There is nothing for {command} to score.", [Problem(where, why)])


def dpo_of(spec: Spec) -> Dpo:
    """The section, or its defaults."""
    return spec.dpo or Dpo()


def _which(spec: Spec) -> str:
    lora, other = spec.model.lora, dpo_of(spec).reference_model
    if other is not None:
        other = Path(other).name if Path(other).is_absolute() else other
        return f"{other}, another checkpoint than the policy's start (dpo.reference_model)"
    if lora is not None and lora.path is not None:
        return "a frozen copy of the adapter that training starts from"
    if lora is not None:
        return "the model without its adapter"
    return "the policy as it starts"


def _how(spec: Spec) -> str:
    if reference_stage(spec) == 3:
        return f"sharded over all ranks (ZeRO 3){', kept in host memory' if _offloaded(spec) else ''}"
    if dpo_of(spec).reference_zero_stage is None:
        if spec.parallel.pipeline_stages > 1:
            return f"in the policy's {spec.parallel.pipeline_stages} pipeline stages"
        if spec.parallel.zero_stage in (1, 2):
            stage = spec.parallel.zero_stage
            return f"whole on every rank, since ZeRO {stage} divides nothing that a frozen model has"
    return "whole on every rank"


def _offloaded(spec: Spec) -> bool:
    return dpo_of(spec).reference_offload == "cpu"
