"""Check the keys of the tasks' own sections, such as `dpo`, and decide whether the answers of a pair share
their prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding, value_at, value_finding
from dsft.spec.losses import PREFERENCE_LOSSES
from dsft.spec.schema import SECTIONS, Classify, Distill, Dpo, Kto, Reference, Spec
from dsft.spec.task import TASKS

_OF_STORE = ("reference_store", "recheck_rows")
_OF_REFERENCE = tuple(key for key in Reference.model_fields if key not in _OF_STORE)
SHARING = ("auto", "sdpa")
"""Values of model.attention with which the second answer of a packed pair can attend to the prompt of the
first."""


def shares_prompts(spec: Spec) -> bool:
    """Return whether the prompt of a pair is computed once for both answers."""
    asked = getattr(spec.of_task, "share_prompts", False)  # None: where it is possible
    return asked is not False and spec.data.packing and spec.model.attention in SHARING


def preference_findings(spec: Spec) -> Iterator[Finding]:
    own = spec.of_task
    for name in SECTIONS:
        if getattr(spec, name) is not None and name != spec.task_kind.section:
            tasks = " or ".join(task for task, facts in TASKS.items() if facts.section == name)
            message = f"the section has no effect with task {spec.task}; set task: {tasks}, or leave it out"
            yield finding(name, message, "task")
    yield from _train_on(spec)
    if spec.task_kind.whole and spec.train.label_smoothing > 0:
        message = f"smooths the next-token loss, not the loss of {spec.task_kind.unit}s; "
        has_own = own is not None and "label_smoothing" in type(own).model_fields
        message += f"use {spec.own_key('label_smoothing')}" if has_own else "leave it out"
        yield value_finding(spec, "train.label_smoothing", message, "task")
    if isinstance(own, Reference) and own.is_initial_policy:
        yield from _policy_is_not_its_reference(spec)
    if getattr(own, "share_prompts", None):
        yield from _cannot_share(spec)
    if isinstance(own, Dpo):
        yield from _dpo(spec, own)
    if isinstance(own, Distill):
        yield from _distill(spec, own)
    if isinstance(own, Classify):
        yield from _classify(spec, own)
    if isinstance(own, Kto) and own.has_baseline and spec.train.global_batch_size == 1:
        message = "has no second row, whose answer loss_type kto needs; raise it, or use apo_zero_unpaired"
        yield value_finding(spec, "train.global_batch_size", message, "kto.loss_type")
    if spec.reference is not None:
        if spec.reference.reference == "adapter":
            yield from _adapter(spec, spec.reference)
        else:
            yield from _own_reference(spec, spec.reference)


def _train_on(spec: Spec) -> Iterator[Finding]:
    kind, message = spec.task_kind, ""
    if kind.train_on and spec.data.train_on == "last":
        message = f"has no effect with task {spec.task}, which trains on the label of a row; leave it out"
    elif kind.whole and kind.answers and spec.data.train_on == "all":
        why = "which is the same for both answers" if kind.rows > 1 else "which is no part of the answer"
        message = f"would also train on the prompt, {why}; use assistant or last"
    if message:
        yield value_finding(spec, "data.train_on", message, "task")


def _policy_is_not_its_reference(spec: Spec) -> Iterator[Finding]:
    """Check for keys that make the policy differ from its reference before it has learned anything."""
    if spec.train.neftune_alpha is not None:
        message = "would add noise to the policy but not to its reference; leave it out"
        yield value_finding(spec, "train.neftune_alpha", message, "task")
    if spec.model.lora is not None and spec.model.lora.dropout > 0:
        message = "would change the policy but not its reference; set it to 0"
        yield value_finding(spec, "model.lora.dropout", message, "task")


def _dpo(spec: Spec, dpo: Dpo) -> Iterator[Finding]:
    """Check that no key is set that belongs to another loss."""
    loss, no_effect = dpo.loss, f"has no effect with loss_type {dpo.loss_type}, "
    smooth = " and ".join(name for name, other in PREFERENCE_LOSSES.items() if other.smooths)
    term = f"cannot be combined with loss_type {dpo.loss_type}, which already has this term with weight "
    for keys, is_unused, reason in (
        (("label_smoothing",), not loss.smooths, f"{no_effect}only with {smooth}"),
        (("simpo_gamma",), dpo.loss_type != "simpo", f"{no_effect}only with simpo"),
        (("sft_weight",), loss.nll_weight, f"{term}{loss.nll_weight:g}"),
        (Reference.model_fields, not loss.reference, f"{no_effect}which needs no reference"),
    ):
        if is_unused:
            yield from _unused(spec, dpo, keys, "loss_type", reason)


def _cannot_share(spec: Spec) -> Iterator[Finding]:
    """Check that answers can share their prompt."""
    for key, possible in (("data.packing", (True,)), ("model.attention", SHARING)):
        value, needed = value_at(spec, key), " or ".join(str(one).lower() for one in possible)
        if value not in possible:
            message = f"true needs {key} {needed}, but it is {quote(value)}; change it, or leave this out"
            yield finding(spec.own_key("share_prompts"), message, key)


def _classify(spec: Spec, own: Classify) -> Iterator[Finding]:
    if len(own.labels) < 2 or len(set(own.labels)) < len(own.labels) or "" in own.labels:
        message = "must be names of at least two different labels, in the order of the model's scores"
        yield value_finding(spec, "classify.labels", message, "task")


def _distill(spec: Spec, own: Distill) -> Iterator[Finding]:
    if own.reference_model is None:
        message = "null, but a teacher is needed; set it to the teacher's hub id or folder"
        yield finding("distill.reference_model", message, "task")
    if own.loss_type != "jsd":
        reason = f"has no effect with loss_type {own.loss_type}, only with jsd"
        yield from _unused(spec, own, ("beta",), "loss_type", reason)


def _adapter(spec: Spec, own: Reference) -> Iterator[Finding]:
    key = spec.own_key("reference")
    if spec.model.lora is None:
        message = "needs model.lora, since its reference is the policy without the adapter; use precomputed"
        yield value_finding(spec, key, message, "model.lora")
    if spec.parallel.offload_parameters.device == "nvme":
        message = f"does not work with {key} adapter, which exchanges the adapter's values with the initial "
        message += f"ones in memory; set {key} to live or precomputed, or the device to cpu"
        yield value_finding(spec, "parallel.offload_parameters.device", message, key)
    reason = "has no effect with reference adapter, whose reference is the policy without its adapter"
    yield from _unused(spec, own, (*_OF_REFERENCE[1:], *_OF_STORE), "reference", reason)


def _own_reference(spec: Spec, own: Reference) -> Iterator[Finding]:
    """Check the keys of a reference with its own engine, before training (precomputed) or during it
    (live)."""
    lora = spec.model.lora if own.reference_model is None else None  # another model has bits of its own
    if spec.model.quantize is not None and lora is not None and lora.modules_to_save and lora.path is None:
        key, saved = spec.own_key("reference"), "model.lora.modules_to_save"
        message = (
            f"with {saved} is not supported with {key} {own.reference}, which would quantize these modules "
        )
        message += "too; set that to adapter, or leave one of these out"
        yield value_finding(spec, "model.quantize", message, key, saved)
    if own.reference_model is None and own.is_initial_policy:
        reason = "has no effect without reference_model, since the start is stored as model.quantize says"
        yield from _unused(spec, own, ("reference_quantize",), "reference_model", reason)
    if own.reference == "live":
        reason = "has no effect with reference live, which stores nothing"
        yield from _unused(spec, own, _OF_STORE, "reference", reason)
    stage = spec.parallel.zero_stage if own.reference_zero_stage is None else own.reference_zero_stage
    if own.reference == "live" and spec.parallel.pipeline_stages > 1:
        reason = "has no effect on a live reference in a pipeline, which is cut into the policy's stages"
        yield from _unused(spec, own, ("reference_zero_stage", "reference_offload"), "reference", reason)
    elif own.reference_offload == "cpu" and stage != 3:
        message = "needs a sharded reference; set reference_zero_stage: 3, or leave it out"
        reads = (spec.own_key("reference_zero_stage"), "parallel.zero_stage")
        yield value_finding(spec, spec.own_key("reference_offload"), message, *reads)


def _unused(spec: Spec, own: Reference, keys: Iterable[str], other: str, reason: str) -> Iterator[Finding]:
    """Yield a finding for each of these keys of the task's section that does not have its default."""
    for key in keys:
        value = getattr(own, key)
        if value != type(own).model_fields[key].default:
            yield finding(spec.own_key(key), f"{quote(value)} {reason}; leave it out", spec.own_key(other))
