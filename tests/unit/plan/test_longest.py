"""`dsft plan --compare`: the longest rows that fit by the plan's own memory, and the layouts that split
rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsft.plan.build import Plan, build_plan, memory_needs
from dsft.plan.census import Census, Heads, Parameter
from dsft.plan.compare import ROOMY, ROW_STEP, Candidate, LongestRow, compare
from dsft.plan.show_compare import comparison_parts, label
from dsft.plan.tables import rendered
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from tests.specs import spec_values

LAYERS = [Parameter(f"layers.{i}.w", (4000, 1000), i, False, ()) for i in range(4)]
EMBED = Parameter("embed", (2000, 1000), None, True, ())
HEAD = Parameter("head", (2000, 1000), None, False, ())
CENSUS = Census("X", 4, None, (EMBED, *LAYERS, HEAD), heads=Heads(8, 2, 100, 100))


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: CENSUS)


def document(gpu: float | None = 2.0, hosts: dict[str, int] | None = None, **sections: Any) -> dict[str, Any]:
    made = spec_values(
        "sft", data={"train": [{"path": "rows.jsonl"}], "max_length": 128},
        train={"global_batch_size": 8, "micro_batch_size": 2, "precision": "bf16"},
        parallel={"zero_stage": 2}, cluster={"hosts": hosts or {"a": 4}, "accelerator": {"name": "X"}},
    )  # fmt: skip
    if gpu is not None:
        made["cluster"]["accelerator"]["memory_gib"] = gpu
    for name, section in sections.items():
        made[name] = {**made[name], **section}
    return made


def planned(made: dict[str, Any]) -> Plan:
    return build_plan(Spec.model_validate(made))


def longest_rows(made: dict[str, Any]) -> tuple[LongestRow, ...]:
    return compare(planned(made)).longest


def full(made: dict[str, Any], row: LongestRow, tokens: int) -> float:
    """Return the highest ratio of need to limit in the plan of a spec with rows of `tokens` tokens."""
    made = made | {
        "data": made["data"] | {"max_length": tokens},
        "train": made["train"] | {"micro_batch_size": row.batch.micro_batch_size},
        "parallel": made["parallel"] | {"sequence_parallel": row.sequence_parallel},
    }
    budget = made["data"].get("max_tokens_per_micro_batch")
    if budget is not None:
        made["data"]["max_tokens_per_micro_batch"] = max(budget, tokens)
    plan = planned(made)
    return max(need.needs / need.limit for need in memory_needs(plan.spec, plan.memory, plan.reference))


@pytest.mark.parametrize("sections", [
    {},
    {"model": {"gradient_checkpointing": True}, "parallel": {"zero_stage": 3}},
    {"data": {"packing": True, "max_tokens_per_micro_batch": 1024}},
    {"gpu": None, "cluster": {"hosts": {"a": 4}, "host_memory_gib": 12, "accelerator": {"name": "cpu"}}},
], ids=str)  # fmt: skip
def test_that_length_fits_and_a_somewhat_longer_one_does_not(sections: dict[str, Any]) -> None:
    made = document(**sections)
    rows = longest_rows(made)
    assert [row.sequence_parallel for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.tokens % ROW_STEP == 0 and row.tokens > 0
        assert full(made, row, row.tokens) <= ROOMY < full(made, row, row.tokens + ROW_STEP)
    assert [row.batch.global_batch_size for row in rows] == [8, 8, 8]
    lengths = [row.tokens for row in rows]
    assert lengths == sorted(lengths) and lengths[2] > 2 * lengths[0]


def test_positions_and_too_little_memory_limit_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (row, *_) = longest_rows(document(gpu=0.1))
    assert (row.tokens, row.limit) == (0, "a GPU of stage 0")
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: replace(CENSUS, max_positions=1000))
    rows = longest_rows(document(gpu=80.0))
    assert {(row.tokens, row.limit) for row in rows} == {(1000, "the model's positions")}
    assert longest_rows(document(gpu=None)) == ()  # no limit is known


def test_group_sizes_divide_hosts_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(hosts: dict[str, int], **parallel: Any) -> list[int]:
        made = document(hosts=hosts, parallel=parallel, train={"global_batch_size": 48})
        return [row.sequence_parallel for row in longest_rows(made)]

    assert sizes({"a": 8, "b": 4}) == [1, 2, 4]
    assert sizes({"a": 6, "b": 6}) == [1, 2]  # 3 does not divide the heads
    assert sizes({"a": 4, "b": 4}, sequence_parallel=8, sequence_parallel_across_hosts=True) == [1, 2, 4, 8]
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: replace(CENSUS, unsplittable="no"))
    assert sizes({"a": 8}) == [1]


def test_the_longest_rows_are_the_last_table_of_the_comparison() -> None:
    def table(**sections: Any) -> list[str]:
        plan = planned(document(**sections))
        page = rendered(comparison_parts(plan, compare(plan)), terminal=False)
        rows = page.partition("The longest row (data.max_length) that fits")[2].splitlines()
        return [" ".join(line.split()) for line in rows if line[1:2].isdigit()]

    own, two, four = table()
    assert own.startswith("1, as in the spec 4 2 × 1 ") and own.endswith(" a GPU of stage 0")
    assert two.startswith("2 2 2 × 2 ") and four.startswith("4 1 2 × 4 ")
    assert len(table(model={"attention": "eager"})) == 1  # such attention cannot be split
    assert table(gpu=None) == []


def split(found: tuple[Candidate, ...]) -> set[int]:
    return {one.keys.sequence_parallel for one in found}


def test_rows_are_split_where_nothing_else_fits_without_offload_or_pipeline(tmp_path: Path) -> None:
    train = {"micro_batch_size": 1}
    assert split(compare(planned(document(train=train))).fitting) == {1}  # all fits
    made = document(gpu=3.0, train=train, data={"max_length": 40_000})
    spec = tmp_path / "x.yaml"
    spec.write_text(yaml.safe_dump(made), encoding="utf-8")
    found = compare(planned(made))
    assert 2 in split(found.fitting) and found.fitting[0].keys.order == 4
    assert any("rows over 2 ranks" in label(one.keys) for one in found.fitting)
    for one in found.fitting:
        assert one.best is not None and one.best.batch.global_batch_size == 8
        typed = build_plan(load_spec(spec, one.overrides, check_files=False))
        assert (typed.memory, typed.batch, typed.traffic) == (
            one.best.memory,
            one.best.batch,
            one.best.traffic,
        )
    every = [one.keys for one in (*found.fitting, *found.too_large, *found.refused)]
    assert len(set(every)) == len(every)


def test_fewer_examples_than_ranks_are_split() -> None:
    """Without groups no layout but a pipeline divides one example over four ranks."""
    train = {"global_batch_size": 1, "micro_batch_size": 1}
    found = compare(planned(document(train=train, parallel={"sequence_parallel": 4})))
    assert found.fitting[0].keys.sequence_parallel == 4
    assert () in {one.overrides for one in found.fitting}  # the spec as it is
    whole = document(train=train, parallel={"pipeline_stages": 4, "zero_stage": 1})
    assert 4 in split(compare(planned(whole)).fitting)
