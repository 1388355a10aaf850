import json
from pathlib import Path
from typing import Any

import pytest

from dsft.errors import SpecError
from dsft.plan.build import Plan, RankRange, build_plan, rank_ranges
from dsft.plan.census import Census, Parameter
from dsft.plan.ds_config import entries
from dsft.plan.ds_entries import HostFacts
from dsft.plan.memory.ranks import PROCESS, WITH_ZERO
from dsft.plan.memory.sizes import GIB
from dsft.plan.show import as_mapping, parts
from dsft.plan.tables import heading, rendered
from dsft.report.folder import Provenance, write_folder
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout

pytestmark = pytest.mark.usefixtures("counted")

CENSUS = Census("LlamaForCausalLM", 4, 128, (Parameter("w", (1000, 1000), 0, False, ()),))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.plan.build.census", lambda *_: CENSUS)


@pytest.fixture
def plan(make_spec: Any) -> Any:
    def run(world_size: int | None = None, **sections: Any) -> Plan:
        return build_plan(make_spec(data={"max_length": 128}, **sections), world_size)

    return run


def text(made: Plan, **options: Any) -> str:
    return rendered(parts(made, explain=options.pop("explain", False)), **{"terminal": False, **options})


def test_ranks_fall_into_blocks_of_host_and_stage() -> None:
    assert rank_ranges(Layout(6, 2), {"a": 4, "b": 2}) == [
        RankRange("a", 0, (0, 2), (0, 2), (0, 2), (0, 0)),
        RankRange("a", 1, (3, 3), (3, 3), (0, 0), (0, 0)),
        RankRange("b", 1, (4, 5), (0, 1), (1, 2), (0, 0)),
    ]
    assert rank_ranges(Layout(8, 1, 4), {"a": 2, "b": 6}) == [
        RankRange("a", 0, (0, 1), (0, 1), (0, 0), (0, 1)),
        RankRange("b", 0, (2, 7), (0, 5), (0, 1), (0, 3)),
    ]


def test_groups_that_split_rows_are_in_the_equation_and_in_the_table(plan: Any) -> None:
    made = plan(world_size=4, parallel={"sequence_parallel": 2})
    assert made.batch.data_parallel == 2
    shown = text(made)
    assert "accumulation_steps 3 × data-parallel groups 2 (of 2 ranks)" in shown
    assert "sequence ranks, of each row's tokens" in shown
    assert "sequence ranks" not in text(plan(world_size=4))
    assert "for 2; --processes sets another" in " ".join(
        text(plan(parallel={"sequence_parallel": 2})).split()
    )


def test_the_batch_equation_and_the_steps_are_shown(plan: Any) -> None:
    shown = text(plan(world_size=4))
    assert "global_batch_size 24 = micro_batch_size 2 × accumulation_steps 3 × data-parallel ranks 4" in shown
    assert "Steps: 1 × rows ÷ 24, rounded up; unknown until the rows are read" in shown
    assert "Activations, logits and the memory of a GPU's driver are estimates" in shown
    assert "train_batch_size" not in shown


def test_a_plan_that_does_not_fit_one_gpu_names_the_way_with_16_bytes_for_a_parameter(plan: Any) -> None:
    cluster = {"hosts": {"localhost": 1}, "accelerator": {"name": "H100", "memory_gib": 0.1}}

    def hinted(**sections: Any) -> bool:
        shown = " ".join(text(plan(cluster=cluster, **sections)).split())
        return "16 bytes for each trained parameter instead of 18, since gradients stay in bf16: 1.9" in shown

    assert hinted(train={"precision": "bf16"})
    one = {"precision": "bf16", "accumulation_steps": 1, "global_batch_size": None}
    assert not hinted(train=one, parallel={"zero_stage": 3})
    assert not hinted(train={"precision": "fp32"})
    cluster["accelerator"] = {"name": "H100", "memory_gib": 80}  # type: ignore[assignment]
    assert not hinted(train={"precision": "bf16"})


def test_a_rate_that_follows_the_batch_is_shown(plan: Any) -> None:
    optim = {"learning_rate": 1e-4, "scale_with_batch": "linear", "base_batch_size": 2}
    made = plan(optim=optim)
    total = made.batch.global_batch_size
    assert f"learning rate: 0.0001 × ({total} ÷ 2)" in text(made)
    assert as_mapping(made)["learning_rate"] == pytest.approx(1e-4 * total / 2)
    assert "÷ 2)" not in text(plan())


def test_a_world_size_known_only_at_the_start_is_assumed(plan: Any) -> None:
    assert "The spec has no cluster" in text(plan())
    assert "The spec has no cluster" not in text(plan(world_size=2))
    two = {"hosts": {"a": 1, "b": 1}}
    assert "The spec has no cluster" not in text(plan(cluster=two))
    with pytest.raises(SpecError, match="the hosts have 2 slots, not 3"):
        plan(cluster=two, world_size=3)


def test_many_hosts_are_shortened(plan: Any) -> None:
    shown = text(plan(cluster={"hosts": {f"node{i}": 8 for i in range(100)}}))
    assert "node15" in shown and "120-127" in shown and "node16" not in shown
    assert "… 84 more; --json has all" in shown
    assert "each host" in shown


def test_explain_shows_every_key_and_why_one_is_left_out(plan: Any) -> None:
    shown = text(plan(), explain=True)
    assert "gradient_clipping" in shown and "zero_optimization.reduce_bucket_size" in shown
    assert "not written: computed from the other two" in shown


def test_plain_text_has_no_escape_codes_and_a_terminal_has(plan: Any) -> None:
    assert "\x1b[" not in text(plan(), explain=True)
    assert "\x1b[" in text(plan(), terminal=True, width=100)


def test_the_mapping_is_json_with_the_same_numbers(plan: Any, make_spec: Any) -> None:
    made = plan(world_size=4, parallel={"zero_stage": 3})
    mapping = json.loads(json.dumps(as_mapping(made)))
    assert mapping["batch"] == {
        "global_batch_size": 24, "micro_batch_size": 2, "accumulation_steps": 3,
        "data_parallel": batch_sizes(made.spec.train, 4).data_parallel, "tokens_per_micro_batch": None,
        "sequence_parallel": 1,
    }  # fmt: skip
    assert mapping["memory"]["per_gpu"][0]["device"] == made.memory.stages[0].device
    assert mapping["deepspeed"]["zero_optimization"]["stage"] == 3
    assert set(mapping["reasons"]) >= set(mapping["deepspeed"]) - {"zero_optimization", "bf16", "fp16"} - {
        key for key, value in mapping["deepspeed"].items() if isinstance(value, dict)
    }


def test_gradients_that_cross_hosts_in_every_micro_batch_are_advised_on(plan: Any) -> None:
    def printed(hosts: dict[str, int], stage: int = 2, **train: Any) -> str:
        train = {"precision": "bf16"} | train
        made = plan(None, cluster={"hosts": hosts}, parallel={"zero_stage": stage}, train=train)
        return " ".join(text(made).split())

    advice = "Gradients are sent between hosts after each micro-batch: "
    halved = "train.reduce_dtype: bf16 halves their size"
    fewer = "fewer and larger micro-batches send them less often"
    two = {"a": 2, "b": 2}
    assert f"{advice}{halved}, {fewer}." in printed(two)
    assert f"{advice}{halved}." in printed(two, 3, accumulation_steps=1)
    assert f"{advice}{fewer}." in printed(two, reduce_dtype="bf16")
    for without in (
        printed({"a": 4}),
        printed(two, 1),
        printed(two, precision="fp32"),
        printed(two, accumulation_steps=1, reduce_dtype="bf16"),
    ):
        assert advice not in without


def test_a_gpu_that_is_too_small_is_warned_of(plan: Any) -> None:
    cluster = {"hosts": {"a": 2}, "accelerator": {"name": "small", "memory_gib": 0.01}}
    made = plan(cluster=cluster, parallel={"zero_stage": 0})
    assert (
        "cluster.accelerator.memory_gib: 0.01 is less than the 1.5 GiB that a GPU of stage 0 needs"
        in made.warnings[-1]
    )
    assert "Warnings" in text(made)


def test_the_plan_shows_that_a_gpu_is_large_enough(plan: Any) -> None:
    def shown(**accelerator: Any) -> str:
        return text(plan(cluster={"hosts": {"a": 2}, "accelerator": accelerator}, parallel={"zero_stage": 0}))

    assert "Fits: 1.5 GiB of the 4.0 GiB of a GPU (38%)" in shown(name="small", memory_gib=4)
    assert "of the 79.6 GiB of a GPU" in shown(name="H100")  # 81,559 MiB in nvidia-smi
    assert "of the 79.6 GiB of a GPU" in shown(name="NVIDIA H100 80GB HBM3")
    assert "of the 40.0 GiB of a GPU" in shown(name="NVIDIA A100-SXM4-40GB")
    assert "Fits" not in shown(name="A100")  # sold with 40 and 80 GB
    assert "Fits" not in shown(name="NVIDIA GH200 480GB")  # of the CPU


@pytest.mark.parametrize(("given", "fits"), [(8.0, True), (0.5, False)])
def test_the_plan_shows_whether_the_hosts_have_the_memory(plan: Any, given: float, fits: bool) -> None:
    made = plan(None, cluster={"hosts": {"a": 4}, "host_memory_gib": given})
    needed = 4 * (PROCESS + WITH_ZERO) / GIB
    assert made.memory.hosts == {"a": needed * GIB}
    assert ("of the 8.0 GiB of a host, with a tenth to spare" in text(made)) == fits
    warning = f"cluster.host_memory_gib: 0.5 is less than the {1.1 * needed:.1f} GiB that host a needs, with"
    assert any(found.startswith(warning) for found in made.warnings) != fits


def test_rows_longer_than_the_models_positions_are_refused(make_spec: Any) -> None:
    with pytest.raises(SpecError, match="data.max_length: 129 is over the model's 128 positions"):
        build_plan(make_spec(data={"max_length": 129}), 1, Path())


def test_the_reference_of_pairs_is_shown_with_its_reason(plan: Any) -> None:
    made = plan(4, task="dpo", parallel={"zero_stage": 2})
    shown = text(made, explain=True)
    assert "The policy as it starts, whole on every rank, since ZeRO 2 shards nothing" in shown
    reference = " ".join(shown.partition("It scores all pairs before the policy is loaded")[2].split())
    assert "parameters 3.8 MiB" in reference.partition("each host")[0]
    assert "DeepSpeed, of the reference" in shown
    found = as_mapping(made)["reference"]
    assert found["per_gpu"][0]["parameters"] == 4_000_000
    assert found["per_host"] == {"localhost": 4 * (PROCESS + WITH_ZERO)}
    assert found["deepspeed"]["zero_optimization"] == {"stage": 0}
    assert set(found["reasons"]) >= {"zero_optimization.stage"}


def test_a_live_reference_has_a_row_of_its_own(plan: Any) -> None:
    shown = text(plan(4, task="dpo", dpo={"reference": "live"}))
    assert "\n reference " in shown and "While it scores it takes:" in shown
    assert "\n reference " not in text(plan(4, task="dpo"))


def test_a_plan_without_a_reference_does_not_mention_one(plan: Any) -> None:
    assert "eference" not in text(plan(4), explain=True)
    assert as_mapping(plan(4, task="dpo", dpo={"loss_type": "orpo"}))["reference"] is None
    staged = plan(4, task="dpo", parallel={"pipeline_stages": 2})
    assert as_mapping(staged)["reference"]["deepspeed"] is None  # DeepSpeed has no part in it


def test_the_traffic_of_a_step_and_a_pipelines_bubble_are_shown(plan: Any) -> None:
    made = plan(4, parallel={"pipeline_stages": 2})
    assert "(stages 2 - 1) ÷ (micro-batches 3 + stages 2 - 1) = 25.0% of the step" in text(made)
    assert "within a host" in text(made)
    mapping = as_mapping(made)
    assert mapping["bubble"] == 0.25
    assert mapping["model"]["layers_of_stages"] == (1, 3)  # all parameters are the first layer's
    assert "layers" in text(made) and "1-3" in text(made)
    assert {flow["what"] for flow in mapping["traffic"]} >= {"gradients", "updated parameters"}
    alone = plan(1)
    assert "Bubble" not in text(alone) and "Ranks exchange nothing" in text(alone)


def test_what_each_host_swaps_to_its_disk_is_shown(plan: Any) -> None:
    disk = {"device": "nvme", "nvme_path": "/disk"}
    made = plan(world_size=2, parallel={"zero_stage": 3, "offload_optimizer": disk})
    (host,) = made.hosts
    assert as_mapping(made)["swapped"] == {host: 16_000_000}  # value, two moments and gradient, fp32
    assert f"{host} swaps at most 15.3 MiB to its disk" in text(made)
    made = plan(world_size=2, parallel={"zero_stage": 3, "offload_optimizer": {"device": "cpu"}})
    assert as_mapping(made)["swapped"] == {} and "swaps" not in text(made)


@pytest.mark.parametrize("terminal", [False, True])
def test_names_cannot_steer_the_terminal(terminal: bool) -> None:
    text = rendered([heading("evil \x1b]0;x\x1b\\ \x1b[2J")], terminal=terminal)
    assert r"evil \x1b]0;x\x1b\ \x1b[2J" in text and ("\x1b[1m" in text) is terminal


@pytest.mark.parametrize(("device", "precision", "shown"), [
    ("H100", "bf16", "FlashAttention in one call"),
    ("H100", "fp32", "segment by segment, as FlashAttention does not compute in fp32"),
    ("cpu", "fp32", "segment by segment, as FlashAttention needs a GPU"),
])  # fmt: skip
def test_the_attention_of_packed_rows_is_named(
    make_spec: Any, device: str, precision: str, shown: str
) -> None:
    spec = {
        "data": {"max_length": 128, "packing": True},
        "train": {"precision": precision},
        "cluster": {"hosts": {"a": 1}, "accelerator": {"name": device, "memory_gib": 80}},
    }
    assert f"Attention of packed rows: {shown}" in text(build_plan(make_spec(**spec)))
    silent = [spec | {"data": {"max_length": 128}}, spec | {"cluster": {"hosts": {"a": 1}}}]
    for given in (*silent, spec | {"model": {"attention": "sdpa"}}):
        assert "Attention of packed rows" not in text(build_plan(make_spec(**given)))


def test_explain_shows_what_a_run_was_started_with_and_why(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = plan(parallel={"zero_stage": 3, "offload_optimizer": {"device": "cpu"}})
    folder = tmp_path / made.spec.output_dir / made.spec.name
    facts = HostFacts(CENSUS.elements, pin=(False, "there is no GPU to copy to"))
    started = entries(made.spec, made.batch, facts)

    def shown() -> str:
        return text(made, explain=True, width=1000).partition("DeepSpeed, of the run")[2]

    assert shown() == ""
    write_folder(folder, Provenance("", started, None, ()))
    assert "pin_memory false there is no GPU to copy to" in " ".join(shown().split())
    assert "zero_optimization.stage" not in shown(), "as in the plan"
    for name in ("deepspeed.json", "deepspeed.reasons.json"):
        before = (folder / name).read_text()
        for damaged in ("{", "[1]", '{"a": 1}', '{"a.b": 1}'):
            (folder / name).write_text(damaged)
            assert shown() == "", (name, damaged)
        (folder / name).write_text(before)
    assert shown() != ""
