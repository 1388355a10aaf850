from dataclasses import replace
from typing import Any

import pytest

from dsft.plan.census import Census, Heads, Parameter
from dsft.plan.ds_config import bucket_size
from dsft.plan.memory import other_version
from dsft.plan.memory.attention import BACKWARD, scores_of
from dsft.plan.memory.layer import activations
from dsft.plan.memory.ranks import DRIVER, FRAGMENTS, PROCESS, WITH_ZERO, Memory, memory
from dsft.plan.memory.sizes import GIB, fuses, gpu_bytes, head_chunk, with_device
from dsft.plan.memory.tensors import MALLOC_KEEPS
from dsft.spec.combinations import combinations
from dsft.spec.layout import layout_of
from dsft.spec.optimizers import OPTIMIZERS
from tests.lion import FACTS
from tests.specs import minimal_spec

BIG, SMALL = 1_000_000, 100


def census() -> Census:
    layers = [Parameter(f"layers.{i}.w", (1000, 1000), i, False, ()) for i in range(4)]
    norms = [Parameter(f"layers.{i}.n", (SMALL,), i, False, ()) for i in range(4)]
    outside = [
        Parameter("embed", (2000, 1000), None, True, ()),
        Parameter("head", (1000, 1000), None, False, ()),
    ]
    return Census("X", 4, None, (*outside, *layers, *norms))


WHOLE = 7 * BIG + 4 * SMALL
LARGEST = 2 * BIG


@pytest.fixture
def sizes(make_spec: Any) -> Any:
    def run(
        world: int = 4, hosts: dict[str, int] | None = None, tokens: int | None = 1, **sections: Any
    ) -> Memory:
        spec = make_spec(**sections)
        return memory(census(), spec, layout_of(spec.parallel, world), hosts or {"here": world}, tokens)

    return run


def test_zero_0_holds_everything_on_every_rank(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 0}).stages[0]
    assert (rank.parameters, rank.gradients, rank.master, rank.moments) == (
        4 * WHOLE, 4 * WHOLE, 0, 8 * WHOLE,
    )  # fmt: skip
    assert rank.buffers == 4 * WHOLE  # flattened, to be reduced


def test_zero_2_in_bf16_shares_all_but_the_parameters(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 2}, train={"precision": "bf16"}).stages[0]
    assert (rank.parameters, rank.gradients, rank.master, rank.moments) == (
        2 * WHOLE,
        WHOLE + 2 * LARGEST,  # one gradient arrives
        WHOLE,
        2 * WHOLE,
    )
    # three buckets, one flattened, and in fp32
    assert rank.buffers == 3 * 2 * bucket_size(WHOLE) + (2 + 4) * LARGEST


def test_gradients_larger_than_a_bucket_stay_while_they_are_reduced(make_spec: Any) -> None:
    matrices = [Parameter(f"layers.{i}.w", (10_000, 6_000), i, False, ()) for i in range(4)]
    spec = make_spec(parallel={"zero_stage": 2}, train={"precision": "bf16"})
    layout = layout_of(spec.parallel, 4)
    rank = memory(Census("X", 4, None, tuple(matrices)), spec, layout, {"here": 4}, 1).stages[0]
    assert rank.buffers == 2 * (3 * bucket_size(240_000_000) + 2 * 60_000_000) + (2 + 4) * 60_000_000


def test_bf16_at_zero_1_keeps_fp32_gradients_whole(sizes: Any) -> None:
    assert sizes(parallel={"zero_stage": 1}, train={"precision": "bf16"}).stages[0].gradients == 6 * WHOLE


def test_zero_3_shares_the_parameters_except_small_ones(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 3}, train={"precision": "bf16"}).stages[0]
    assert rank.parameters == 2 * (WHOLE // 4 + 4 * SMALL)
    bucket, gathered = bucket_size(WHOLE), 2 * 7 * BIG  # all of it, while the head's gradient is reduced
    assert rank.buffers == 4 * bucket + gathered + 4 * LARGEST
    assert rank.master == rank.gradients - 2 * LARGEST == 4 * WHOLE // 4


def test_each_group_of_ranks_has_a_copy_of_the_parameters(sizes: Any) -> None:
    bf16, zero = {"precision": "bf16"}, {"zero_stage": 3}
    plain = sizes(parallel=zero, train=bf16).stages[0]
    rank = sizes(parallel=zero | {"zero_hpz_partition_size": 2}, train=bf16).stages[0]
    assert (plain.copies, rank.copies) == (0, 2 * WHOLE // 2)
    assert rank.device == plain.device + rank.copies
    assert rank.phase("save") == plain.phase("save") + rank.copies  # as an evaluation leaves them
    assert rank.phase("load") == plain.phase("load") + rank.copies


def test_zero_3_keeps_two_bytes_of_a_gradient_where_a_step_has_one_micro_batch(sizes: Any) -> None:
    def gradients(world: int = 1, **train: Any) -> Any:
        given = {"precision": "bf16", "accumulation_steps": 1} | train
        parallel = {"zero_stage": 3}
        return sizes(world, tokens=None, parallel=parallel, train=given).stages[0].gradients  # in the forward

    assert gradients() == 2 * WHOLE
    assert gradients(accumulation_steps=2) == 4 * WHOLE
    assert gradients(2, reduce_dtype="bf16") == 2 * WHOLE // 2
    assert gradients(2) == 4 * WHOLE // 2


def test_a_packed_budget_below_the_micro_batch_accumulates_gradients(sizes: Any) -> None:
    def gradients(budget: int) -> Any:
        data = {"packing": True, "max_length": 2048, "max_tokens_per_micro_batch": budget}
        train = {"precision": "bf16", "micro_batch_size": 2, "accumulation_steps": 1}
        parallel = {"zero_stage": 3}
        return sizes(1, tokens=None, parallel=parallel, train=train, data=data).stages[0].gradients

    assert (gradients(4096), gradients(2048)) == (2 * WHOLE, 4 * WHOLE)


def test_offload_moves_the_state_to_the_hosts(sizes: Any) -> None:
    offloaded = {"zero_stage": 3, "offload_optimizer": {"device": "cpu"}}
    table = sizes(hosts={"a": 3, "b": 1}, parallel=offloaded)
    rank = table.stages[0]
    assert (rank.gradients, rank.master, rank.moments) == (4 * LARGEST, 0, 0)
    locked = 1 << 23  # 4 * WHOLE // 4 bytes of gradients, in powers of two
    assert locked // 2 < WHOLE < locked
    assert rank.offloaded == (4 + 8) * WHOLE // 4 + 2 * locked
    process = PROCESS + WITH_ZERO
    assert table.hosts == {"a": 3 * (rank.offloaded + process), "b": rank.offloaded + process}

    plain = {"zero_stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    assert sizes(parallel=plain).stages[0].offloaded == 20 * WHOLE // 4


def test_parameters_on_the_cpu_leave_the_gpu_the_small_ones(sizes: Any) -> None:
    both = {"zero_stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_parameters": {"device": "cpu"}}
    train = {"precision": "bf16"}
    rank = sizes(parallel=both, train=train).stages[0]
    alone = sizes(parallel=both | {"offload_parameters": {"device": "none"}}, train=train).stages[0]
    assert rank.parameters == 2 * 4 * SMALL
    assert rank.offloaded == alone.offloaded + (1 << 22)  # 2 * WHOLE // 4, in a power of two
    engine = 2 * LARGEST + 4 * bucket_size(WHOLE)  # one parameter whole, and the reduction's bucket
    assert rank.phase("load") == 2 * 4 * SMALL + engine  # read straight into the host's memory


def test_zero_3_passes_a_gpus_weights_through_the_host_as_they_are_flattened(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 3}, train={"precision": "bf16"}).stages[0]
    assert rank.offloaded == 2 * WHOLE // 4
    states = rank.parameters + rank.master + 4 * WHOLE // 4
    assert rank.phase("load") == states + 4 * bucket_size(WHOLE) + 2 * LARGEST  # each is whole once


def test_stages_have_their_own_layers(sizes: Any) -> None:
    first, last = sizes(parallel={"zero_stage": 0, "pipeline_stages": 2}).stages
    assert first.elements == 2 * BIG + 2 * (BIG + SMALL)
    assert last.elements == BIG + 2 * (BIG + SMALL)


def test_sgd_has_moments_with_momentum_only(sizes: Any) -> None:
    assert sizes(optim={"name": "sgd"}).stages[0].moments == 0
    assert (
        sizes(optim={"name": "sgd", "momentum": 0.9}, parallel={"zero_stage": 0}).stages[0].moments
        == 4 * WHOLE
    )


def test_moments_of_an_optimizer_that_is_no_part_of_dsft(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "lion", FACTS)
    adamw, lion = (sizes(optim={"name": name}, parallel={"zero_stage": 2}) for name in ("adamw", "lion"))
    assert adamw.stages[0].moments == 2 * lion.stages[0].moments == 8 * WHOLE // 4
    refused = minimal_spec(optim={"name": "lion", "learning_rate": 1.0, "momentum": 0.9})
    [finding] = combinations(refused)
    assert finding.message.endswith("has no effect with lion; set name to sgd, or leave it out")


def test_on_a_cpu_the_ranks_memory_is_the_hosts(sizes: Any) -> None:
    table = sizes(cluster={"hosts": {"a": 4}, "accelerator": {"name": "cpu"}})
    rank = table.stages[0]
    assert table.hosts == {"here": 4 * (rank.device + rank.retained + PROCESS + WITH_ZERO)}


def test_what_malloc_keeps_of_other_moments_counts_on_a_cpu(make_spec: Any) -> None:
    """In bf16 at ZeRO 0 the update widens every gradient, in blocks that malloc keeps; the reduction before
    it flattens them all, in blocks that go back."""
    count, size = 20, 4_000_000
    census = Census("X", count, None, tuple(Parameter(f"{i}", (size,), i, False, ()) for i in range(count)))
    assert 4 * size < MALLOC_KEEPS < 2 * count * size

    def rank(accelerator: str) -> Any:
        cluster = {"hosts": {"a": 2}, "accelerator": {"name": accelerator}}
        spec = make_spec(parallel={"zero_stage": 0}, train={"precision": "bf16"}, cluster=cluster)
        return memory(census, spec, layout_of(spec.parallel, 2), {"a": 2}).stages[0]

    flat = (2 + 4) * count * size
    assert rank("cpu").buffers == rank("H100").buffers == flat
    assert (rank("cpu").retained, rank("H100").retained) == (4 * count * size, 0)


def test_a_pipeline_flattens_its_gradients_with_no_rank_to_share_them_with(sizes: Any) -> None:
    parallel = {"zero_stage": 0, "pipeline_stages": 2}
    first, _ = sizes(world=2, parallel=parallel, data={"max_length": 8}).stages
    assert first.buffers == first.gradients == 4 * first.elements


@pytest.mark.parametrize(("weight_decay", "copied"), [(0.0, 0), (0.1, 4 * WHOLE)])
def test_groups_are_flattened_together_where_there_are_several(
    sizes: Any, weight_decay: float, copied: int
) -> None:
    train = {"precision": "bf16", "micro_batch_size": 1, "accumulation_steps": 1}
    optim = {"learning_rate": 1e-4, "weight_decay": weight_decay}
    made = sizes(parallel={"zero_stage": 1}, train=train, optim=optim, data={"max_length": 8})
    assert made.stages[0].buffers == max(copied, 4 * LARGEST)


def test_activations_are_those_of_the_matrices_of_the_layers_in_flight(sizes: Any) -> None:
    """Two rows of 2,048 tokens, four layers of one (1000, 1000) matrix, 2,000 words of 1,000 elements."""
    tokens, given = 2 * 2048, {"accumulation_steps": 3, "micro_batch_size": 2}
    rank = sizes(tokens=None, train=given).stages[0]
    one_layer = 4 * tokens * (1000 + 1000 + 1000)  # input, output, what the activation function gives
    flowing = int(one_layer * BACKWARD)  # gradients, when the logits are gone
    normed = 4 * tokens * 2 * 1000  # the last layer's output and its norm, beside the logits
    assert (rank.activations, rank.one_layer) == (
        4 * one_layer + normed,
        4 * tokens * (3 * 1000 + 4 * 1000),
    )
    assert (rank.logits, rank.head) == (4 * tokens * 2000, 4 * tokens * 2000 + 4 * 2 * BIG)
    assert rank.device == rank.states + rank.activations + rank.head

    recomputed = one_layer + flowing
    kept = sizes(tokens=None, train=given, model={"gradient_checkpointing": True}).stages[0]
    assert (kept.activations, kept.head) == (recomputed + 4 * tokens * 4 * 1000, 0)
    offload = {"gradient_checkpointing": True, "activation_offload": True}
    offloaded = sizes(tokens=None, train=given, model=offload).stages[0]
    assert offloaded.activations == recomputed + 2 * tokens * 4 * 1000  # of this layer and of the next one
    assert offloaded.offloaded == 4 * tokens * 4 * 1000

    first, last = sizes(tokens=None, train=given, parallel={"zero_stage": 0, "pipeline_stages": 2}).stages
    assert (first.head, last.head) == (0, 4 * tokens * 2000 + 4 * 2 * BIG)
    assert (first.activations, last.activations) == (4 * one_layer + flowing, 2 * one_layer + normed)


@pytest.mark.parametrize(("packing", "length"), [(False, 2048), (True, 4096)])
def test_eager_attention_has_all_scores_of_a_row(make_spec: Any, packing: bool, length: int) -> None:
    counted = Census("X", 1, None, (), heads=Heads(queries=8, keys=2, width=50, values=40))
    data = {"max_length": 2048, "packing": packing} | (
        {"max_tokens_per_micro_batch": 4096} if packing else {}
    )

    def scores(attention: str, precision: str) -> tuple[int, int, int]:
        model = {"from_config": {"model_type": "llama"}, "attention": attention}
        return scores_of(counted, make_spec(model=model, data=data, train={"precision": precision}), 4096)

    each = 8 * 4096 * length
    assert scores("eager", "bf16") == (6 * each, 8 * each, 10 * each)
    assert scores("eager", "fp32") == (4 * each, 8 * each, 12 * each)
    assert scores("auto", "bf16") == (0, 0, 0)


def test_a_score_has_no_logits(make_spec: Any, sizes: Any) -> None:
    rank = sizes(tokens=None, task="reward").stages[0]
    assert (rank.logits, rank.head) == (0, 0) and sizes(tokens=None, task="dpo").stages[0].head > 0


def test_adapters_add_their_rank_and_frozen_norms_keep_nothing(make_spec: Any) -> None:
    """One layer of a (3000, 1000) matrix and a norm, in bf16, 8 tokens."""

    def one_layer(*parameters: Parameter) -> int:
        return activations(parameters, 1000, make_spec(train={"precision": "bf16"}), 8, 1).total

    matrix = Parameter("w", (3000, 1000), 0, False, ())
    norm = Parameter("n", (1000,), 0, False, ())
    adapter = [Parameter(f"w.lora_{n}", shape, 0, False, ()) for n, shape in
               (("A.weight", (16, 1000)), ("B.weight", (3000, 16)))]  # fmt: skip
    assert one_layer(matrix, norm) == 2 * 8 * (1000 + 3000 + 3000 + 2 * 1000)
    frozen = [replace(one, trained=False) for one in (matrix, norm)]
    assert one_layer(*frozen, *adapter) == 2 * 8 * (1000 + 3000 + 3000 + 2 * 16)


WORDS = 65_536
TIED = (Parameter("embed", (WORDS, 8), None, True, ("head",)),)
UNTIED = (Parameter("embed", (WORDS, 8), None, True, ()), Parameter("head", (WORDS, 8), None, False, ()))
FROZEN = (UNTIED[0], replace(UNTIED[1], trained=False))
TRAINED_COPY = (*FROZEN, UNTIED[1])  # modules_to_save
ONCE = 4 * WORDS * 8  # bytes of the weight's gradient in fp32


@pytest.mark.parametrize(("parameters", "precision", "gradient"), [
    (TIED, "bf16", ONCE),
    (UNTIED, "fp32", ONCE),
    (UNTIED, "fp16", 0),
    (FROZEN, "bf16", 0),
    (TRAINED_COPY, "bf16", ONCE),
])  # fmt: skip
def test_the_heads_logits_are_those_of_a_chunk_at_most(
    make_spec: Any, parameters: tuple[Parameter, ...], precision: str, gradient: int
) -> None:
    def planned(tokens: int, accelerator: str) -> tuple[int, int]:
        spec = make_spec(train={"precision": precision}, cluster=cluster(accelerator))
        counted = Census("X", 1, None, parameters)
        (rank,) = memory(counted, spec, layout_of(spec.parallel, 1), {"here": 1}, tokens).stages
        logits = rank.head - gradient if tokens > 32 else rank.logits  # of few tokens the backward has more
        return logits, gradient if rank.head >= gradient else 0

    def cluster(accelerator: str) -> dict[str, Any]:
        return {"hosts": {"a": 1}, "accelerator": {"name": accelerator}}

    assert planned(32, "cpu")[0] == 12 * 32 * WORDS  # 16 MiB at 8 bytes: made whole
    assert planned(33, "cpu") == (8 * 33 * WORDS, gradient)
    assert planned(512, "cpu") == planned(100_000, "cpu") == (1 << 28, gradient)
    each = 4 if precision == "fp32" else 6  # bytes of a logit on a GPU, of the 8 by which chunks are cut
    for accelerator, limit in (("RTX 4090", 1 << 30), ("H100", 2 << 30), ("H200", 2 << 30), ("X", 1 << 30)):
        assert planned(100_000, accelerator) == (limit * each // 8, gradient)


def test_a_run_plans_with_the_memory_of_its_own_gpu(make_spec: Any) -> None:
    named = make_spec(cluster={"hosts": {"a": 1}, "accelerator": {"name": "H100"}})
    for spec in (make_spec(), named):
        assert gpu_bytes(with_device(spec, "cuda", 24 * GIB)) == 24 * GIB
        on_cpu = with_device(spec, "cpu", None)
        assert on_cpu.cluster == spec.cluster and (on_cpu.model.kernels, fuses(on_cpu)) == ("torch", False)
    assert fuses(named) and not fuses(make_spec(model=named.model.model_dump() | {"kernels": "torch"}))
    sizes = [head_chunk("cuda", gib * GIB) >> 30 for gib in (1, 63, 64, 1000)]
    assert sizes == [1, 1, 2, 2] and head_chunk("cpu", 512 * GIB) == 1 << 28


def test_the_phases_of_a_run_take_parts_of_it(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 2}, train={"precision": "bf16"}).stages[0]
    assert rank.phase("steady") == rank.phase("first_step") == rank.device
    assert rank.phase("load") == 2 * rank.parameters  # flattened as it is made
    assert rank.phase("save") == rank.parameters + rank.master + rank.moments
    assert rank.phase("evaluation") == rank.phase("save") + max(rank.one_layer, rank.logits)
    assert rank.phase("evaluation") < rank.phase("steady")
    assert rank.phase("start") == 0
    alone = sizes(world=1, parallel={"zero_stage": 2}, train={"precision": "bf16"}).stages[0]
    assert alone.phase("load") == alone.parameters + 2 * alone.master  # zeros as the first gradients


def test_fp32_gradients_of_zero_1_in_bf16_stay_between_steps(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 1}, train={"precision": "bf16"}).stages[0]
    assert rank.phase("save") == rank.parameters + rank.master + rank.moments + 4 * WHOLE


def test_a_gpu_has_more_on_it_than_tensors(sizes: Any) -> None:
    rank = sizes(parallel={"zero_stage": 2}).stages[0]
    assert rank.gpu == rank.device + DRIVER + int(rank.device * FRAGMENTS)
    cpu = {"hosts": {"here": 4}, "accelerator": {"name": "cpu"}}
    assert sizes(parallel={"zero_stage": 2}, cluster=cpu).stages[0].beside == 0


def test_another_version_of_deepspeed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for installed in ("0.19.8", "0.19.8+cu128", "0.19.9"):
        monkeypatch.setattr("dsft.plan.memory.version", lambda name, installed=installed: installed)
        found.append(list(other_version()))
    assert found[:2] == [[], []]
    assert found[2] == [
        "memory was modelled for DeepSpeed 0.19.8, and 0.19.9 is installed: the figures may be off "
        "(scripts/citations lists what has moved)"
    ]
