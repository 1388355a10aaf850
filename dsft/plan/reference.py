"""Derive a run's reference model, its layout and its DeepSpeed JSON from the spec.

Code that reads weights treats the reference as a separate model: a `model` section in which nothing is
trained. Where nothing else is documented, the functions are for specs whose loss needs a reference
(`Spec.reference`).
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
from dsft.spec.schema import Experts, Lora, Model, Parallel, Reference, Spec


def reference_model(spec: Spec) -> Model:
    """Return the `model` section of the reference: the one that `reference_model` names, or the policy's
    initial model, including the adapter in model.lora.path. It has the policy's tokenizer and attention. The
    initial policy also has its expert implementation and quantization; another model has its own."""
    policy, other = spec.model, _keys(spec).reference_model
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
            "quantize": _keys(spec).reference_quantize,
            "quantize_skip": (),
        }
    elif policy.lora is not None and policy.lora.path is not None:
        own["lora"] = policy.lora.model_copy(update={"dropout": Lora.model_fields["dropout"].default})
    return policy.model_copy(update=own)


def has_engine(spec: Spec) -> bool:
    """Return whether there is a reference with its own engine, before training (precomputed) or during it
    (live)."""
    return spec.reference is not None and spec.reference.reference != "adapter"


def scores_in_training(spec: Spec) -> bool:
    """Return whether there is a reference that scores each micro-batch while the run trains: one more forward
    pass."""
    return spec.reference is not None and spec.reference.reference != "precomputed"


def policy_passes(spec: Spec) -> int:
    """Return the number of forward passes of the policy without gradients before each step."""
    return int(spec.reference is not None and spec.reference.has_baseline)


def reference_passes(spec: Spec) -> int:
    """Return the number of forward passes of the reference in each step; 0 if it does not score while the run
    trains."""
    return 1 + policy_passes(spec) if scores_in_training(spec) else 0


def other_model(spec: Spec) -> str | None:
    """Return the name of the reference where it is another model than the policy's initial one; also None if
    there is none."""
    return None if spec.reference is None else spec.reference.reference_model


def in_stages(spec: Spec) -> bool:
    """Return whether the reference is cut into the policy's pipeline stages; it then runs without
    DeepSpeed."""
    return spec.parallel.pipeline_stages > 1 and _keys(spec).reference_zero_stage is None


def reference_stage(spec: Spec) -> int:
    """Return the reference's ZeRO stage, 0 or 3. Stages 1 and 2 shard optimizer states and gradients, which a
    frozen model does not have."""
    stage = _keys(spec).reference_zero_stage
    if stage is not None:
        return stage
    return 3 if spec.parallel.zero_stage == 3 else 0


def reference_layout(spec: Spec, world_size: int) -> Layout:
    """Return the layout of the reference: by default in the policy's pipeline stages; if the spec sets
    reference_zero_stage, whole or sharded over all ranks. Raise SpecError if the number of stages does
    not divide the number of ranks."""
    return layout_of(reference_parallel(spec), world_size)


def reference_parallel(spec: Spec) -> Parallel:
    """Return the `parallel` section of the reference. A model other than the policy has other layers, so a
    listed pipeline_cut is replaced by balancing."""
    stages = spec.parallel.pipeline_stages if _keys(spec).reference_zero_stage is None else 1
    listed = stages > 1 and not isinstance(spec.parallel.pipeline_cut, str)
    as_policy = listed and _keys(spec).reference_model is None
    cut = spec.parallel.pipeline_cut if as_policy else "parameters"
    copied = spec.parallel.zero_hpz_partition_size if scores_in_training(spec) else 1
    is_on_gpu = _keys(spec).reference_offload == "none"
    return Parallel(
        zero_stage=reference_stage(spec),
        pipeline_stages=stages,
        pipeline_cut=cut,
        sequence_parallel=spec.parallel.sequence_parallel,
        zero_hpz_partition_size=copied if reference_stage(spec) == 3 and is_on_gpu else 1,
    )


def reference_line(spec: Spec) -> str:
    """Return a line for the user: which reference a run has, its layout, and the reason."""
    way = _keys(spec).reference
    how = "by the policy's own engine" if way == "adapter" else _how(spec)
    form = reference_model(spec).quantize
    which = f"{_which(spec)}, in {form}" if form else _which(spec)
    return f"reference: {which}, {how} ({spec.own_key('reference')} {way})"


def reference_facts(spec: Spec) -> dict[str, Any] | None:
    """Return facts for the model card of an export, without folders of this machine; None if the loss has no
    reference."""
    return None if spec.reference is None else {"which": f"{_which(spec)} ({spec.reference.reference})"}


def check_precomputed(spec: Spec, command: str) -> None:
    """Raise SpecError if the spec has no reference that `command` can score before training."""
    if not isinstance(spec.of_task, Reference):
        where, why = "task", f"task {spec.task} has no reference; start dsft/train.py, or set dpo"
    elif spec.reference is None:
        loss = getattr(spec.of_task, "loss_type", "this loss")
        where, why = spec.own_key("loss_type"), f"{loss} needs no reference; start dsft/train.py"
    elif spec.reference.reference != "precomputed":
        where = spec.own_key("reference")
        why = f"{spec.reference.reference} computes the reference while it trains; start dsft/train.py, or "
        why += "set precomputed"
    elif spec.reference.has_baseline and spec.train.global_batch_size is None:
        where = "train.global_batch_size"
        why = "null depends on the number of ranks, and each step pairs its own prompts and answers; set it"
    else:
        return
    raise SpecError(f"There is nothing for {command} to score.", [Problem(where, why)])


def _keys(spec: Spec) -> Reference:
    assert spec.reference is not None, "the loss needs a reference"
    return spec.reference


def _which(spec: Spec) -> str:
    lora, other = spec.model.lora, _keys(spec).reference_model
    if other is not None:
        other = Path(other).name if Path(other).is_absolute() else other
        return f"{other}, another checkpoint than the policy's start ({spec.own_key('reference_model')})"
    if lora is not None and lora.path is not None:
        return "a frozen copy of the adapter that training starts from"
    if lora is not None:
        return "the model without its adapter"
    return "the policy as it starts"


def _how(spec: Spec) -> str:
    offloaded = _keys(spec).reference_offload == "cpu"
    if reference_stage(spec) == 3:
        return f"sharded over all ranks (ZeRO 3){', in host memory' if offloaded else ''}"
    if _keys(spec).reference_zero_stage is None:
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
    for key, value, reason in gathering(elements, reference_parallel(spec).zero_hpz_partition_size):
        yield f"zero_optimization.{key}", value, reason
    reason = "no backward to save memory in; it would change torch's own function for the policy, too"
    yield "zero_optimization.memory_efficient_linear", False, reason
    if _keys(spec).reference_offload == "cpu":
        reason = f"{spec.own_key('reference_offload')}: in host memory"
        yield "zero_optimization.offload_param.device", "cpu", reason
        yield "zero_optimization.offload_param.pin_memory", True, "pinned host memory: faster copies"
