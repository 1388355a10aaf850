"""The table of values against the installed DeepSpeed: all keys that are passed on are in it, as strictly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from dsft.plan.config_file import FIXED, SPEC_DECIDES, WITHOUT_EFFECT
from dsft.plan.ds_keys import KEYS, Section
from dsft.plan.ds_values import RULES, SIZE, wrong_values
from dsft.spec.not_offered import in_json

deepspeed = pytest.importorskip("deepspeed")


def leaves(section: Section, prefix: str = "") -> Iterator[str]:
    for key, below in section.items():
        yield from [f"{prefix}{key}"] if below is None else leaves(below, f"{prefix}{key}.")


def nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_every_key_that_is_passed_on_has_a_rule() -> None:
    compared = {*SPEC_DECIDES, *WITHOUT_EFFECT, "optimizer", "scheduler", "bfloat16"}
    refused = {key for key in leaves(KEYS) if list(in_json(nested(key, 7)))}
    passed_on = {key for key in leaves(KEYS) if key.partition(".")[0] not in compared} - refused - set(FIXED)
    assert passed_on - set(RULES) == {"communication_data_type"}
    assert set(RULES) <= set(leaves(KEYS))


def test_the_table_is_as_strict_as_deepspeeds_models() -> None:
    """Below a lower bound and above an upper one there is no value; each model's default is one."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    bounded = 0
    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
    ):
        for name, field in model.model_fields.items():
            rule = RULES.get(f"{section}.{field.alias or name}")
            if rule is None:
                continue
            if isinstance(field.default, bool | int | float):
                assert rule.holds(field.default), name
            for bound in field.metadata:
                outside = [bound.ge - 1] if hasattr(bound, "ge") else []
                outside += [bound.gt] if hasattr(bound, "gt") else []
                outside += [bound.le + 1] if hasattr(bound, "le") else []
                assert not any(map(rule.holds, outside)), name
                bounded += len(outside)
    assert bounded > 10


ODD: list[Any] = [
    -1, 0, 1, 2, 3, 0.5, 1.0, 5e8, 1e300, 2**63, 10**400, True, False, "", "x", "../../x", "fp32", "bfloat16",
    "info", [], ["x"], [3], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("key", [key for key in RULES if key != "optimizer.params"])
def test_what_has_no_fault_is_taken_by_deepspeed(key: str) -> None:
    """By its parser; the rules of single keys alone."""
    from deepspeed.runtime.config import DeepSpeedConfig

    taken = [value for value in ODD if not list(wrong_values(nested(key, value)))]
    for value in taken:
        DeepSpeedConfig({"train_batch_size": 1} | nested(key, value))
    assert len(taken) < len(ODD)


@pytest.mark.parametrize(
    "value", [0, -5, 0.5, math.inf, math.nan, True, "5", [5], {"a": 5}, 2**63, 1e300, 10**400]
)
def test_no_size(value: Any) -> None:
    assert not SIZE.holds(value)


@pytest.mark.parametrize("value", [1, 5e8, 2**63 - 1])
def test_a_size(value: Any) -> None:
    assert SIZE.holds(value)


def test_a_long_value_is_cut_short() -> None:
    [(key, clause)] = wrong_values({"zero_optimization": {"stage": "x" * 500}})
    assert key == "zero_optimization.stage" and len(clause) < 160


def test_null_and_auto_are_left_to_the_merge() -> None:
    assert not list(wrong_values({"steps_per_print": None, "zero_optimization": {"stage": "auto"}}))
