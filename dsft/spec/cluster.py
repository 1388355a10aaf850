"""Check a spec against its cluster, and compute the batch sizes on its hosts."""

from __future__ import annotations

from collections.abc import Iterator

from dsft.errors import SpecError
from dsft.spec.batch import BatchSizes
from dsft.spec.findings import Finding
from dsft.spec.layout import Layout, batch_on, divided_group, hosts_of_ranks, layout_of, worlds
from dsft.spec.schema import Spec

_PROCESSES = (
    "parallel.pipeline_stages", "parallel.sequence_parallel", "parallel.zero_hpz_partition_size",
    "cluster.hosts",
)  # fmt: skip
_GROUPS = (*_PROCESSES[1:], "parallel.sequence_parallel_across_hosts")
_HOSTS = ("cluster.min_hosts", "cluster.hosts")


def cluster_batch(spec: Spec) -> BatchSizes | None:
    """Return the batch sizes on the spec's cluster; None if it has no cluster, since the world size is then
    known only at the start."""
    layout = _cluster_layout(spec)
    return batch_on(spec, layout) if layout else None


def cluster_findings(spec: Spec) -> Iterator[Finding]:
    """Yield findings for values that do not fit the world size of the cluster, or of a cluster reduced to
    cluster.min_hosts."""
    found = tuple(_whole_cluster(spec))
    yield from found or _fewer_hosts(spec)


def _whole_cluster(spec: Spec) -> Iterator[Finding]:
    try:
        layout = _cluster_layout(spec)
    except SpecError as error:
        problem = error.problems[0]
        yield Finding(tuple(problem.where.split(".")), problem.message, _PROCESSES)
        return
    divided = divided_group(spec.parallel, hosts_of_ranks(spec.cluster.hosts)) if spec.cluster else None
    if divided:
        yield Finding(tuple(divided[0].split(".")), divided[1], _GROUPS)
    sizes = ("global_batch_size", "micro_batch_size", "accumulation_steps")
    given = [size for size in sizes if getattr(spec.train, size) is not None]
    if layout is None or len(given) < 2:  # reported elsewhere, also without a cluster
        return
    try:
        batch_on(spec, layout)
    except SpecError as error:
        reads = (f"train.{size}" for size in sizes)
        yield Finding(("train", given[0]), error.problems[0].message, (*_PROCESSES, *reads))


def _fewer_hosts(spec: Spec) -> Iterator[Finding]:
    """Check that the steps are the same with every number of hosts that cluster.min_hosts allows."""
    cluster = spec.cluster
    if cluster is None or cluster.min_hosts is None:
        return
    path, hosts = ("cluster", "min_hosts"), len(cluster.hosts)
    if cluster.min_hosts > hosts:
        yield Finding(path, f"{cluster.min_hosts} is more than the {hosts} in cluster.hosts", _HOSTS)
        return
    if cluster.min_hosts < hosts and spec.train.global_batch_size is None:
        yield Finding(
            path, "with fewer hosts a step would have fewer examples; set train.global_batch_size and leave "
            "micro_batch_size or accumulation_steps out", (*_HOSTS, "train.global_batch_size"),
        )  # fmt: skip
        return
    for count, sizes in worlds(cluster.hosts, cluster.min_hosts).items():
        for processes in sorted(sizes) if count < hosts else ():
            try:
                batch_on(spec, layout_of(spec.parallel, processes))
            except SpecError as error:
                why = error.problems[0].message
                yield Finding(path, f"with {count} of {hosts} hosts, {processes} processes: {why}", _HOSTS)
                return


def _cluster_layout(spec: Spec) -> Layout | None:
    return layout_of(spec.parallel, sum(spec.cluster.hosts.values())) if spec.cluster else None
