"""The closed list against what the installed DeepSpeed reads: a mapping that records every key asked of it is
given to DeepSpeed's own parser, its pydantic sections are asked for their fields, and its source for removed
keys."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_keys import KEYS, REMOVED, Section, unknown_keys

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


def test_the_top_level_is_what_deepspeed_reads() -> None:
    read = {key for key in keys_deepspeed_reads() if "." not in key}
    assert set(KEYS) | {key for key in REMOVED if "." not in key} == read


@pytest.mark.parametrize("section", [*LAX, "checkpoint.writer", "checkpoint.parallel_write"])
def test_the_sections_without_a_schema_are_what_deepspeed_reads(section: str) -> None:
    below: Section | None = KEYS
    for name in section.split("."):
        assert below is not None
        below = below[name]
    assert below is not None
    assert set(below) == read_in(section)


def test_the_pipeline_section_is_what_deepspeed_reads() -> None:
    from deepspeed.runtime import config
    from deepspeed.runtime.pipe import engine

    defaults = set(config.get_pipeline_config({}))
    used = set(re.findall(r"_config\.pipeline(?:\.get\(|\[)'(\w+)'", inspect.getsource(engine)))
    assert set(KEYS["pipeline"] or {}) == defaults | used


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

    zero = KEYS["zero_optimization"] or {}
    deprecated = {
        key.removeprefix("zero_optimization.") for key in REMOVED if key.startswith("zero_optimization.")
    }
    read = fields(DeepSpeedZeroConfig)
    assert set(zero) == read - deprecated
    for section, model in (
        (zero["offload_optimizer"], DeepSpeedZeroOffloadOptimizerConfig),
        (zero["offload_param"], DeepSpeedZeroOffloadParamConfig),
        (zero["leaf_module"], DeepSpeedZeroLeafModuleConfig),
        (KEYS["bf16"], DeepSpeedBF16Config),
        (KEYS["fp16"], DeepSpeedFP16Config),
        (KEYS["comms_logger"], CommsLoggerConfig),
        ((KEYS["timers"] or {})["throughput"], DeepSpeedThroughputTimerConfig),
    ):
        assert set(section or {}) == fields(model)


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
        "zero_optimization": {"stages": 3, "offload_optimizer": {"devise": "cpu"}},
        "aio": {"thread_count": 1, "num_threads": 1},
        "xyzzy": 1,
        "optimizer": {"type": "AdamW", "params": {"whatever": 1}},
    }
    assert unknown_keys(config) == [
        "zero_optimisation: DeepSpeed does not know this key; did you mean zero_optimization?",
        "elasticity: DeepSpeed has removed this feature; leave it out",
        "zero_optimization.stages: DeepSpeed does not know this key; did you mean zero_optimization.stage?",
        "zero_optimization.offload_optimizer.devise: DeepSpeed does not know this key; did you mean "
        "zero_optimization.offload_optimizer.device?",
        "aio.thread_count: DeepSpeed calls it intra_op_parallelism; write that, or leave it out",
        "aio.num_threads: DeepSpeed calls it intra_op_parallelism; write that, or leave it out",
        "xyzzy: DeepSpeed does not know this key; leave it out",
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
        assert unknown_keys(deepspeed_config(make_spec(**sections), None)) == []
