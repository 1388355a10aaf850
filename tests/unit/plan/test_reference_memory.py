"""What a reference takes, beside the policy or before it."""

from typing import Any

import pytest

from dsft.plan.census import Census, Parameter
from dsft.plan.ds_config import PERSIST_BELOW
from dsft.plan.memory.ranks import PROCESS, WITH_ZERO, Memory, memory
from dsft.plan.memory.reference import ReferenceMemory, with_reference
from dsft.spec.layout import layout_of

BIG, SMALL, RANK = 1_000_000, 100, 8


def census(*, lora: bool = False) -> Census:
    layers = [Parameter(f"layers.{i}.w", (1000, 1000), i, False, (), not lora) for i in range(4)]
    norms = [Parameter(f"layers.{i}.n", (SMALL,), i, False, (), not lora) for i in range(4)]
    outside = [
        Parameter("embed", (2000, 1000), None, True, (), not lora),
        Parameter("head", (2000, 1000), None, False, ()),
    ]
    adapters = [
        Parameter(f"layers.{i}.w.lora_{part}.weight", (RANK, 1000), i, False, ())
        for i in range(4)
        for part in "AB"
    ]
    return Census("X", 4, None, (*outside, *layers, *norms, *(adapters if lora else ())))


WHOLE = 8 * BIG + 4 * SMALL
ADAPTER = 8 * RANK * 1000


@pytest.fixture
def planned(make_spec: Any) -> Any:
    def run(*, lora: bool = False, **sections: Any) -> tuple[Memory, ReferenceMemory | None]:
        sections = {"task": "dpo", "train": {"precision": "bf16"}, "data": {"max_length": 64}, **sections}
        spec, hosts = make_spec(**sections), {"a": 2, "b": 2}
        counted, places = census(lora=lora), layout_of(spec.parallel, 4)
        return with_reference(memory(counted, spec, places, hosts), counted, spec, places, hosts)

    return run


def test_a_live_reference_counts_in_the_policys_total(planned: Any) -> None:
    sizes, reference = planned(dpo={"reference": "live"})
    alone, none = planned(dpo={"loss_type": "simpo"})
    assert none is None
    assert sizes.stages[0].reference == 2 * WHOLE == reference.stages[0].parameters
    assert sizes.stages[0].device == alone.stages[0].device + 2 * WHOLE
    assert sizes.stages[0].phase("load") == alone.stages[0].phase("load") + 2 * WHOLE
    assert reference.hosts is None and reference.stages[0].buffers == 0


def test_values_of_a_teacher_count_as_logits(planned: Any) -> None:
    """129 columns for each of the 128 tokens of a micro-batch; fewer take less than the logits of a chunk."""
    teacher = {"task": "distill", "distill": {"reference_model": "teacher"}}
    (stage,) = planned(**teacher)[0].stages
    (fewer,) = planned(**teacher | {"distill": {"reference_model": "teacher", "top_k": 1}})[0].stages
    assert stage.logits == 43 * 128 * 129 and 43 * 128 * 3 < fewer.logits < stage.logits


def test_a_sharded_one_takes_a_share_and_what_it_gathers(planned: Any) -> None:
    sizes, reference = planned(dpo={"reference": "live", "reference_zero_stage": 3})
    (rank,) = reference.stages
    assert rank.parameters == sizes.stages[0].reference == 2 * (WHOLE // 4 + 4 * SMALL)
    copied = 2 * BIG  # from a buffer of two layers, of which the second is not used yet
    assert (rank.buffers, rank.offloaded) == (2 * (7 * BIG + copied), 0)


def test_a_live_one_has_copies_as_the_policy_has(planned: Any) -> None:
    zero = {"zero_stage": 3, "zero_hpz_partition_size": 2}
    sizes, reference = planned(dpo={"reference": "live"}, parallel=zero)
    (rank,) = reference.stages
    assert rank.copies == 2 * WHOLE // 2 == sizes.stages[0].copies
    assert sizes.stages[0].reference == rank.parameters + rank.copies
    for others in ({"reference": "precomputed"}, {"reference": "live", "reference_offload": "cpu"}):
        assert planned(dpo=others, parallel=zero)[1].stages[0].copies == 0


def test_one_on_the_cpu_leaves_the_gpu_what_stays_gathered(planned: Any) -> None:
    offloaded = {"reference": "live", "reference_zero_stage": 3, "reference_offload": "cpu"}
    sizes, reference = planned(dpo=offloaded)
    (rank,) = reference.stages
    assert SMALL < PERSIST_BELOW < BIG
    assert rank.parameters == sizes.stages[0].reference == 2 * 4 * SMALL
    assert rank.offloaded == 2 * WHOLE // 4
    assert sizes.hosts == dict.fromkeys("ab", 2 * (rank.offloaded + PROCESS + WITH_ZERO))


def test_a_precomputed_one_takes_nothing_in_training(planned: Any) -> None:
    sizes, reference = planned(dpo={})
    alone, _ = planned(dpo={"loss_type": "simpo"})
    assert sizes == alone
    (rank,) = reference.stages
    assert rank.device == 2 * WHOLE + rank.activations + rank.logits
    assert rank.device < sizes.stages[0].device  # no gradients, no moments, one layer at a time
    assert reference.hosts == dict.fromkeys("ab", 2 * (PROCESS + WITH_ZERO))


def test_on_cpus_the_pass_is_in_the_hosts_memory(planned: Any) -> None:
    _, reference = planned(dpo={}, cluster={"hosts": {"a": 2, "b": 2}, "accelerator": {"name": "cpu"}})
    process = PROCESS + WITH_ZERO
    assert reference.hosts == dict.fromkeys("ab", 2 * (reference.stages[0].device + process))


def test_a_pass_in_stages_has_each_stages_share(planned: Any) -> None:
    _, reference = planned(dpo={}, parallel={"zero_stage": 1, "pipeline_stages": 2})
    first, last = reference.stages
    assert first.parameters + last.parameters == 2 * WHOLE
    assert first.logits == 0 < last.logits
    _, whole = planned(dpo={"reference_zero_stage": 0}, parallel={"zero_stage": 1, "pipeline_stages": 2})
    assert [rank.parameters for rank in whole.stages] == [2 * WHOLE]


def test_the_policys_batch_need_not_divide_by_the_ranks_of_a_pass(planned: Any) -> None:
    train = {"precision": "bf16", "global_batch_size": 8, "micro_batch_size": 4, "accumulation_steps": None}
    parallel = {"pipeline_stages": 2}  # two data-parallel ranks, four in the pass
    _, whole = planned(dpo={"reference_zero_stage": 0}, parallel=parallel, train=train)
    assert [rank.parameters for rank in whole.stages] == [2 * WHOLE]


@pytest.mark.parametrize(
    ("zero_stage", "path", "copied"),
    [(1, None, 2 * BIG), (1, "adapter", 2 * BIG + ADAPTER), (3, None, (2 * BIG + ADAPTER) // 4)],
)
def test_an_adapters_reference_has_a_copy_of_what_cannot_be_switched_off(
    planned: Any, zero_stage: int, path: str | None, copied: int
) -> None:
    model = {"lora": {"modules_to_save": ["head"], "path": path}}
    sizes, reference = planned(
        lora=True, model=model, dpo={"reference": "adapter"}, parallel={"zero_stage": zero_stage}
    )
    assert sizes.stages[0].reference == 2 * copied
    assert reference.stages == () and reference.hosts is None


def test_a_live_reference_has_no_new_adapter(planned: Any) -> None:
    _, without = planned(lora=True, model={"lora": {}}, dpo={"reference": "live"})
    _, continued = planned(lora=True, model={"lora": {"path": "adapter"}}, dpo={"reference": "live"})
    assert without.stages[0].elements == WHOLE and continued.stages[0].elements == WHOLE + ADAPTER


def test_longer_pairs_take_more(planned: Any) -> None:
    _, short = planned(dpo={}, data={"max_length": 64})
    _, long = planned(dpo={}, data={"max_length": 128})
    assert long.stages[0].activations == 2 * short.stages[0].activations
