"""The scripts for torchrun and Slurm, run by bash with programs that only write down what they are asked."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dsft.generate.files import files
from dsft.generate.slurm import clock, requests, slurm_script
from dsft.generate.torchrun import torchrun_script
from dsft.spec.load import load_spec
from dsft.spec.schema import Accelerator, Cluster
from tests.unit.plan.recording import Stage

ROOT = Path(__file__).resolve().parents[3]
TWO = Cluster(hosts={"node1": 8, "node2.rack": 4}, interface="ib0", env={"GREETING": "two  words; id"})
EVEN = Cluster(hosts={"node1": 8, "node2": 8})
RUN = ("x", "dsft/train.py", "specs/x.yaml")


def torchrun(stage: Stage, cluster: Cluster, *arguments: str) -> list[str]:
    done = stage.run("x.torchrun.sh", torchrun_script(cluster, *RUN), arguments)
    assert done.returncode == 0, done.stderr
    return words(stage, "torchrun")


def words(stage: Stage, program: str) -> list[str]:
    asked = stage.asked(program)
    assert asked is not None
    return [word.decode() for word in asked]


@pytest.mark.parametrize(("hostname", "addresses", "place"), [
    ("node1", "", 0),
    ("NODE1", "", 0),
    ("node1.cluster", "", 0),
    ("node2.rack", "", 1),
    ("host7", "10.0.0.2 172.16.0.1", 1),  # known by an address alone
])  # fmt: skip
def test_a_host_finds_its_place(tmp_path: Path, hostname: str, addresses: str, place: int) -> None:
    stage = Stage(
        tmp_path,
        {
            "hostname": f'[[ ${{1-}} == -I ]] && echo "{addresses}" || echo {hostname}',
            "getent": '[[ $2 == node1 ]] && echo "10.0.0.1 STREAM node1" || echo "10.0.0.2 STREAM x"',
            "torchrun": f'[[ $GREETING == "two  words; id" && $GLOO_SOCKET_IFNAME$PWD == ib0{tmp_path} ]]',
        },
    )
    asked = torchrun(stage, TWO, "train.seed=1", "name=a  b")
    assert asked == [
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "--nnodes=2", f"--node-rank={place}", f"--nproc-per-node={(8, 4)[place]}",
        "--master-addr=node1", "--master-port=29500",
        "dsft/train.py", "specs/x.yaml", "train.seed=1", "name=a  b",
    ]  # fmt: skip


def test_a_host_without_a_number_is_asked_for_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"hostname": "echo elsewhere", "getent": "exit 2"})
    done = stage.run("x.torchrun.sh", torchrun_script(TWO, *RUN))
    assert done.returncode == 69 and stage.asked("torchrun") is None
    assert "this host, elsewhere, is none of node1 node2.rack; give --node-rank=N" in done.stderr
    assert torchrun(stage, TWO, "--node-rank=1", "train.seed=1")[2:4] == [
        "--node-rank=1",
        "--nproc-per-node=4",
    ]
    for wrong in ("2", "-1", "01", "x", "", "a[$(touch hit)]", "99999999999999999999"):
        done = stage.run("x.torchrun.sh", torchrun_script(TWO, *RUN), [f"--node-rank={wrong}"])
        assert done.returncode == 69 and stage.asked("torchrun") is None
    assert not (tmp_path / "hit").exists()


@pytest.mark.parametrize(("environ", "meeting"), [
    ({}, ["--standalone", "--local-addr=127.0.0.1"]),
    ({"MASTER_PORT": "7"}, ["--master-addr=127.0.0.1", "--master-port=7"]),
])  # fmt: skip
def test_this_machine_alone_needs_no_place(
    tmp_path: Path, environ: dict[str, str], meeting: list[str]
) -> None:
    stage = Stage(tmp_path, {"hostname": "exit 1"})
    stage.run("x.torchrun.sh", torchrun_script(Cluster(hosts={"localhost": 2}), *RUN), (), environ)
    asked = words(stage, "torchrun")
    assert asked[1:6] == ["--nnodes=1", "--nproc-per-node=2", *meeting, "dsft/train.py"]


def test_an_elastic_run_meets_at_the_first_host(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"hostname": "echo node2.rack"})
    asked = torchrun(stage, Cluster(hosts={"fe80::1": 8, "node2.rack": 4}, min_hosts=1))
    assert asked[1:7] == [
        "--nnodes=1:2", "--nproc-per-node=4", "--max-restarts=3",
        "--rdzv-backend=c10d", "--rdzv-id=x", "--rdzv-endpoint=[fe80::1]:29500",
    ]  # fmt: skip


def test_a_job_requests_what_the_spec_names() -> None:
    gpus = ["job-name=x", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8"]
    assert list(requests(EVEN, "x")) == [
        *gpus, "signal=USR1@300", "requeue", "open-mode=append", "output=%x-%j.out",
    ]  # fmt: skip
    cpu = Cluster(hosts={"a": 2}, accelerator=Accelerator(name="cpu"), time_limit=600)
    assert list(requests(cpu, "x"))[:5] == [
        "job-name=x", "nodes=1", "ntasks-per-node=2", "time=0:10:00", "signal=USR1@120",
    ]  # fmt: skip
    assert clock(90_061) == "25:01:01"
    assert slurm_script(TWO, *RUN) is None


@pytest.mark.parametrize(("code", "again"), [(0, False), (75, True), (69, False), (143, False)])
def test_a_job_ends_as_its_ranks_and_comes_back_when_they_were_stopped(
    tmp_path: Path, code: int, again: bool
) -> None:
    stage = Stage(tmp_path, {"srun": f"exit {code}"})
    script = slurm_script(EVEN, *RUN, ["train.seed=1"])
    assert script is not None
    done = stage.run("x.slurm.sh", script, ["name=a  b"], {"SLURM_JOB_ID": "7"})
    assert done.returncode == code, done.stderr
    assert words(stage, "srun") == [
        "--kill-on-bad-exit=1", "python", "dsft/train.py", "specs/x.yaml", "train.seed=1", "name=a  b",
    ]  # fmt: skip
    assert stage.asked("scontrol") == ([b"requeue", b"7"] if again else None)


def test_a_job_that_cannot_requeue_is_to_be_submitted_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"srun": "exit 75", "scontrol": "exit 1"})
    done = stage.run("x.slurm.sh", str(slurm_script(EVEN, *RUN)), (), {"SLURM_JOB_ID": "7"})
    assert done.returncode == 75 and "submit this script again" in done.stderr
    done = stage.run("x.slurm.sh", str(slurm_script(EVEN, *RUN)), (), {"SLURM_SUBMIT_DIR": "/"})
    assert done.returncode == 66 and "has no dsft/train.py; submit this script from" in done.stderr
    assert stage.asked("srun") is None
    done = stage.run("x.slurm.sh", str(slurm_script(EVEN, *RUN)), (), {"SLURM_SUBMIT_DIR": ""})
    assert done.returncode != 0 and "submit this script with sbatch" in done.stderr


def test_requests_come_before_the_first_command() -> None:
    """sbatch reads no further."""
    lines = str(slurm_script(EVEN, *RUN)).splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert sum(line.startswith("#SBATCH") for line in lines[:first]) == len(requests(EVEN, "x"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    hostile = "it's $HOME; `id`"
    cluster = Cluster(hosts={"a": 1, "b": 1}, env={"A": hostile}, time_limit=60, min_hosts=1)
    for number, text in enumerate(
        [torchrun_script(TWO, "x", hostile, hostile, [hostile]), torchrun_script(cluster, *RUN)]
        + [str(slurm_script(cluster, "x", hostile, hostile, [hostile]))]
    ):
        (tmp_path / f"{number}.sh").write_text(text)
    paths = [*tmp_path.glob("*.sh"), *(ROOT / "scripts/launch").glob("*.sh")]
    # SC2016: that nothing expands between single quotes is what they are for.
    done = subprocess.run(["shellcheck", "-e", "SC2016", *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_scripts_follow_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "specs" / "two_nodes.yaml"
    every = files(load_spec(path), path, ROOT)
    assert {Path(name).suffixes[0] for name in every if name.endswith(".sh")} == {
        ".deepspeed", ".torchrun", ".slurm",
    }  # fmt: skip
    uneven = ["cluster.hosts={node1: 1, node2: 2}", "train.global_batch_size=24", "train.micro_batch_size=8"]
    assert not any(".slurm" in name for name in files(load_spec(path, uneven), path, ROOT))
    assert not any(".torchrun" in name for name in files(load_spec(ROOT / "specs/zero1.yaml"), path, ROOT))
