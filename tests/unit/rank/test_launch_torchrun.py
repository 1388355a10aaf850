"""Flags and variables that name hosts by number become torchrun's options."""

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsft.errors import WorldError
from dsft.rank.torchrun import torchrun_argv
from tests.launching import ROOT, end_group

FLAGS = "--num_nodes 2 --node_rank 1 --master_addr node1 --master_port 7 --num_gpus 8".split()
VARIABLES = {"NPROC_PER_NODE": "8", "NNODES": "2", "NODE_RANK": "1", "ADDR": "node1", "PORT": "7"}
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
OPTIONS = [
    SIGNALS, "--nnodes", "2", "--nproc_per_node", "8", "--node_rank", "1",
    "--master_addr", "node1", "--master_port", "7",
]  # fmt: skip
BEHIND = ["specs/x.yaml", "train.seed=1", "--strict"]


@pytest.mark.parametrize(("arguments", "environ"), [
    ([*FLAGS, *BEHIND], {}),
    ([BEHIND[0], *FLAGS, *BEHIND[1:]], {}),
    ([word.replace("_", "-") if word.startswith("--") else word for word in FLAGS] + BEHIND, {}),
    (BEHIND, VARIABLES),
    ([*FLAGS, *BEHIND], VARIABLES),
    ([*FLAGS[:4], *FLAGS[8:], *BEHIND], {"MASTER_ADDR": "node1", "MASTER_PORT": "7"}),
    (BEHIND, VARIABLES | {"ADDR": "", "MASTER_ADDR": "node1"}),
    (BEHIND, VARIABLES | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}),
])  # fmt: skip
def test_flags_and_variables_become_torchruns_options(arguments: list[str], environ: dict[str, str]) -> None:
    argv = torchrun_argv(arguments, environ, "train.py")
    assert argv == [sys.executable, "-m", "torch.distributed.run", *OPTIONS, "train.py", *BEHIND]


@pytest.mark.parametrize(("arguments", "environ", "meeting"), [
    (["--num_gpus=2"], {}, ["--standalone", "--local_addr", "127.0.0.1"]),
    ([], {"NPROC_PER_NODE": "2"}, ["--standalone", "--local_addr", "127.0.0.1"]),
    (["--num_gpus=2", "--master_port=7"], {},
     ["--node_rank", "0", "--master_addr", "127.0.0.1", "--master_port", "7"]),
])  # fmt: skip
def test_one_host_needs_only_its_processes(
    arguments: list[str], environ: dict[str, str], meeting: list[str]
) -> None:
    argv = torchrun_argv(arguments, environ, "train.py")
    assert argv[3:] == [SIGNALS, "--nnodes", "1", "--nproc_per_node", "2", *meeting, "train.py"]


@pytest.mark.parametrize("environ", [{}, {"PORT": "80", "ADDR": "here"}, VARIABLES | {"RANK": "0"}])
def test_without_settings_nothing_is_started(environ: dict[str, str]) -> None:
    assert torchrun_argv(BEHIND, environ, "train.py") is None


@pytest.mark.parametrize(("arguments", "environ", "message"), [
    (FLAGS[:2], {}, "--num_nodes is given but not --num_gpus"),
    (["--num_nodes=2", "--num_gpus=1"], {}, "--num_gpus is given but not --node_rank and --master_addr"),
    ([], {"NNODES": "2"}, "NNODES is given but not NPROC_PER_NODE"),
    ([], {"NODE_RANK": "0"}, "NODE_RANK is given but not NPROC_PER_NODE"),
    ([], {"NPROC_PER_NODE": "2", "NODE_RANK": "1"}, "NPROC_PER_NODE is given but not NNODES"),
    ([], VARIABLES | {"ADDR": ""}, "NPROC_PER_NODE is given but not ADDR"),
    ([], VARIABLES | {"NODE_RANK": "2"}, "NODE_RANK is 2, but 2 hosts are numbered from 0"),
    ([], VARIABLES | {"NNODES": "0"}, "NNODES is 0, but it must be at least 1"),
    ([], VARIABLES | {"NPROC_PER_NODE": "all"}, "NPROC_PER_NODE='all' in the environment is not a whole"),
    ([], VARIABLES | {"PORT": "99999"}, "PORT is 99999, which is not a port"),
    (FLAGS, VARIABLES | {"NNODES": "4"}, "--num_nodes 2 and NNODES=4 contradict"),
    (FLAGS, {"RANK": "0", "WORLD_SIZE": "2"}, "--num_gpus is given after dsft/train.py, but a launcher"),
    ([], VARIABLES | {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "16"}, "NNODES says 2 and SLURM_NTASKS=16"),
    (FLAGS, {"OMPI_COMM_WORLD_RANK": "0"}, "--node_rank says 1 and OMPI_COMM_WORLD_RANK=0"),
])  # fmt: skip
def test_incomplete_and_contradictory_settings_are_refused(
    arguments: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(WorldError, match=message):
        torchrun_argv(arguments, environ, "train.py")


def test_process_becomes_torchrun(tmp_path: Path) -> None:
    """A module in torchrun's place prints its options."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "run.py").write_text("import sys\nprint(sys.argv[1:])\n")
    command = [sys.executable, "dsft/train.py", "--num_gpus", "2", "cluster.hosts={localhost: 3}"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    line, options = ended.stdout.splitlines()
    assert line.startswith(
        "launcher: this process becomes torchrun: torch.distributed.run --signals-to-handle="
    )
    found = ast.literal_eval(options)
    assert found[:5] == [SIGNALS, "--nnodes", "1", "--nproc_per_node", "2"]
    assert found[-1] == "cluster.hosts={localhost: 3}" and ended.returncode == 0


RANK = """
import os, sys, time
from dsft.rank.stopping import Stopping
stopping = Stopping()
stopping.stage = "train"
stopping.listen()
print("listens", flush=True)
while stopping.reason is None:
    time.sleep(0.05)
print("asked by", stopping.reason, flush=True)
os._exit(75)
"""


def test_torchrun_passes_sigusr1_on_with_the_option(tmp_path: Path) -> None:
    """Slurm sends it ahead of a job's time; without the option it kills torchrun, and its ranks with it."""
    (tmp_path / "rank.py").write_text(RANK)
    argv = torchrun_argv(["--num_gpus=1"], {}, str(tmp_path / "rank.py"))
    assert argv is not None
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as torchrun:  # fmt: skip
        try:
            assert torchrun.stdout is not None and torchrun.stdout.readline() == "listens\n"
            torchrun.send_signal(signal.SIGUSR1)
            assert torchrun.stdout.read() == "asked by SIGUSR1\n"
            assert torchrun.wait() == 1
        finally:
            end_group(torchrun.pid)


@pytest.mark.parametrize("address", ["-x", "--no-python", "$(id)", "a b", "node1;id"])
def test_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(WorldError, match="ADDR is .* neither a host name nor"):
        torchrun_argv(BEHIND, VARIABLES | {"ADDR": address}, "train.py")
    with pytest.raises(WorldError, match="--master_addr is .* neither a host name nor"):
        torchrun_argv([f"--master_addr={address}", *FLAGS[:4], *FLAGS[6:], *BEHIND], {}, "train.py")
