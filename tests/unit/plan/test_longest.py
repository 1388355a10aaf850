"""The longest rows that fit (`dsft plan --longest`) by the plan's own memory, and the layouts of `--compare`
that split rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsft.errors import SpecError
from dsft.plan.build import Plan, build_plan, memory_needs
from dsft.plan.census import Census, Heads, Parameter
from dsft.plan.compare import ROOMY, Candidate, compare
from dsft.plan.longest import STEP, LongestRow, hints, longest_rows
from dsft.plan.memory.sizes import GIB
from dsft.plan.show_compare import label
from dsft.plan.show_longest import parts, print_longest
from dsft.plan.tables import rendered
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec

LAYERS = [Parameter(f"layers.{i}.w", (4000, 1000), i, False, ()) for i in range(4)]
EMBED = Parameter("embed", (2000, 1000), None, True, ())
HEAD = Parameter("head", (2000, 1000), None, False, ())
CENSUS = Census("X", 4, None, (EMBED, *LAYERS, HEAD), heads=Heads(8, 2, 100, 100))


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: CENSUS)


def document(gpu: float | None = 2.0, hosts: dict[str, int] | None = None, **sections: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "x",
        "task": "sft",
        "model": {"from_config": {"model_type": "llama"}},
        "data": {"train": [{"path": "rows.jsonl"}], "max_length": 128},
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "precision": "bf16"},
        "optim": {"learning_rate": 1e-3},
        "parallel": {"zero_stage": 2},
        "cluster": {"hosts": hosts or {"a": 4}, "accelerator": {"name": "X"}},
    }
    if gpu is not None:
        made["cluster"]["accelerator"]["memory_gib"] = gpu
    for name, section in sections.items():
        made[name] = {**made[name], **section}
    return made


def planned(made: dict[str, Any]) -> Plan:
    return build_plan(Spec.model_validate(made))


def full(made: dict[str, Any], row: LongestRow, tokens: int) -> float:
    """The highest ratio of need to limit in the plan of a spec that has such rows, split so."""
    assert row.batch is not None
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


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"gradient_checkpointing": True}, "parallel": {"zero_stage": 3}},
        {"data": {"packing": True, "max_tokens_per_micro_batch": 1024}},
        {"gpu": None, "cluster": {"hosts": {"a": 4}, "host_memory_gib": 12, "accelerator": {"name": "cpu"}}},
    ],
    ids=str,
)
def test_that_length_fits_and_a_somewhat_longer_one_does_not(sections: dict[str, Any]) -> None:
    made = document(**sections)
    rows = longest_rows(planned(made))
    assert [row.sequence_parallel for row in rows] == [1, 2, 4]
    for row in rows:
        assert row.tokens % STEP == 0 and row.tokens > 0
        assert full(made, row, row.tokens) <= ROOMY < full(made, row, row.tokens + STEP)
    assert [row.batch and row.batch.global_batch_size for row in rows] == [8, 8, 8]
    lengths = [row.tokens for row in rows]
    assert lengths == sorted(lengths) and lengths[2] > 2 * lengths[0]


def test_positions_and_too_little_memory_limit_a_row_too(monkeypatch: pytest.MonkeyPatch) -> None:
    (row, *_) = longest_rows(planned(document(gpu=0.1)))
    assert (row.tokens, row.limit) == (0, "a GPU of stage 0")
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: replace(CENSUS, max_positions=1000))
    rows = longest_rows(planned(document(gpu=80.0)))
    assert {(row.tokens, row.limit) for row in rows} == {(1000, "the model's positions")}
    assert not list(hints(planned(document(gpu=80.0)), rows))  # no key of the spec raises these
    with pytest.raises(SpecError, match="cluster.accelerator.memory_gib: is not set; set it, in GiB"):
        longest_rows(planned(document(gpu=None)))


def test_the_sizes_of_groups_divide_hosts_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(hosts: dict[str, int], **parallel: Any) -> list[int]:
        made = document(hosts=hosts, parallel=parallel, train={"global_batch_size": 48})
        return [row.sequence_parallel for row in longest_rows(planned(made))]

    assert sizes({"a": 8, "b": 4}) == [1, 2, 4]
    assert sizes({"a": 6, "b": 6}) == [1, 2]  # 3 does not divide the heads
    assert sizes({"a": 4, "b": 4}, sequence_parallel=8, sequence_parallel_across_hosts=True) == [1, 2, 4, 8]
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: replace(CENSUS, unsplittable="no"))
    assert sizes({"a": 8}) == [1]


def test_what_is_refused_and_what_else_helps_is_said(tmp_path: Path, capsys: Any) -> None:
    made = document(model={"attention": "eager"})
    page = " ".join(rendered(parts(plan := planned(made), longest_rows(plan)), terminal=False).split())
    assert "With parallel.sequence_parallel=2: 2 does not work with model.attention eager" in page
    assert "1, as in the spec 4 2 × 1" in page
    assert (
        "longer rows: train.micro_batch_size=1, model.gradient_checkpointing=true, parallel.zero_stage=3."
        in page
    )
    spec = tmp_path / "x.yaml"
    spec.write_text(yaml.safe_dump(document()), encoding="utf-8")
    print_longest(spec, (), as_json=True, world_size=None)
    told = json.loads(capsys.readouterr().out)
    assert [row["sequence_parallel"] for row in told["rows"]] == [1, 2, 4]
    assert told["limits"] == {"device": 2 * GIB, "host": None}
    print_longest(spec, (), as_json=False, world_size=None)
    shown = " ".join(capsys.readouterr().out.split())  # its lines are as wide as the terminal
    assert "at most 95% of the 2.0 GiB of a GPU, with 8 examples a step" in shown


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
