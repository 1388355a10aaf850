"""Check the keys of task dpo against each other, and decide whether the answers of a pair share their
prompt."""

from __future__ import annotations

from collections.abc import Iterator

from dsft.spec.document import quote
from dsft.spec.findings import Finding, finding, value_at, value_finding
from dsft.spec.schema import Dpo, Spec

REFERENCE_FREE = ("simpo", "orpo")
"""Losses without a reference."""
SMOOTHED = ("sigmoid", "robust")
_OF_REFERENCE = ("reference", "reference_model", "reference_zero_stage", "reference_offload")
_OF_STORE = ("reference_store", "recheck_rows")
SHARING = ("auto", "sdpa")
"""Values of model.attention with which the second answer of a packed pair can attend to the prompt of the
first."""


def shares_prompts(spec: Spec) -> bool:
    """Return whether the prompt of a pair is computed once for both answers."""
    is_off = spec.dpo is not None and spec.dpo.share_prompts is False
    is_possible = spec.task_kind.preference and spec.data.packing and spec.model.attention in SHARING
    return is_possible and not is_off


def preference_findings(spec: Spec) -> Iterator[Finding]:
    if not spec.task_kind.preference:
        if spec.dpo is not None:
            message = f"the section has no effect with task {spec.task}; set task: dpo, or leave it out"
            yield finding("dpo", message, "task")
        return
    dpo = spec.dpo or Dpo()
    if spec.data.train_on == "all":
        message = "would also train on the prompt, which is the same for both answers; use assistant or last"
        yield value_finding(spec, "data.train_on", message, "task")
    yield from _policy_is_not_its_reference(spec)
    yield from _loss(dpo)
    if dpo.loss_type in REFERENCE_FREE:
        reason = f"has no effect with loss_type {dpo.loss_type}, which needs no reference"
        yield from _unused(dpo, (*_OF_REFERENCE, *_OF_STORE), "loss_type", reason)
    elif dpo.reference == "adapter":
        yield from _adapter(spec, dpo)
    else:
        yield from _own_reference(spec, dpo)
    if dpo.share_prompts:
        for key, possible in (("data.packing", (True,)), ("model.attention", SHARING)):
            value, needed = value_at(spec, key), " or ".join(str(one).lower() for one in possible)
            if value not in possible:
                message = f"true needs {key} {needed}, but it is {quote(value)}; change it, or leave this out"
                yield finding("dpo.share_prompts", message, key)


def _policy_is_not_its_reference(spec: Spec) -> Iterator[Finding]:
    """Check for keys that make the policy differ from its reference before it has learned anything, and for
    smoothing of the next-token loss."""
    if spec.train.neftune_alpha is not None:
        message = "would add noise to the policy but not to its reference; leave it out"
        yield value_finding(spec, "train.neftune_alpha", message, "task")
    if spec.model.lora is not None and spec.model.lora.dropout > 0:
        message = "would change the policy but not its reference; set it to 0"
        yield value_finding(spec, "model.lora.dropout", message, "task")
    if spec.train.label_smoothing > 0:
        message = "smooths the next-token loss, not the loss of pairs; use dpo.label_smoothing"
        yield value_finding(spec, "train.label_smoothing", message, "task")


def _loss(dpo: Dpo) -> Iterator[Finding]:
    """Check that no key is set that belongs to another loss."""
    if dpo.loss_type not in SMOOTHED:
        reason = f"has no effect with loss_type {dpo.loss_type}, only with {' and '.join(SMOOTHED)}"
        yield from _unused(dpo, ("label_smoothing",), "loss_type", reason)
    if dpo.loss_type != "simpo":
        reason = f"has no effect with loss_type {dpo.loss_type}, only with simpo"
        yield from _unused(dpo, ("simpo_gamma",), "loss_type", reason)
    if dpo.loss_type == "orpo":
        reason = "cannot be combined with loss_type orpo, which already has this term with weight 1"
        yield from _unused(dpo, ("sft_weight",), "loss_type", reason)


def _adapter(spec: Spec, dpo: Dpo) -> Iterator[Finding]:
    if spec.model.lora is None:
        message = "needs model.lora, since its reference is the policy without the adapter; use precomputed"
        yield value_finding(spec, "dpo.reference", message, "model.lora")
    reason = "has no effect with reference adapter, whose reference is the policy without its adapter"
    yield from _unused(dpo, (*_OF_REFERENCE[1:], *_OF_STORE), "reference", reason)


def _own_reference(spec: Spec, dpo: Dpo) -> Iterator[Finding]:
    """Check the keys of a reference with its own engine, before training (precomputed) or during it
    (live)."""
    if dpo.reference == "live":
        reason = "has no effect with reference live, which stores nothing"
        yield from _unused(dpo, _OF_STORE, "reference", reason)
    stage = spec.parallel.zero_stage if dpo.reference_zero_stage is None else dpo.reference_zero_stage
    if dpo.reference == "live" and spec.parallel.pipeline_stages > 1:
        reason = "has no effect on a live reference in a pipeline, which is cut into the policy's stages"
        yield from _unused(dpo, ("reference_zero_stage", "reference_offload"), "reference", reason)
    elif dpo.reference_offload == "cpu" and stage != 3:
        message = "needs a sharded reference; set reference_zero_stage: 3, or leave it out"
        reads = ("dpo.reference_zero_stage", "parallel.zero_stage")
        yield value_finding(spec, "dpo.reference_offload", message, *reads)


def _unused(dpo: Dpo, keys: tuple[str, ...], other: str, reason: str) -> Iterator[Finding]:
    """Yield a finding for each of these keys that does not have its default."""
    for key in keys:
        value = getattr(dpo, key)
        if value != Dpo.model_fields[key].default:
            yield finding(f"dpo.{key}", f"{quote(value)} {reason}; leave it out", f"dpo.{other}")
