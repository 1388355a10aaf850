"""Properties of the comparison: whatever the hosts, what it offers fits, is allowed, and is what it says."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.errors import SpecError
from dsft.plan.build import Plan, build_plan
from dsft.plan.census import Census, Parameter
from dsft.plan.compare import Candidate, Comparison, changed, compare
from dsft.plan.memory.sizes import GIB
from dsft.plan.show_compare import comparison_mapping, comparison_parts, label
from dsft.plan.smaller import smaller
from dsft.plan.storage import Form
from dsft.plan.tables import rendered
from dsft.spec.load import load_spec
from dsft.spec.schema import SECTIONS, Reference, Spec
from tests.specs import spec_values

LAYERS = 4


def census(uncuttable: str | None = None, width: int = 5000) -> Census:
    layers = [Parameter(f"layers.{i}.w", (width, 1000), i, False, ()) for i in range(LAYERS)]
    embed = Parameter("embed", (2000, 1000), None, True, ())
    head = Parameter("head", (2000, 1000), None, False, ())
    return Census("X", LAYERS, None, (embed, *layers, head), uncuttable)


def document(hosts: dict[str, int], **cluster: Any) -> dict[str, Any]:
    return spec_values(
        "sft", model={"from_config": {"model_type": "llama", "tie_word_embeddings": False}},
        data={"train": [{"path": "rows.jsonl"}], "max_length": 128},
        train={"micro_batch_size": 2, "accumulation_steps": 3, "precision": "bf16"},
        cluster={"hosts": hosts, **cluster},
    )  # fmt: skip


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: census())
    yield


def compared(made: dict[str, Any]) -> tuple[Plan, Comparison]:
    plan = build_plan(Spec.model_validate(made))
    return plan, compare(plan)


def every(found: Comparison) -> list[Candidate]:
    return [*found.fitting, *found.too_large, *found.refused]


HOSTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 4), min_size=1)
MEMORY = st.floats(0.05, 2.0)


@settings(max_examples=8, deadline=None)
@given(HOSTS, MEMORY, MEMORY)
def test_what_is_offered_fits_in_the_fields_order(hosts: dict[str, int], gpu: float, host: float) -> None:
    made = document(hosts, accelerator={"name": "H100", "memory_gib": gpu}, host_memory_gib=host)
    plan, found = compared(made)
    choices = [candidate.keys for candidate in every(found)]
    assert len(set(choices)) == len(choices)
    for candidate in found.fitting:
        best = candidate.best
        assert best is not None and best.batch.global_batch_size == plan.batch.global_batch_size
        assert best.device <= gpu * GIB
        assert max(best.memory.hosts.values()) <= host * GIB
        assert candidate.seconds > 0
    assert [c.keys.order for c in found.fitting] == sorted(c.keys.order for c in found.fitting)
    for candidate in found.too_large:
        assert candidate.sizes[0].batch.micro_batch_size == 1
        assert all(over.needs > over.limit for over in candidate.sizes[0].over)


@settings(max_examples=5, deadline=None)
@given(HOSTS, MEMORY)
def test_more_memory_takes_no_layout_away(hosts: dict[str, int], gpu: float) -> None:
    small, large = (
        {c.keys for c in compared(document(hosts, accelerator=accelerator))[1].fitting}
        for accelerator in ({"name": "H100", "memory_gib": gpu}, {"name": "H100", "memory_gib": 2 * gpu})
    )
    assert small <= large


def test_zero_3_is_tried_with_one_micro_batch_a_step_whose_gradients_stay_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # so large that the update, by groups of 10⁸ elements, does not need as much for its copies
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: census(width=50_000))
    made = document({"a": 1})
    made["data"]["max_length"] = 2
    made["train"] = {"global_batch_size": 4, "micro_batch_size": 1}

    def sizes(**accelerator: Any) -> list[tuple[int, int, bool]]:
        found = compared(
            made | {"cluster": {"hosts": {"a": 1}, "accelerator": {"name": "H100"} | accelerator}}
        )
        sharded = [c for c in every(found[1]) if c.keys.order == 3 and not c.keys.checkpointing]
        return [(size.batch.micro_batch_size, size.device, bool(size.over)) for size in sharded[0].sizes]

    (one, needs, _), *_, (four, less, _) = sizes()
    assert (one, four) == (1, 4) and less < needs
    between = sizes(memory_gib=(needs + less) / 2 / GIB)
    assert [(micro, over) for micro, _, over in between] == [(1, True), (4, False)]


@pytest.mark.parametrize(("stages", "micro"), [(1, 6), (2, 3)])
def test_what_is_typed_is_what_was_compared(tmp_path: Path, stages: int, micro: int) -> None:
    made = document({"a": 2, "b": 2}, accelerator={"name": "H100", "memory_gib": 80})
    made |= {"task": "dpo", "train": {"global_batch_size": 24, "micro_batch_size": micro}}
    made["parallel"] = {"pipeline_stages": stages}
    spec = tmp_path / "x.yaml"
    spec.write_text(yaml.safe_dump(made), encoding="utf-8")
    plan, found = compared(made)
    assert {c.keys.reference for c in found.fitting} == {"precomputed", "live"}
    assert () in {c.overrides for c in found.fitting}  # the spec as it is
    for candidate in found.fitting:
        typed = build_plan(load_spec(spec, candidate.overrides, check_files=False))
        assert typed.memory == candidate.best.memory
        assert typed.batch == candidate.best.batch
        assert typed.traffic == candidate.best.traffic


def test_a_copy_of_the_parameters_on_each_host_is_offered() -> None:
    _, found = compared(document({"a": 2, "b": 2}, interface="e0"))
    copied = [one for one in found.fitting if one.keys.copied > 1]
    assert {(one.keys.zero_stage, one.keys.copied) for one in copied} == {(3, 2)}
    one = next(one for one in copied if one.keys.order == 3)
    assert {"parallel.zero_stage=3", "parallel.zero_hpz_partition_size=2"} < set(one.overrides)
    assert "copies on 2 ranks each" in label(one.keys)
    plain = next(other for other in found.fitting if other.keys == replace(one.keys, copied=1))
    assert one.best and plain.best and one.best.device > plain.best.device
    assert not any(one.keys.copied > 1 for one in every(compared(document({"a": 4}))[1]))
    own = document({"a": 2, "b": 2}) | {"parallel": {"zero_stage": 3, "zero_hpz_partition_size": 2}}
    assert any(one.keys.zero_stage == 2 for one in compared(own)[1].fitting)


def test_a_refusal_is_the_one_of_validate(tmp_path: Path) -> None:
    made = document({"a": 4})
    spec = tmp_path / "x.yaml"
    spec.write_text(yaml.safe_dump(made), encoding="utf-8")
    _, found = compared(made)
    shown = {
        (c.keys.zero_stage, c.keys.pipeline_stages, str(c.keys.offload_optimizer)): c.refused[0]
        for c in found.refused
        if c.keys.offload_parameters == "none"
    }
    for zero, stages, device in ((2, 2, "none"), (0, 1, "cpu"), (3, 1, "nvme"), (0, 3, "none")):
        keys = {"zero_stage": zero, "pipeline_stages": stages, "offload_optimizer.device": device}
        with pytest.raises(SpecError) as error:
            load_spec(spec, [f"parallel.{key}={value}" for key, value in keys.items()], check_files=False)
        assert any(p.message.endswith(shown[zero, stages, device].message) for p in error.value.problems)


def test_a_model_that_cannot_be_cut_gets_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: census("its layers share keys"))
    _, found = compared(document({"a": 2}))
    assert {c.keys.pipeline_stages for c in found.fitting} == {1}
    staged = [c for c in found.refused if c.keys.pipeline_stages == 2 and c.keys.zero_stage == 0]
    assert any("its layers share keys" in finding.message for c in staged for finding in c.refused)


def test_a_batch_that_only_pipelines_divide() -> None:
    made = document({"a": 4})
    made["train"] = {"global_batch_size": 2, "micro_batch_size": 1}
    made["parallel"] = {"pipeline_stages": 2}
    _, found = compared(made)
    assert {c.keys.pipeline_stages for c in found.fitting} == {2, 4}
    alone = next(c for c in found.refused if c.keys.pipeline_stages == 1)
    assert "global_batch_size 2 = micro_batch_size" in alone.refused[0].message


def test_a_packed_budget_keeps_its_tokens() -> None:
    made = document({"a": 2})
    made["data"] |= {"packing": True, "max_tokens_per_micro_batch": 512}
    _, found = compared(made)
    for candidate in found.fitting:
        assert [size.batch.micro_batch_size for size in candidate.sizes] in ([2], [1], [3], [6])
        assert candidate.best is not None and candidate.best.batch.tokens_per_micro_batch == 512


def shown(made: dict[str, Any]) -> str:
    return rendered(comparison_parts(*compared(made)), terminal=False)


def test_the_page_names_the_advice_and_why_not_the_others() -> None:
    small = {"name": "H100", "memory_gib": 2.0}
    page = shown(document({"a": 4}, accelerator=small, host_memory_gib=64.0))
    assert "plain data parallel: a GPU of stage 0 needs" in page or "checkpointing: a GPU of stage 0" in page
    assert "parallel.zero_stage=" in page.split("What fits")[0]
    refused = " ".join(page.split("What is refused")[1].partition("The longest row")[0].split())
    assert refused.startswith("187 layouts, for 7 reasons, such as plain data parallel, parameters on host:")
    assert "DeepSpeed silently ignores the key" in refused and refused.endswith("--json has all.")
    assert "is not set" not in page and "warning" not in page
    large = shown(document({"a": 4}, accelerator={"name": "H100", "memory_gib": 80}))
    advice = large.split("What fits")[0]  # bf16 gradients of ZeRO 0 are warned about, so ZeRO 1 is advised
    assert "ZeRO 1; micro-batch" in advice and "warning: train.precision" not in large
    none = shown(document({"a": 4}, accelerator={"name": "H100", "memory_gib": 0.001}))
    assert "No layout fits" in none and "cluster.host_memory_gib is not set" in none
    assert "parallel.offload_optimizer='{device: nvme, nvme_path: FOLDER}'" in " ".join(none.split())
    cpu = shown(document({"a": 4}, accelerator={"name": "cpu"}))
    assert "memory_gib is not set, so no layout is too large for a GPU" not in cpu
    assert "cluster.host_memory_gib is not set" in cpu


def test_programs_get_every_size_and_reason() -> None:
    plan, found = compared(document({"a": 2}, accelerator={"name": "H100", "memory_gib": 80}))
    shown = json.loads(json.dumps(comparison_mapping(plan, found)))
    assert len(shown["candidates"]) == len(every(found))
    first = shown["candidates"][0]
    assert first["verdict"] == "fits" and first["layout"]["zero_stage"] == 0 and first["warnings"]
    advised = next(one for one in shown["candidates"] if one["overrides"] == shown["advice"])
    assert advised["layout"]["zero_stage"] == 1 and not advised["warnings"]
    assert [size["micro_batch_size"] for size in first["sizes"]] == [1, 2, 3, 6]
    assert all(one["refused"] for one in shown["candidates"] if one["verdict"] == "refused")


def test_a_layout_that_is_nearly_too_large_is_tight() -> None:
    made = document({"a": 1}, accelerator={"name": "H100", "memory_gib": 80})
    made["data"]["max_length"] = 1 << 16
    first = compared(made)[1].fitting[0].sizes
    for bound, expected in ((1.01, True), (1.06, False)):
        made["cluster"]["accelerator"]["memory_gib"] = bound * first[-1].device / GIB
        alike = [c for c in compared(made)[1].fitting if c.keys.order == 0 and not c.keys.checkpointing]
        assert [size.is_tight for size in alike[0].sizes][-1] is expected
        best = alike[0].best
        assert best is not None and not best.is_tight
        page = shown(made)
        assert ("Tight: over 95%" in page) == any(
            c.best and c.best.is_tight for c in compared(made)[1].fitting
        )


def test_keys_of_a_section_that_is_null_are_of_the_tasks_own_section(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Reference):
        weight: float = 1.0

    class Other(Spec):
        own: Own | None = None

    monkeypatch.setitem(SECTIONS, "own", Own)
    spec = Other.model_validate(document({"a": 2}))
    assert changed(spec, {"own.reference": "live"}).own == Own(reference="live")


def frozen(form: Form) -> Census:
    made = census()
    layers = [replace(p, trained=False, form=form) for p in made.parameters if p.layer is not None]
    return replace(made, parameters=(*layers, Parameter("layers.0.lora", (1000, 8), 0, False, ())))


@pytest.mark.parametrize("gpu", [80.0, 2.0, 0.01])
def test_adapters_on_weights_in_4_bits(monkeypatch: pytest.MonkeyPatch, gpu: float) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: frozen("plain"))
    monkeypatch.setattr("dsft.plan.smaller.census", lambda model: frozen(model.quantize))
    made = document({"a": 1}, accelerator={"name": "H100", "memory_gib": gpu})
    made["model"] = {"name_or_path": "owner/name", "lora": {"rank": 8}}
    plan, found = compared(made)
    fewer = smaller(plan)
    assert fewer is not None and fewer.change == "model.quantize=nf4"
    page = rendered(comparison_parts(plan, found, fewer), terminal=False)
    if gpu == 0.01:
        assert fewer.fitting == () and "which changes the results Nothing." in " ".join(page.split())
        return
    for one in fewer.fitting:
        assert one.overrides[0] == fewer.change and one.keys.offload_optimizer == "none" and one.best
        plain = next((other for other in found.fitting if other.keys == one.keys), None)
        assert plain is None or (plain.best and one.sizes[0].device < plain.sizes[0].device)
    assert "The first of them: model.quantize=nf4" in " ".join(page.split())
    assert comparison_mapping(plan, found, fewer)["with_fewer_bits"]["change"] == fewer.change
    made["model"]["quantize"] = "nf4"
    assert smaller(build_plan(Spec.model_validate(made))) is None


def test_a_model_that_cannot_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> Census:
        raise SpecError("The model cannot be quantized.", [])

    monkeypatch.setattr("dsft.plan.smaller.census", refuse)
    made = document({"a": 1}) | {"model": {"name_or_path": "owner/name", "lora": {"rank": 8}}}
    plan, found = compared(made)
    page = rendered(comparison_parts(plan, found, smaller(plan)), terminal=False)
    assert "Nothing: The model cannot be quantized" in " ".join(page.split())
    made["model"] = {"from_config": {"model_type": "llama"}, "lora": {"rank": 8}}
    fewer = smaller(replace(plan, spec=Spec.model_validate(made)))
    assert fewer is not None and fewer.refused.startswith("model.quantize 'nf4' is for pretrained weights")


def test_moments_in_8_bits_without_adapters() -> None:
    plan, _ = compared(document({"a": 2}))
    fewer = smaller(plan)
    assert fewer is not None and fewer.fitting[0].overrides[0] == "optim.name=adamw_8bit"
    assert smaller(replace(plan, spec=changed(plan.spec, {"optim.name": "sgd"}))) is None
