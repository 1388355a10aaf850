"""Build the engine of a run, for ZeRO or for a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsft.dist.world import World
from dsft.engine.api import Engine
from dsft.engine.optimizer import check_groups
from dsft.engine.pipeline import PipelineEngine
from dsft.engine.zero import ZeroEngine
from dsft.model.policy import Policy
from dsft.objective.api import Objective
from dsft.spec.schema import Spec


def build_engine(
    policy: Policy, spec: Spec, config: Mapping[str, Any], world: World, objective: Objective
) -> Engine:
    """Build the engine. A collective. `policy` is the stage `world.stage` of `world.layout.pipeline_stages`.

    Raises SpecError where its parameter groups cannot be stepped.
    """
    check_groups(policy.named_trained(), spec, world)
    policy.set_loss(objective.uniform, objective.label_smoothing, objective.temperature)
    kind = PipelineEngine if world.layout.pipeline_stages > 1 else ZeroEngine
    return kind(policy, spec, config, world, objective)
