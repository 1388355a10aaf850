"""Check the keys of task dpo against each other, and decide whether the answers of a pair share their
prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsft.spec.document import Finding, quote
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
    asked = spec.dpo.share_prompts if spec.dpo is not None else None
    can = spec.task_kind.rows == 2 and spec.data.packing and spec.model.attention in SHARING
    return can and asked is not False


def preference_findings(spec: Spec) -> Iterator[Finding]:
    if not spec.task_kind.preference:
        if spec.dpo is not None:
            message = f"the section has no effect on task {spec.task}; set task: dpo, or leave it out"
            yield Finding(("dpo",), message, ("dpo", "task"))
        return
    dpo = spec.dpo or Dpo()
    if spec.data.train_on == "all":
        message = "'all' trains on the prompt, which is the same for both answers; use assistant or last"
        yield Finding(("data", "train_on"), message, ("data.train_on", "task"))
    yield from _policy_is_not_its_reference(spec)
    yield from _loss(dpo)
    if dpo.loss_type in REFERENCE_FREE:
        reason = f"has no effect with loss_type {dpo.loss_type}, which needs no reference"
        yield from _unused(dpo, (*_OF_REFERENCE, *_OF_STORE), "loss_type", reason)
    elif dpo.reference == "adapter":
        yield from _adapter(spec, dpo)
    else:
        yield from _own_reference(spec, dpo)
    yield from _share_prompts(spec, dpo)


def _policy_is_not_its_reference(spec: Spec) -> Iterator[Finding]:
    """Check for keys that make the policy differ from its reference before it has learned anything, and for
    smoothing of the next-token loss."""
    reads = ("task",)
    if spec.train.neftune_alpha is not None:
        message = (
            f"{spec.train.neftune_alpha} adds noise to the policy and not to its reference; leave it out"
        )
        yield Finding(("train", "neftune_alpha"), message, (*reads, "train.neftune_alpha"))
    if spec.model.lora is not None and spec.model.lora.dropout > 0:
        message = f"{spec.model.lora.dropout} changes the policy and not its reference; set it to 0"
        yield Finding(("model", "lora", "dropout"), message, (*reads, "model.lora.dropout"))
    if spec.train.label_smoothing > 0:
        message = f"{spec.train.label_smoothing} is of the next-token loss; use dpo.label_smoothing for pairs"
        yield Finding(("train", "label_smoothing"), message, (*reads, "train.label_smoothing"))


def _loss(dpo: Dpo) -> Iterator[Finding]:
    """Check that no key is set that belongs to another loss."""
    if dpo.loss_type not in SMOOTHED:
        reason = f"has no effect with loss_type {dpo.loss_type}, only with {' and '.join(SMOOTHED)}"
        yield from _unused(dpo, ("label_smoothing",), "loss_type", reason)
    if dpo.loss_type != "simpo":
        reason = f"has no effect with loss_type {dpo.loss_type}, only with simpo"
        yield from _unused(dpo, ("simpo_gamma",), "loss_type", reason)
    if dpo.loss_type == "orpo":
        reason = "stands beside loss_type orpo, which has that term already, with weight 1"
        yield from _unused(dpo, ("sft_weight",), "loss_type", reason)


def _adapter(spec: Spec, dpo: Dpo) -> Iterator[Finding]:
    if spec.model.lora is None:
        message = (
            "'adapter' needs model.lora: its reference is the policy with the adapter off; use precomputed"
        )
        yield Finding(("dpo", "reference"), message, ("dpo.reference", "model.lora"))
    reason = "has no effect with reference adapter, whose reference is the policy with its adapter off"
    yield from _unused(dpo, (*_OF_REFERENCE[1:], *_OF_STORE), "reference", reason)


def _own_reference(spec: Spec, dpo: Dpo) -> Iterator[Finding]:
    """Check the keys of a reference with its own engine, before training (precomputed) or during it
    (live)."""
    if dpo.reference == "live":
        yield from _unused(
            dpo, _OF_STORE, "reference", "has no effect with reference live, which has no store"
        )
    stage = dpo.reference_zero_stage
    if dpo.reference == "live" and spec.parallel.pipeline_stages > 1:
        reason = "has no effect where a live reference stands in the policy's pipeline stages"
        yield from _unused(dpo, ("reference_zero_stage", "reference_offload"), "reference", reason)
    elif dpo.reference_offload == "cpu" and (spec.parallel.zero_stage if stage is None else stage) != 3:
        message = "'cpu' needs a sharded reference; set reference_zero_stage: 3, or leave it out"
        reads = ("dpo.reference_offload", "dpo.reference_zero_stage", "parallel.zero_stage")
        yield Finding(("dpo", "reference_offload"), message, reads)


def _share_prompts(spec: Spec, dpo: Dpo) -> Iterator[Finding]:
    if not dpo.share_prompts:
        return
    for key, value, possible in (
        ("data.packing", spec.data.packing, (True,)),
        ("model.attention", spec.model.attention, SHARING),
    ):
        if value not in possible:
            needed = " or ".join(str(one).lower() for one in possible)
            message = f"true needs {key} {needed}, and it is {quote(value)}; change it, or leave this out"
            yield Finding(("dpo", "share_prompts"), message, ("dpo.share_prompts", key))


def _unused(dpo: Dpo, keys: tuple[str, ...], other: str, reason: str) -> Iterator[Finding]:
    """Yield a finding for each of these keys that does not have its default."""
    for key in keys:
        value: Any = getattr(dpo, key)
        if value != Dpo.model_fields[key].default:
            message = f"{quote(value)} {reason}; leave it out"
            yield Finding(("dpo", key), message, (f"dpo.{key}", f"dpo.{other}"))
