"""The table of DeepSpeed's keys and values against the installed DeepSpeed: a mapping that records every key
asked of it is given to DeepSpeed's own parser, its pydantic sections are asked for their fields and bounds,
and its source for removed keys."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsft.plan.config_file import FIXED, SPEC_DECIDES
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_keys import ANY, KEYS, REMOVED, SIZE, problems
from dsft.spec.not_offered import in_json

deepspeed = pytest.importorskip("deepspeed")


class Recording(dict[str, Any]):
    """A mapping that notes the dotted name of each key that is asked for, also below."""

    def __init__(self, values: dict[str, Any], seen: set[str], prefix: str = "") -> None:
        self.seen, self.prefix = seen, prefix
        wrapped = {
            k: Recording(v, seen, f"{prefix}{k}.") if isinstance(v, dict) else v for k, v in values.items()
        }
        super().__init__(wrapped)

    def note(self, key: object) -> None:
        self.seen.add(f"{self.prefix}{key}")

    def __getitem__(self, key: str) -> Any:
        self.note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.note(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return RecordingKeys(self)

    def __copy__(self) -> Recording:
        copy = Recording({}, self.seen, self.prefix)
        dict.update(copy, self)
        return copy


class RecordingKeys(Iterable[str]):
    def __init__(self, mapping: Recording) -> None:
        self.mapping = mapping

    def __iter__(self) -> Iterator[str]:
        return iter(list(dict.keys(self.mapping)))

    def __contains__(self, key: object) -> bool:
        return key in self.mapping


LAX = (  # sections that DeepSpeed reads key by key, and says nothing about the others
    "optimizer scheduler torch_autocast data_types aio activation_checkpointing checkpoint flops_profiler "
    "timers"
).split()


def keys_deepspeed_reads() -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    values: dict[str, Any] = {name: {} for name in LAX}
    values |= {"optimizer": {"type": "x"}, "scheduler": {"type": "x"}, "train_micro_batch_size_per_gpu": 1}
    values["torch_autocast"] = {"dtype": "bf16"}
    values["checkpoint"] = {"writer": {}, "parallel_write": {}}
    seen: set[str] = set()
    DeepSpeedConfig(Recording(values, seen))
    initialize = inspect.getsource(deepspeed.initialize)
    seen |= set(re.findall(r'config(?:\[|\.get\()"(\w+)"', initialize))
    return seen


def read_in(section: str) -> set[str]:
    names = (
        key.removeprefix(f"{section}.") for key in keys_deepspeed_reads() if key.startswith(f"{section}.")
    )
    return {name for name in names if "." not in name}


def fields(model: Any) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def listed(section: str = "") -> set[str]:
    """Return the keys and sections directly below a section that the table has."""
    prefix = f"{section}." if section else ""
    below = (key.removeprefix(prefix) for key in KEYS if key.startswith(prefix))
    return {key.partition(".")[0] for key in below}


def test_the_top_level_is_what_deepspeed_reads() -> None:
    read = {key for key in keys_deepspeed_reads() if "." not in key}
    assert listed() | {key for key in REMOVED if "." not in key} == read


@pytest.mark.parametrize("section", [*LAX, "checkpoint.writer", "checkpoint.parallel_write"])
def test_the_sections_without_a_schema_are_what_deepspeed_reads(section: str) -> None:
    assert listed(section) == read_in(section)


def test_the_pipeline_section_is_what_deepspeed_reads() -> None:
    from deepspeed.runtime import config
    from deepspeed.runtime.pipe import engine

    defaults = set(config.get_pipeline_config({}))
    used = set(re.findall(r"_config\.pipeline(?:\.get\(|\[)'(\w+)'", inspect.getsource(engine)))
    assert listed("pipeline") == defaults | used


def test_the_sections_with_a_schema_have_its_fields() -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    deprecated = {
        key.removeprefix("zero_optimization.") for key in REMOVED if key.startswith("zero_optimization.")
    }
    assert listed("zero_optimization") == fields(DeepSpeedZeroConfig) - deprecated
    for section, model in (
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
        ("zero_optimization.leaf_module", DeepSpeedZeroLeafModuleConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
        ("comms_logger", CommsLoggerConfig),
        ("timers.throughput", DeepSpeedThroughputTimerConfig),
    ):
        assert listed(section) == fields(model)


def test_the_removed_keys_are_those_that_deepspeed_refuses() -> None:
    from deepspeed.runtime import config

    tree = ast.parse(Path(config.__file__).read_text())
    tables = {
        target.id: set(ast.literal_eval(ast.Tuple([k for k in node.value.keys if k], ast.Load())))
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.startswith("_REMOVED")
    }
    assert {key for key in REMOVED if "." not in key} == tables["_REMOVED_TOP_LEVEL_CONFIG_KEYS"]
    below = {f"zero_optimization.{key}" for key in tables["_REMOVED_ZERO_CONFIG_KEYS"]}
    assert below <= set(REMOVED)


def test_unknown_and_removed_keys_are_named() -> None:
    config = {
        "zero_optimisation": {"stage": 3},
        "elasticity": {},
        "zero_optimization": {"stages": 3, "foo": 1, "offload_optimizer": {"devise": "cpu"}},
        "aio": {"thread_count": 1, "num_threads": 1},
        "xyzzy": 1,
        "zero_optimization.stage": 3,
        "optimizer": {"type": "AdamW", "params": {"whatever": 1}},
    }
    assert [f"{key}: {clause}" for key, clause in problems(config)] == [
        "zero_optimisation: DeepSpeed does not know this key; did you mean zero_optimization?",
        "elasticity: DeepSpeed has removed this feature; leave it out",
        "zero_optimization.stages: DeepSpeed does not know this key; did you mean zero_optimization.stage?",
        "zero_optimization.foo: DeepSpeed does not know this key; leave it out",
        "zero_optimization.offload_optimizer.devise: DeepSpeed does not know this key; did you mean "
        "zero_optimization.offload_optimizer.device?",
        "aio.thread_count: DeepSpeed calls it intra_op_parallelism; write that, or leave it out",
        "aio.num_threads: DeepSpeed calls it intra_op_parallelism; write that, or leave it out",
        "xyzzy: DeepSpeed does not know this key; leave it out",
        "zero_optimization.stage: DeepSpeed does not know this key; sections are nested, {…}",
    ]


VARIANTS = [
    {
        "train": {"precision": precision},
        "parallel": {"zero_stage": stage, "pipeline_stages": stages, **offload},
    }
    for precision, stage, stages, offload in itertools.product(
        ("fp32", "bf16"), range(4), (1, 2), ({}, {"offload_optimizer": {"device": "cpu"}})
    )
]


def test_every_key_that_dsft_writes_is_known(make_spec: Any) -> None:
    for sections in VARIANTS:
        assert list(problems(deepspeed_config(make_spec(**sections), None))) == []


def nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


def test_every_key_that_is_passed_on_has_a_rule() -> None:
    compared = {*SPEC_DECIDES, "bfloat16"}
    passed_on = {key for key in KEYS if key.partition(".")[0] not in compared and key not in FIXED}
    unchecked = {key for key in passed_on if KEYS[key] is ANY and not list(in_json(nested(key, 7)))}
    assert unchecked == {"communication_data_type"}


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
            rule = KEYS.get(f"{section}.{field.alias or name}")
            if rule in (None, ANY):
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


@pytest.mark.parametrize(
    "key", [key for key, rule in KEYS.items() if rule is not ANY and key != "optimizer.params"]
)
def test_what_has_no_fault_is_taken_by_deepspeed(key: str) -> None:
    """By its parser; the rules of single keys alone."""
    from deepspeed.runtime.config import DeepSpeedConfig

    taken = [value for value in ODD if not list(problems(nested(key, value)))]
    for value in taken:
        DeepSpeedConfig({"train_batch_size": 1} | nested(key, value))
    assert len(taken) < len(ODD)


def test_values_that_are_a_size() -> None:
    wrong = [0, -5, 0.5, math.inf, math.nan, True, "5", [5], {"a": 5}, 2**63, 1e300, 10**400]
    assert [value for value in wrong if SIZE.holds(value)] == []
    assert all(map(SIZE.holds, [1, 5e8, 2**63 - 1]))


def test_a_long_value_is_cut_short() -> None:
    [(key, clause)] = problems({"zero_optimization": {"stage": "x" * 500}})
    assert key == "zero_optimization.stage" and len(clause) < 160


def test_null_and_auto_are_left_to_the_merge() -> None:
    assert not list(problems({"steps_per_print": None, "zero_optimization": {"stage": "auto"}}))
