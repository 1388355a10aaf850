import itertools
from typing import Any

import pytest

from dsft.spec.findings import value_at
from dsft.spec.rules import RULES, Rule, rule_findings, warnings
from dsft.spec.schema import Spec
from tests.specs import spec_values

BASE = spec_values("sft", model={"name_or_path": "a/b"}, data={"train": [{"path": "rows.jsonl"}]})


def spec(parallel: dict[str, Any], **train: Any) -> Spec:
    return Spec.model_validate({**BASE, "parallel": parallel, "train": {**BASE["train"], **train}})


def on_hosts(hosts: dict[str, int], **parallel: Any) -> Spec:
    return Spec.model_validate({**BASE, "parallel": parallel, "cluster": {"hosts": hosts}})


def titles(findings: Any) -> list[str]:
    return [finding.message for finding in findings]


# rule -> a spec that it speaks of, and the nearest one that it does not
EXAMPLES: dict[str, tuple[Spec, Spec]] = {
    "pipeline with ZeRO 2 or 3": (
        spec({"zero_stage": 2, "pipeline_stages": 2}),
        spec({"zero_stage": 1, "pipeline_stages": 2}),
    ),
    "optimizer on NVMe below ZeRO 3": (
        spec({"zero_stage": 2, "offload_optimizer": {"device": "nvme"}}),
        spec({"zero_stage": 3, "offload_optimizer": {"device": "nvme"}}),
    ),
    "optimizer offload at ZeRO 0": (
        spec({"zero_stage": 0, "offload_optimizer": {"device": "cpu"}}),
        spec({"zero_stage": 1, "offload_optimizer": {"device": "cpu"}}),
    ),
    "parameter offload below ZeRO 3": (
        spec({"zero_stage": 2, "offload_parameters": {"device": "cpu"}}),
        spec({"zero_stage": 3, "offload_parameters": {"device": "cpu"}}),
    ),
    "optimizer on NVMe in a pipeline": (
        spec({"zero_stage": 1, "pipeline_stages": 2, "offload_optimizer": {"device": "nvme"}}),
        spec({"zero_stage": 1, "pipeline_stages": 2, "offload_optimizer": {"device": "cpu"}}),
    ),
    "parameter offload in a pipeline": (
        spec({"zero_stage": 1, "pipeline_stages": 2, "offload_parameters": {"device": "cpu"}}),
        spec({"zero_stage": 3, "offload_parameters": {"device": "cpu"}}),
    ),
    "offloaded parameters that are not to be pinned": (
        spec({"zero_stage": 3, "offload_parameters": {"device": "cpu", "pin_memory": False}}),
        spec({"zero_stage": 3, "offload_parameters": {"device": "cpu"}}),
    ),
    "second copies of the parameters on one host": (
        on_hosts({"a": 4}, zero_stage=3, zero_hpz_partition_size=2),
        on_hosts({"a": 2, "b": 2}, zero_stage=3, zero_hpz_partition_size=2),
    ),
    "bf16 at ZeRO 0": (spec({"zero_stage": 0}), spec({"zero_stage": 0}, precision="fp32")),
    "fp32 gradients reduced in bf16": (
        spec({"zero_stage": 1}, precision="fp32", reduce_dtype="bf16"),
        spec({"zero_stage": 1}, precision="bf16", reduce_dtype="bf16"),
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.title)
def test_a_rule_speaks_of_its_combination_alone(rule: Rule) -> None:
    wrong, right = EXAMPLES[rule.title]
    spoken = titles(rule_findings(wrong)) if rule.verdict == "refused" else list(warnings(wrong))
    silent = titles(rule_findings(right)) if rule.verdict == "refused" else list(warnings(right))
    assert any(rule.behavior in message and rule.answer in message for message in spoken)
    assert not any(rule.behavior in message for message in silent)


def test_the_pipeline_is_refused_at_exactly_zero_2_and_3() -> None:
    for stage, stages in itertools.product(range(4), (1, 2, 4)):
        findings = list(rule_findings(spec({"zero_stage": stage, "pipeline_stages": stages})))
        assert bool(findings) == (stage >= 2 and stages > 1)


def test_every_rule_names_keys_of_the_schema_a_way_out_and_a_source() -> None:
    whole = Spec.model_validate({**BASE, "cluster": {"hosts": {"a": 1}}})
    assert len({rule.title for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.answer and rule.source and rule.behavior and rule.keys
        for key in rule.keys:
            value_at(whole, key)  # AttributeError for a key that the schema lacks
