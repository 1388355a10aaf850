"""Find the layouts that fit with fewer bits, which changes the results: adapters on weights in 4 bits, and
AdamW's moments in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsft.errors import DsftError
from dsft.plan.build import Plan
from dsft.plan.census import census
from dsft.plan.compare import Candidate, changed, fitting_in_memory
from dsft.spec.document import dotted
from dsft.spec.load import refusals

_OFFLOAD = ("parallel.offload_optimizer.device", "parallel.offload_parameters.device")


@dataclass(frozen=True)
class Smaller:
    """What a change of one key gives. fitting: the layouts that fit with it, without offload, in the order to
    try them, whose overrides have it first; refused: why it is impossible, empty where it is not."""

    title: str
    change: str
    fitting: tuple[Candidate, ...] = ()
    refused: str = ""


def smaller(plan: Plan) -> Smaller | None:
    """Evaluate the layouts of a plan with adapters on weights in 4 bits, or of one without adapters with
    moments in 8 bits; None where the spec has these or no AdamW."""
    spec = plan.spec
    title, key, value = "AdamW's moments in 8 bits", "optim.name", spec.optim.facts.smaller
    if spec.model.lora:
        title, key, value = "weights in 4 bits", "model.quantize", "nf4"
    if spec.model.quantize or value is None:
        return None
    change = f"{key}={value}"
    other = changed(spec, {key: value})
    in_memory = changed(other, dict.fromkeys(_OFFLOAD, "none"))
    for finding in refusals(in_memory):
        if dotted(finding.path) == key:
            return Smaller(title, change, refused=f"{key} {finding.message}")
    try:
        counted = census(other.model) if spec.model.lora else plan.census
    except DsftError as error:
        return Smaller(title, change, refused=str(error))
    same = plan.reference_census is plan.census
    reference = counted if same else plan.reference_census
    found = fitting_in_memory(replace(plan, spec=other, census=counted, reference_census=reference))
    return Smaller(title, change, tuple(replace(one, overrides=(change, *one.overrides)) for one in found))
