"""The reference as a frozen engine of its own: takes a spec, tokenizer facts and a world; reads weights.

Each rank reads and keeps what it holds of them, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsft.engine.frozen import Frozen, build_frozen
from dsft.engine.partition import keep_for
from dsft.engine.world import World
from dsft.model.attention import attend_per_segment
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.plan.ds_config import Elements
from dsft.plan.reference import reference_model
from dsft.plan.reference_config import reference_config
from dsft.spec.schema import Spec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Reference:
    """policy: this rank's part of the module, for proofs; engine: scores, until it is closed."""

    policy: Policy
    engine: Frozen


def open_reference(
    spec: Spec, facts: TokenFacts, world: World, elements: Elements | None = None
) -> Reference:
    """A collective. `world`: of the policy (live) or of the pass's own processes, laid out as
    `reference_layout` says; `elements`: of the reference, where they are known. Raises as `build_model`."""
    model, config = reference_model(spec), reference_config(spec, elements)
    keep, stages = keep_for(config, world), world.layout.pipeline_stages

    def part() -> Policy:
        dtype = DTYPES[spec.train.precision]
        policy = build_model(model, facts, spec.train.seed, dtype, world.stage, stages, keep)
        if spec.data.packing:
            attend_per_segment(policy.causal_lm, model.attention, spec.data.max_length)
        return policy

    policy = world.each(part)
    return Reference(policy, build_frozen(policy, config, world))
