"""Which cores a rank keeps to, on hosts that are made up, and on this one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from dsft.rank import cores
from dsft.rank.cores import Share, physical_cores, share_of
from dsft.rank.environment import Launched
from dsft.spec.schema import Spec
from tests.specs import minimal_spec

HOST = frozenset(range(12))
THIS_HOST = sorted(os.sched_getaffinity(0))


def spec(device: str = "cpu", **env: str) -> Spec:
    parallel = {"zero_stage": 1, "offload_optimizer": {"device": device}}
    return minimal_spec(parallel=parallel, cluster={"hosts": {"a": 1}, "env": env})


def launched(local_rank: int = 0, ranks: int | None = 3, launcher: str = "torchrun") -> Launched:
    return Launched(launcher, local_rank, 3, local_rank, "127.0.0.1", 1, ranks)


class Starter:
    """The ancestors of this process, as psutil reports them."""

    cpus: frozenset[int] = HOST
    variables: dict[str, str] = {}

    def __init__(self, pid: int) -> None:
        assert pid == os.getppid()

    def cpu_affinity(self) -> list[int]:
        return sorted(self.cpus)

    def environ(self) -> dict[str, str]:
        return self.variables


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(HOST))
    monkeypatch.setattr(cores, "cores", lambda: len(HOST))
    monkeypatch.setattr(cores.psutil, "Process", Starter)
    monkeypatch.setattr(Starter, "cpus", HOST)
    monkeypatch.setattr(Starter, "variables", {})


def machine(root: Path, places: dict[int, tuple[int, str]]) -> Path:
    """cpu -> its memory node and the processors of its core."""
    for cpu, (node, siblings) in places.items():
        folder = root / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / f"node{node}").mkdir()
        (folder / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    return root


def test_physical_cores_are_grouped_by_node(tmp_path: Path) -> None:
    places = {0: (1, "0,4"), 1: (0, "1,5"), 2: (1, "2,6"), 3: (0, "3,7")}
    places |= {cpu + 4: place for cpu, place in places.items()}
    root = machine(tmp_path, places)
    assert physical_cores(range(8), root) == [(1, 5), (3, 7), (0, 4), (2, 6)]
    assert physical_cores([0, 4, 7], root) == [(7,), (0, 4)]


def test_a_kernel_without_a_topology_has_a_core_for_each_processor(tmp_path: Path) -> None:
    assert physical_cores([5, 2], tmp_path) == [(2,), (5,)]


@pytest.mark.parametrize("ranks", [2, 3, 5, 12])
def test_ranks_share_all_cores_and_none_twice(ranks: int) -> None:
    shares = [share_of(spec(), launched(rank, ranks), {}) for rank in range(ranks)]
    found = [share.cpus for share in shares if share is not None]
    assert len(found) == ranks and frozenset().union(*found) == HOST
    assert sum(map(len, found)) == len(HOST)
    assert all(share is not None and 1 <= share.threads <= len(share.cpus) for share in shares)


def test_a_limit_on_processor_time_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cores", lambda: 6)
    share = share_of(spec(), launched(), {})
    assert share is not None and (share.threads, len(share.cpus)) == (2, 4)


@pytest.mark.parametrize(("what", "found"), [
    ("nothing is offloaded", lambda: share_of(spec("none"), launched(), {})),
    ("alone on the host", lambda: share_of(spec(), launched(ranks=1), {})),
    ("the launcher does not say", lambda: share_of(spec(), launched(ranks=None), {})),
    ("more ranks than cores", lambda: share_of(spec(), launched(ranks=13), {})),
    ("the spec's own", lambda: share_of(spec(OMP_NUM_THREADS="4"), launched(), {})),
    ("chosen", lambda: share_of(spec(), launched(launcher="deepspeed"), {"OMP_NUM_THREADS": "4"})),
])  # fmt: skip
def test_cores_are_left_alone(what: str, found: Any) -> None:
    assert found() is None, what


def test_torchruns_one_thread_is_no_choice_but_the_users_is(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torchrun = {"OMP_NUM_THREADS": "1"}
    share = share_of(spec(), launched(), by_torchrun)
    assert share is not None and share.threads == 4
    monkeypatch.setattr(Starter, "variables", {"OMP_NUM_THREADS": "1"})
    assert share_of(spec(), launched(), by_torchrun) is None


def test_cores_that_the_starter_gave_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Starter, "cpus", frozenset(range(24)))  # numactl, --bind_cores_to_rank, srun
    assert share_of(spec(), launched(), {}) is None


def test_a_starter_of_another_user_is_taken_to_have_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Starter) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(Starter, "environ", refuse)
    assert share_of(spec(), launched(), {}) is None


BIND = """
import os, sys, threading
from dsft.rank.cores import Share
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(Share(frozenset({int(sys.argv[1])}), 1, 2).bind())
print([sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")])
"""


def test_all_threads_of_the_process_are_bound() -> None:
    cpu = THIS_HOST[0]
    command = [sys.executable, "-c", BIND, str(cpu)]
    lines, found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines.endswith("offloaded optimizer states with 1 thread on cores that no other rank uses")
    assert found == f"{[[cpu], [cpu]]}"


def test_forbidden_binding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, cpus: frozenset[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cores.os, "sched_setaffinity", refuse)
    assert "cannot be bound to separate cores (Operation not permitted)" in Share(HOST, 3, 2).bind()
