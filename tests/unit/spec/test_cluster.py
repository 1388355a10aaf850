from pathlib import Path

import pytest

from dsft.errors import SpecError
from dsft.spec.cluster import cluster_batch
from dsft.spec.layout import worlds
from dsft.spec.load import load_spec

SPECS = Path(__file__).resolve().parents[3] / "specs"
TWO_NODES = SPECS / "two_nodes.yaml"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(SpecError) as error:
        load_spec(TWO_NODES, overrides)
    return [str(problem) for problem in error.value.problems]


def test_the_batch_on_the_clusters_processes() -> None:
    batch = cluster_batch(load_spec(TWO_NODES, ["parallel.pipeline_stages=2", "parallel.zero_stage=1"]))
    assert batch is not None and (batch.data_parallel, batch.accumulation_steps) == (8, 2)
    assert cluster_batch(load_spec(SPECS / "quickstart.yaml")) is None


def test_sizes_that_do_not_fit_the_cluster_are_reported_with_all_other_mistakes_and_their_line() -> None:
    batch, learning_rate = problems("cluster.hosts.node2=4", "optim.learning_rate=-1")
    assert batch.startswith("line 22, train.global_batch_size: global_batch_size 128 = micro_batch_size 8")
    assert "data-parallel ranks 12 does not hold" in batch
    assert "optim.learning_rate: -1 is out of range" in learning_rate


def test_stages_that_do_not_divide_the_cluster_are_reported_once() -> None:
    (problem,) = problems("parallel={zero_stage: 1, pipeline_stages: 3}")
    assert "parallel.pipeline_stages: 3 does not divide the 16 processes" in problem


def test_groups_that_split_rows_are_compared_with_the_cluster() -> None:
    hosts, size = "cluster.hosts={node1: 2, node2: 6}", "parallel.sequence_parallel={}".format
    load_spec(TWO_NODES, [hosts, size(2)])
    (divided,) = problems(hosts, size(4))
    assert "parallel.sequence_parallel: 4 would put ranks 0-3, which split the same rows, on 2" in divided
    load_spec(TWO_NODES, [hosts, size(4), "parallel.sequence_parallel_across_hosts=true"])
    processes, heads = problems(hosts, size(3))
    assert "parallel.sequence_parallel: 3 does not divide the 8 processes" in processes
    assert "3 does not divide the model's" in heads
    (batch,) = problems(hosts, size(2), "train={global_batch_size: 6, micro_batch_size: 1}")
    assert "data-parallel groups 4 (of 2 ranks) does not hold" in batch
    three = "cluster={hosts: {a: 2, b: 2, c: 2}, min_hosts: 2}"  # of two hosts too
    load_spec(TWO_NODES, [three, size(2), "train={global_batch_size: 12, micro_batch_size: 1}"])


def test_groups_with_a_copy_of_the_parameters_are_compared_with_the_cluster() -> None:
    size, zero = "parallel.zero_hpz_partition_size={}".format, "parallel.zero_stage=3"
    load_spec(TWO_NODES, ["cluster.hosts={node1: 2, node2: 2}", zero, size(2)])
    (divided,) = problems("cluster.hosts={node1: 1, node2: 3}", zero, size(2))
    assert "parallel.zero_hpz_partition_size: 2 would put ranks 0-1" in divided
    (alone,) = problems("cluster={hosts: {a: 2, b: 2}, min_hosts: 1}", zero, size(2))
    assert "cluster.min_hosts: with 1 of 2 hosts, 2 processes: 2 does not divide" in alone
    (sharded,) = problems("cluster.hosts={node1: 2, node2: 2}", "parallel.zero_stage=2", size(2))
    assert "parallel.zero_hpz_partition_size: 2 is for ZeRO 3, which shards" in sharded
    (offloaded,) = problems(
        "cluster.hosts={node1: 2, node2: 2}", zero, size(2), "parallel.offload_parameters.device=cpu"
    )
    assert "2 is not supported with parallel.offload_parameters.device 'cpu'" in offloaded


def test_a_wrong_size_is_reported_alone() -> None:
    assert len(problems("train.global_batch_size=x", "cluster.hosts.node2=4")) == 1
    assert len(problems("train={global_batch_size: 64}")) == 1
    assert len(problems("cluster.hosts.node2=0")) == 1


def test_fewer_hosts_are_allowed_where_the_equation_holds_for_each_number() -> None:
    load_spec(TWO_NODES, ["cluster.min_hosts=1", "train={global_batch_size: 128, micro_batch_size: 8}"])
    three = "cluster={hosts: {a: 2, b: 2, c: 4}, min_hosts: 2}"
    load_spec(TWO_NODES, [three, "train={global_batch_size: 96, micro_batch_size: 2}"])
    (problem,) = problems(three, "train={global_batch_size: 64, micro_batch_size: 2}")
    assert "cluster.min_hosts: with 2 of 3 hosts, 6 processes: global_batch_size 64 = " in problem
    (problem,) = problems("cluster.min_hosts=1", "train={micro_batch_size: 8, accumulation_steps: 1}")
    assert "with fewer hosts a step would have fewer examples; set train.global_batch_size" in problem
    (problem,) = problems("cluster.min_hosts=3", "train={global_batch_size: 128, micro_batch_size: 8}")
    assert "cluster.min_hosts: 3 is more than the 2 in cluster.hosts" in problem
    (problem,) = problems(
        "cluster={hosts: {a: 1, b: 1}, min_hosts: 1}", "parallel={zero_stage: 1, pipeline_stages: 2}"
    )
    assert "with 1 of 2 hosts, 1 processes: 2 does not divide the 1 processes" in problem


def test_the_numbers_of_processes_that_so_many_hosts_have() -> None:
    assert worlds({"a": 2, "b": 2, "c": 4}, 1) == {1: {2, 4}, 2: {4, 6}, 3: {8}}
    assert worlds(dict.fromkeys(map(str, range(400)), 8), 399) == {399: {3192}, 400: {3200}}
