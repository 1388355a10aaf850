"""What the launchers' variables mean, and which are refused."""

import pickle

import pytest

from dsft.errors import Problem, SpecError, WorldError
from dsft.rank.environment import RENDEZVOUS, detect

FIVE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}

TORCHRUN = FIVE | {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

DEEPSPEED = FIVE | {"CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}

SRUN = {
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NODEID": "1",
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
}  # fmt: skip

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1077084161",
    "OMPI_MCA_orte_hnp_uri": "1077084160.0;tcp://10.77.0.1,192.168.3.1:53515;tcp6://[fd00::2]:59243",
    "OMPI_MCA_orte_local_daemon_uri": "1077084160.1;tcp://10.77.0.2:40000",
}  # fmt: skip


@pytest.mark.parametrize(("environ", "launcher", "address"), [
    (FIVE, "environment", "node1"),
    (TORCHRUN, "torchrun", "node1"),
    (DEEPSPEED, "deepspeed", "node1"),
    (SRUN, "srun", "node1"),
    (SRUN | {"MASTER_ADDR": "ib1", "MASTER_PORT": "7"}, "srun", "ib1"),
    (MPIRUN, "mpirun", "10.77.0.1"),
    (MPIRUN | {"MASTER_ADDR": "ib1"}, "mpirun", "ib1"),
    (SRUN | TORCHRUN, "torchrun", "node1"),
    (SRUN | DEEPSPEED, "deepspeed", "node1"),
    (SRUN | MPIRUN, "mpirun", "10.77.0.1"),  # mpirun starts its daemons by srun
    (SRUN | FIVE, "environment", "node1"),
    (MPIRUN | FIVE, "environment", "node1"),
    (SRUN | FIVE | {"WORLD_SIZE": "8", "DSFT_JOB": "x"}, "dsft launch", "node1"),
])  # fmt: skip
def test_every_launcher_gives_the_same_place(environ: dict[str, str], launcher: str, address: str) -> None:
    launched = detect(environ)
    assert (launched.launcher, launched.master_addr) == (launcher, address)
    assert (launched.rank, launched.local_rank) == (3, 1)
    assert launched.world_size == int(environ.get("WORLD_SIZE", 4)) and 0 < launched.master_port < 32768
    assert f"launcher: {launcher} (" in launched.line() and f"at {address} port" in launched.line()
    assert str(launched.master_port) == environ.get("MASTER_PORT", str(launched.master_port))
    assert launched.hosts == (2 if launcher in ("torchrun", "deepspeed", "srun") else None)


def test_all_ranks_of_a_job_meet_at_one_port_and_another_job_at_another() -> None:
    first = detect(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first.master_port == detect(SRUN).master_port
    ports = {
        detect(SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port
        for job in ("17", "18", "19")
        for step in "012"
    }
    assert len(ports) == 9


@pytest.mark.parametrize(("nodes", "first"), [
    ("node1", "node1"),
    ("node[01-16]", "node01"),
    ("node[3,1-2],gpu7", "node3"),
    ("gpu[2-3]-ib,cpu1", "gpu2-ib"),
    ("rack[2-3]n[1-4]", "rack2n1"),
    ("b1,a1", "b1"),
])  # fmt: skip
def test_slurms_first_host_is_where_rank_0_listens(nodes: str, first: str) -> None:
    assert detect(SRUN | {"SLURM_STEP_NODELIST": nodes}).master_addr == first


def test_slurms_uneven_nodes() -> None:
    uneven = SRUN | {"SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_NODEID": "2"}
    launched = detect(uneven)
    assert (launched.slots, launched.hosts, launched.local_world_size) == ((1, 1, 2), 3, 2)


def test_single_process_exports_the_rendezvous() -> None:
    launched = detect({})
    environ: dict[str, str] = {}
    launched.export(environ)
    assert set(environ) == set(RENDEZVOUS)
    assert environ["WORLD_SIZE"] == "1" and int(environ["MASTER_PORT"]) > 0
    assert launched.line() == "launcher: none, python alone: 1 process"


@pytest.mark.parametrize(("environ", "missing"), [
    *((FIVE, name) for name in RENDEZVOUS),
    *((SRUN, name) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")),
    *((MPIRUN, name) for name in list(MPIRUN)[:3]),
])  # fmt: skip
def test_half_a_set_is_refused_by_name(environ: dict[str, str], missing: str) -> None:
    with pytest.raises(WorldError, match=f"not {missing}"):
        detect({name: value for name, value in environ.items() if name != missing})


@pytest.mark.parametrize(("environ", "message"), [
    (FIVE | {"RANK": "4"}, "RANK=4, LOCAL_RANK=1 and WORLD_SIZE=4 contradict"),
    (FIVE | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
    (FIVE | {"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a whole number"),
    (FIVE | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
    (SRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port"),
    (FIVE | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1, LOCAL_WORLD_SIZE=1 and WORLD_SIZE=4 contradict"),
    (TORCHRUN | {"GROUP_WORLD_SIZE": "5"}, "GROUP_WORLD_SIZE=5, LOCAL_WORLD_SIZE=2 and WORLD_SIZE=4"),
    (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, "GROUP_WORLD_SIZE=1, LOCAL_WORLD_SIZE=2 and WORLD_SIZE=4"),
    (DEEPSPEED | {"LOCAL_SIZE": "9"}, "LOCAL_RANK=1, LOCAL_SIZE=9 and WORLD_SIZE=4 contradict"),
    (SRUN | FIVE | {"RANK": "2"}, r"RANK=2 \(the variables set by hand\) and SLURM_PROCID=3 \(the la"),
    (SRUN | FIVE | {"WORLD_SIZE": "8"}, "WORLD_SIZE=8 .* and SLURM_NTASKS=4"),
    (MPIRUN | FIVE | {"RANK": "0"}, "RANK=0 .* and OMPI_COMM_WORLD_RANK=3"),
    (FIVE | {"PMI_SIZE": "2", "PMI_RANK": "1"}, "RANK=3 .* and PMI_RANK=1"),
    (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4, SLURM_LOCALID=1 and SLURM_NTASKS=4 contradict"),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)"}, "SLURM_STEP_TASKS_PER_NODE=3.x2. and SLURM_NTASKS=4"),
    (SRUN | {"SLURM_STEP_NUM_NODES": "3"}, "on 3 nodes contradict"),
    (SRUN | {"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST='node.1-' is not a list of hosts"),
    (SRUN | {"SLURM_STEP_NODELIST": "-oProxyCommand=x"}, "is not a list of hosts"),
    (SRUN | {"SLURM_STEP_NODELIST": ""}, "the address of rank 0 is unknown; set MASTER_ADDR"),
    (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_RANK": "x"}, "OMPI_COMM_WORLD_LOCAL_RANK='x'"),
    (MPIRUN | {"OMPI_MCA_orte_hnp_uri": ""}, "MASTER_ADDR and OMPI_MCA_orte_hnp_uri are not set"),
    (MPIRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
     r"rank 0 is not on the host where mpirun runs \(10.77.0.1\).*-x MASTER_ADDR=HOST"),
])  # fmt: skip
def test_contradictions_are_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        detect(environ)


@pytest.mark.parametrize("environ", [
    TORCHRUN | {"NNODES": "2", "NPROC_PER_NODE": "2", "NODE_RANK": "0"},
    SRUN | {"CUDA_VISIBLE_DEVICES": "0,1"},
    SRUN | {"CUDA_VISIBLE_DEVICES": "0", "DS_ACCELERATOR": "cpu"},
])  # fmt: skip
def test_consistent_variables(environ: dict[str, str]) -> None:
    assert detect(environ).world_size == 4


@pytest.mark.parametrize(("environ", "message"), [
    # in sbatch's script, and in salloc's shell
    ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2 .*put srun"),
    ({"SLURM_STEP_ID": "4294967290", "SLURM_NNODES": "2"}, "SLURM_NNODES=2 .*put srun"),
    ({"PMI_SIZE": "2"}, "PMI_SIZE=2 says that mpiexec started this process"),
])  # fmt: skip
def test_one_process_of_many_does_not_train_alone(environ: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        detect(environ)
    assert detect(dict.fromkeys(environ, "1") | {"SLURM_STEP_ID": "4294967291"}).world_size == 1


def test_errors_travel_between_ranks() -> None:
    error = SpecError("Two mistakes.", [Problem("train", "no", 3), Problem("optim", "no")])
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SpecError) and str(copy) == str(error) and copy.problems == error.problems
