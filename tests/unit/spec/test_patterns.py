"""Patterns of parameter names, and which group a parameter belongs to."""

from dsft.spec.patterns import group_of, group_problems, no_match, unmatched
from dsft.spec.schema import Optim, OptimGroup

NAMES = [
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.10.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def optim(*patterns: str) -> Optim:
    return Optim(
        learning_rate=1.0, groups=tuple(OptimGroup(parameters=p, learning_rate=2.0) for p in patterns)
    )


def test_the_first_group_that_fits_has_the_parameter() -> None:
    groups = optim("model.layers.1?.*", "*.mlp.*", "lm_head.weight")
    assert [group_of(name, groups) for name in NAMES] == [1, 0, None, 2]
    assert group_problems(groups, NAMES) == []


def test_a_group_without_a_parameter_is_reported() -> None:
    problems = group_problems(optim("*.mlp.*", "model.layers.1?.*", "LM_head.*"), NAMES)
    assert [problem.where for problem in problems] == [
        "optim.groups.2.parameters",
        "optim.groups.1.parameters",
    ]
    assert "matches only parameters of earlier groups" in problems[1].message


def test_a_pattern_is_of_the_whole_name_and_near_names_are_proposed() -> None:
    found = list(unmatched("model.trainable.{}", ["*", "mlp.*", "lm_head"], NAMES))
    assert [problem.where for problem in found] == ["model.trainable.1", "model.trainable.2"]
    assert f"such as {NAMES[0]}, {NAMES[1]}" in found[0].message
    assert "such as lm_head.weight" in found[1].message
    assert "such as lm_head.weight" in no_match("lm_haed.weight", NAMES)
