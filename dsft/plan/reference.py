"""Derive the reference model of a preference run, its layout and its DeepSpeed JSON from the spec.

Code that reads weights treats the reference as a separate model: a `model` section in which nothing is
trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsft.errors import Problem, SpecError
from dsft.plan.census import Elements
from dsft.plan.ds_config import Row, gathering, silence
from dsft.plan.ds_entries import ConfigEntry, nested
from dsft.spec.layout import Layout, layout_of
from dsft.spec.preferences import REFERENCE_FREE
from dsft.spec.schema import Dpo, Experts, Lora, Model, Parallel, Spec


def reference_model(spec: Spec) -> Model:
    """Return the `model` section of the reference: dpo.reference_model, or the policy's initial model,
    including the adapter in model.lora.path. Tokenizer and attention are the policy's, and what computes the
    experts of its initial model."""
    policy, other = spec.model, dpo_of(spec).reference_model
    own: dict[str, object] = {
        "gradient_checkpointing": False,
        "activation_offload": False,
        "mlp_chunks": None,
        "trainable": None,
        "lora": None,
        "experts": Experts(implementation=policy.experts.implementation),
    }
    if other is not None:
        own |= {
            "name_or_path": other,
            "from_config": None,
            "tokenizer": policy.tokenizer or policy.name_or_path,
            "experts": Experts(),
        }
    elif policy.lora is not None and policy.lora.path is not None:
        own["lora"] = policy.lora.model_copy(update={"dropout": Lora.model_fields["dropout"].default})
    return policy.model_copy(update=own)


def needs_reference(spec: Spec) -> bool:
    """Return whether the loss needs a reference."""
    return spec.task_kind.preference and dpo_of(spec).loss_type not in REFERENCE_FREE


def has_engine(spec: Spec) -> bool:
    """Return whether the reference has its own engine, before training (precomputed) or during it (live)."""
    return needs_reference(spec) and dpo_of(spec).reference != "adapter"


def in_stages(spec: Spec) -> bool:
    """Return whether the reference is cut into the policy's pipeline stages; it then runs without
    DeepSpeed."""
    return spec.parallel.pipeline_stages > 1 and dpo_of(spec).reference_zero_stage is None


def reference_stage(spec: Spec) -> int:
    """Return the reference's ZeRO stage, 0 or 3. Stages 1 and 2 shard optimizer states and gradients, which a
    frozen model does not have."""
    stage = dpo_of(spec).reference_zero_stage
    if stage is not None:
        return stage
    return 3 if spec.parallel.zero_stage == 3 else 0


def reference_layout(spec: Spec, world_size: int) -> Layout:
    """Return the layout of the reference: by default in the policy's pipeline stages; if the spec sets
    dpo.reference_zero_stage, whole or sharded over all ranks. Raise SpecError if the number of stages does
    not divide the number of ranks."""
    return layout_of(reference_parallel(spec), world_size)


def reference_parallel(spec: Spec) -> Parallel:
    """Return the `parallel` section of the reference. A model other than the policy has other layers, so a
    listed pipeline_cut is replaced by balancing."""
    stages = spec.parallel.pipeline_stages if dpo_of(spec).reference_zero_stage is None else 1
    listed = stages > 1 and not isinstance(spec.parallel.pipeline_cut, str)
    as_policy = listed and dpo_of(spec).reference_model is None
    cut = spec.parallel.pipeline_cut if as_policy else "parameters"
    return Parallel(
        zero_stage=reference_stage(spec),
        pipeline_stages=stages,
        pipeline_cut=cut,
        sequence_parallel=spec.parallel.sequence_parallel,
    )


def reference_line(spec: Spec) -> str:
    """Return a line for the user: which reference a run has, its layout, and the reason."""
    dpo = dpo_of(spec)
    if dpo.reference == "adapter":
        return f"reference: {_which(spec)}, by the policy's own engine (dpo.reference adapter)"
    return f"reference: {_which(spec)}, {_how(spec)} (dpo.reference {dpo.reference})"


def reference_facts(spec: Spec) -> dict[str, Any] | None:
    """Return facts for the model card of an export, without folders of this machine; None if the loss has no
    reference."""
    if not needs_reference(spec):
        return None
    return {"which": f"{_which(spec)} ({dpo_of(spec).reference})"}


def check_precomputed(spec: Spec, command: str) -> None:
    """Raise SpecError if the spec has no reference that `command` can score before training."""
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
    """Return the `dpo` section, or its defaults if the spec has none."""
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
    offloaded = dpo_of(spec).reference_offload == "cpu"
    if reference_stage(spec) == 3:
        return f"sharded over all ranks (ZeRO 3){', in host memory' if offloaded else ''}"
    if dpo_of(spec).reference_zero_stage is None:
        if spec.parallel.pipeline_stages > 1:
            return f"in the policy's {spec.parallel.pipeline_stages} pipeline stages"
        if spec.parallel.zero_stage in (1, 2):
            stage = spec.parallel.zero_stage
            return f"whole on every rank, since ZeRO {stage} shards nothing that a frozen model has"
    return "whole on every rank"


def reference_config(spec: Spec, elements: Elements | None = None) -> dict[str, Any]:
    """Return the nested mapping for `deepspeed.initialize` of the reference. elements: size of the reference,
    None if unknown."""
    return nested(reference_entries(spec, elements))


def reference_entries(spec: Spec, elements: Elements | None = None) -> tuple[ConfigEntry, ...]:
    """Return all keys in the order of the file, each with its value and the reason for it. There is no
    optimizer: DeepSpeed then only gathers and releases parameters at ZeRO 3 (engine.py:687
    _configure_zero_optimizer), and refuses ZeRO 1 and 2 (engine.py:2659 DummyOptim)."""
    return tuple(ConfigEntry(*row) for row in (*_types(spec), *_zero(spec, elements), *silence()))


def _types(spec: Spec) -> Iterator[Row]:
    precision = spec.train.precision
    yield "train_micro_batch_size_per_gpu", 1, "no effect: DeepSpeed requires a value, and nothing is trained"
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
