"""Groups of parameters: their rates and decay, and stages of a pipeline that cannot be stepped together."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dsft.engine.optimizer import check_groups, parameter_groups
from dsft.errors import SpecError
from dsft.spec.layout import Layout
from dsft.spec.schema import Optim, OptimGroup, Spec
from tests.specs import minimal_spec

TRAINED = {
    "model.layers.0.up_proj.weight": nn.Parameter(torch.zeros(2, 2)),
    "model.layers.0.norm.weight": nn.Parameter(torch.zeros(2)),
}
HEAD = {"lm_head.weight": nn.Parameter(torch.zeros(2, 2))}


@dataclass(frozen=True)
class TwoStages:
    """This rank is the first stage; the other one sends `other`."""

    other: Any
    layout: Layout = Layout(2, 2)

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self.other]


def spec(zero_stage: int, *groups: OptimGroup) -> Spec:
    return minimal_spec(
        data={"train": [{"path": "a.jsonl"}]},
        parallel={"zero_stage": zero_stage, "pipeline_stages": 2},
        optim={"learning_rate": 2.0, "groups": [group.model_dump() for group in groups]},
    )


def test_first_matching_group_wins_and_only_matrices_decay() -> None:
    groups = (
        OptimGroup(parameters="lm_head.*", learning_rate=1.0),
        OptimGroup(parameters="*norm.weight", weight_decay=0.5),
        OptimGroup(parameters="*.weight", learning_rate=4.0, weight_decay=0.0),
    )
    made = list(parameter_groups(TRAINED | HEAD, Optim(learning_rate=2.0, weight_decay=0.1, groups=groups)))
    found = {id(p): (g["lr"], g["rate"], g["weight_decay"]) for g in made for p in g["params"]}
    assert [found[id(p)] for p in (TRAINED | HEAD).values()] == [
        (4.0, 2.0, 0.0),
        (2.0, 1.0, 0.5),
        (1.0, 0.5, 0.1),
    ]
    assert len(list(parameter_groups(TRAINED | HEAD, Optim(learning_rate=2.0, weight_decay=0.1)))) == 2


def test_biases_of_experts_and_norms_of_heads_do_not_decay() -> None:
    named = {
        name: nn.Parameter(torch.zeros(2, 2))
        for name in ("mlp.experts.down_proj", "mlp.experts.down_proj_bias", "self_attn.q_norm.weight")
    }
    made = parameter_groups(named, Optim(learning_rate=2.0, weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in made for p in group["params"]}
    assert [decays[id(p)] for p in named.values()] == [0.1, 0.0, 0.0]


def test_stages_with_other_numbers_of_groups_are_refused_under_zero_1() -> None:
    world: Any = TwoStages((["lm_head.weight"], 1))
    check_groups(TRAINED, spec(0), world)
    group = OptimGroup(parameters="*norm.weight", learning_rate=1.0)
    check_groups(TRAINED, spec(0, group), world)
    with pytest.raises(
        SpecError, match="the stages have 2 and 1 parameter groups .*the same number in every stage"
    ):
        check_groups(TRAINED, spec(1, group), world)


def test_empty_stage_and_unmatched_group_are_refused() -> None:
    with pytest.raises(SpecError, match="stage 1 has no trained parameter"):
        check_groups(TRAINED, spec(0), TwoStages(([], 0)))  # type: ignore[arg-type]
    nothing = OptimGroup(parameters="lm_hed.*", learning_rate=1.0)
    with pytest.raises(SpecError, match=r"optim\.groups\.0\.parameters: 'lm_hed\.\*' matches no name"):
        check_groups(TRAINED, spec(0, nothing), TwoStages((["lm_head.weight"], 1)))  # type: ignore[arg-type]
