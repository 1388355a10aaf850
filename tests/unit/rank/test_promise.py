"""A world of another size than promised stops; so does a hostfile that is not there."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsft.errors import WorldError
from dsft.rank.environment import Launched
from dsft.rank.places import (
    Device,
    RankPlace,
    check_places,
    devices_lines,
    rank_map,
    rank_map_json,
    shared_device,
)
from dsft.rank.promise import (
    Promise,
    check_groups,
    check_hosts,
    check_promise,
    deepspeed_options,
    named_hostfile,
)
from dsft.spec.schema import Cluster, Parallel, Spec

HOSTS = {"node1": 4, "node2": 2}


def launched(
    world_size: int,
    launcher: str = "torchrun",
    local: int | None = None,
    hosts: int | None = None,
    slots: tuple[int, ...] | None = None,
) -> Launched:
    return Launched(launcher, 0, world_size, 0, "127.0.0.1", 29500, local, hosts, slots)


def cluster(hosts: dict[str, int], min_hosts: int | None = None) -> Cluster:
    return Cluster(hosts=hosts, min_hosts=min_hosts)


def test_promised_world_passes() -> None:
    assert check_promise(cluster(HOSTS), launched(6)).hosts == HOSTS
    assert check_promise(None, launched(3)).hosts is None
    check_promise(cluster(HOSTS), launched(6, "torchrun", 2, 2))
    check_promise(cluster(HOSTS), launched(6, "srun", 4, 2, (4, 2)))


@pytest.mark.parametrize(("started", "message"), [
    (launched(6, "torchrun", 6, 1), "but torchrun started 6 on 1 host: torchrun's --nnodes and"),
    (launched(6, "torchrun", 3, 2), "but torchrun started 6 on 2 hosts: .*give --nnodes=2"),
    (launched(6, "srun", 3, 2, (3, 3)), r"but srun started 6 on 2 hosts \(3 \+ 3\): srun's --nodes"),
    (launched(6, "srun", 2, 3, (2, 2, 2)), r"but srun started 6 on 3 hosts \(2 \+ 2 \+ 2\)"),
    (launched(4, "mpirun", 4, 1), "but mpirun started 4 on 1 host: mpirun's -n and hostfile"),
    (launched(2, "environment"), "but environment started 2: WORLD_SIZE decides that"),
])  # fmt: skip
def test_other_hosts_or_slots_with_the_same_number_of_processes_are_refused(
    started: Launched, message: str
) -> None:
    with pytest.raises(WorldError, match=rf"expects 6 processes \(node1 4 \+ node2 2\) {message}"):
        check_promise(cluster(HOSTS), started)


def test_fewer_hosts_pass_where_min_hosts_allows_them() -> None:
    three = {"a": 2, "b": 2, "c": 3}
    for hosts, sizes in ((2, (4, 5)), (3, (7,))):
        for size in sizes:
            check_promise(cluster(three, 2), launched(size, hosts=hosts))
    for hosts, size in ((1, 2), (2, 6), (3, 6), (4, 9)):
        with pytest.raises(WorldError, match="or of at least 2 of these hosts but torchrun started"):
            check_promise(cluster(three, 2), launched(size, hosts=hosts))


def places(*counts: int) -> list[RankPlace]:
    return [
        RankPlace(f"node{host}", f"node{host} x", local)
        for host, count in enumerate(counts)
        for local in range(count)
    ]


def test_places_are_compared_once_all_have_met() -> None:
    promise = Promise({"a": 2, "b": 1, "c": 1}, 3, "cluster.hosts")
    for counts in ((2, 1, 1), (1, 2, 1)):  # torchrun's c10d rendezvous numbers hosts as they come
        check_places(promise, places(*counts), launched(4))
    for counts in ((2, 2), (4,), (1, 1, 1, 1), (3, 1)):
        with pytest.raises(
            WorldError, match=rf"\(a 2 \+ b 1 \+ c 1\) but torchrun started 4 on {len(counts)} "
        ):
            check_places(promise, places(*counts), launched(4))
    fewer = Promise({"a": 2, "b": 1, "c": 1}, 2, "cluster.hosts")
    check_places(fewer, places(2, 1), launched(3))
    with pytest.raises(WorldError, match="at least 2 of these hosts but torchrun started 2 on 1 host"):
        check_places(fewer, places(2), launched(2))
    check_places(Promise(), places(5), launched(5))


def test_sequence_parallel_groups_are_within_a_host() -> None:
    spec = Spec.model_construct(parallel=Parallel(sequence_parallel=2), cluster=None)
    check_hosts(spec, {"a": 2, "b": 4}, "--hostfile x")
    with pytest.raises(WorldError, match="sequence_parallel: 2 would put ranks 2-3, which split the same"):
        check_hosts(spec, {"a": 3, "b": 1}, "--hostfile x")
    machines = [place.machine for place in places(3, 1)]
    with pytest.raises(WorldError, match="set 1, or set sequence_parallel_across_hosts: true"):
        check_groups(spec.parallel, machines)
    check_groups(spec.parallel.model_copy(update={"sequence_parallel_across_hosts": True}), machines)


def test_two_ranks_with_one_device_are_refused() -> None:
    same = [RankPlace("node1", "x", 0), RankPlace("node1", "x", 0)]
    assert "ranks 0 and 1 both have LOCAL_RANK=0 on node1" in (shared_device(same) or "")
    assert shared_device([RankPlace("node1", "x", 0), RankPlace("node1", "y", 0)]) is None
    gpu, other = (Device("cuda", "NVIDIA H200", uuid=uuid) for uuid in ("GPU-1", "GPU-2"))
    both = [
        RankPlace("node1", "x", 0, other),
        RankPlace("node1", "x", 1, gpu),
        RankPlace("node1", "x", 2, gpu),
    ]
    assert "ranks 1 and 2 both have the GPU GPU-1 (NVIDIA H200) of node1" in (shared_device(both) or "")
    assert shared_device(both[:2]) is None


def test_the_rank_map() -> None:
    assert rank_map(places(2, 1)) == "rank map: 0-1 = node0 0-1, 2 = node1 0"
    turned = [RankPlace("b", "b", 1), RankPlace("b", "b", 0), RankPlace("a", "a", 0)]
    assert rank_map(turned) == "rank map: 0 = b 1, 1 = b 0, 2 = a 0"
    assert json.loads(rank_map_json(turned))[1] == {"rank": 1, "host": "b", "local_rank": 0, "device": "CPU"}


def test_the_devices() -> None:
    assert devices_lines(places(2), "torch 2.13.0") == ["devices: 2 × CPU; torch 2.13.0"]
    old = Device("cuda", "NVIDIA A100", 80 * 2**30, "sm_80", "550.1", "GPU-1")
    new = Device("cuda", "NVIDIA H200", 140 * 2**30, "sm_90", None, "GPU-2")
    line, warning = devices_lines(
        [RankPlace("a", "a", rank, old if rank == 2 else new) for rank in range(4)], "v"
    )
    assert line == (
        "devices: NVIDIA H200 (140.0 GiB, sm_90) on rank(s) 0-1, 3; "
        "NVIDIA A100 (80.0 GiB, sm_80, driver 550.1) on rank(s) 2; v"
    )
    assert warning.startswith("warning: the ranks have different devices")


@pytest.mark.parametrize(("launcher", "size", "cause"), [
    ("python", 1, "plain python starts one"),
    ("deepspeed", 1, "its --hostfile was left out"),
    ("torchrun", 8, "give --nnodes=2 and --nproc_per_node, or change"),
])  # fmt: skip
def test_other_world_size_is_refused_with_both_numbers(launcher: str, size: int, cause: str) -> None:
    with pytest.raises(WorldError, match=rf"expects 6 processes \(node1 4 \+ node2 2\).*{size}.*{cause}"):
        check_promise(cluster(HOSTS), launched(size, launcher))


def test_one_host_needs_no_hostfile() -> None:
    with pytest.raises(WorldError, match=r"give it, or --num_gpus 4 on that host\.$"):
        check_promise(cluster({"node1": 4}), launched(1, "deepspeed"))


@pytest.mark.parametrize(("words", "hostfile"), [
    (("--num_gpus", "2", "dsft/train.py", "--hostfile", "mine"), None),
    (("--master_port=1", "--hostfile=h", "--force_multi", "train.py", "a=b"), "h"),
    (("-H", "h", "train.py"), "h"),
])  # fmt: skip
def test_hostfile_of_deepspeeds_command(words: tuple[str, ...], hostfile: str | None) -> None:
    """Options after the script are the script's."""
    options = deepspeed_options(["/env/bin/python", "/env/bin/deepspeed", *words])
    assert options is not None and named_hostfile(options) == hostfile
    assert deepspeed_options(["/env/bin/python", "-m", "pytest"]) is None


HOST_PART = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("world", "message"),
    [({"node1": [0], "node2": [0, 1]}, "passed: node1 slots=1"), ({"node1": [0, 1, 2]}, "started 3")],
)
def test_world_info_of_deepspeeds_launch_py_has_all_hosts(
    tmp_path: Path, world: dict[str, list[int]], message: str
) -> None:
    """Under pdsh the launcher itself is on another machine, or no parent of its ranks."""
    module = tmp_path / "deepspeed" / "launcher"
    module.mkdir(parents=True)
    for folder in (module.parent, module):
        (folder / "__init__.py").touch()
    (module / "launch.py").write_text(HOST_PART)
    child = CHILD.replace("None,", "Cluster(hosts={'a': 1, 'b': 2}),").replace("sys.argv[1]", "3")
    listed = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    outcome = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.launch", child, f"--world_info={listed}"],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert message in outcome.stdout, outcome.stderr


CHILD = """
import sys
from dsft.errors import WorldError
from dsft.rank.environment import Launched
from dsft.rank.promise import check_promise
from dsft.spec.schema import Cluster
try:
    promise = check_promise(None, Launched("deepspeed", 0, int(sys.argv[1]), 0, "127.0.0.1", 1))
    print(f"passed: {promise.hostfile}")
except WorldError as error:
    print(error)
"""


@pytest.mark.parametrize(("text", "options", "world", "expected"), [
    (None, (), 1, "--hostfile hosts does not exist"),
    ("localhost slots=2\n", (), 1, "lists 2 processes but 1"),
    ("localhost slots=2\n", ("--num_gpus", "1"), 1, "passed"),
    ("localhost slots=2\n", (), 2, "passed"),
    ("nobody.invalid slots=2\n", (), 2, "names nobody.invalid alone, which is not this machine"),
])  # fmt: skip
def test_hostfile_on_the_parents_command_line_is_checked(
    tmp_path: Path, text: str | None, options: tuple[str, ...], world: int, expected: str
) -> None:
    """A parent that looks like the launcher (a script named deepspeed, with its options) starts the child."""
    if text is not None:
        (tmp_path / "hosts").write_text(text)
    launcher = tmp_path / "deepspeed"
    launcher.write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}, '{world}'])\n"
    )
    outcome = subprocess.run(
        [sys.executable, str(launcher), "--hostfile", "hosts", *options, "train.py"],
        cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True, text=True,
    )  # fmt: skip
    assert expected in outcome.stdout, outcome.stderr
