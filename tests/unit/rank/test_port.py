"""Where another program listens at the port, the error names the flag or variable that chooses another."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsft.errors import WorldError
from dsft.rank.environment import Launched
from dsft.rank.launched import check_port
from dsft.system.host import free_port


def launched(launcher: str, port: int, rank: int = 0) -> Launched:
    return Launched(launcher, rank, 2, rank, "127.0.0.1", port)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


@pytest.mark.parametrize(("launcher", "environ", "way_out"), [
    ("deepspeed", {}, "give deepspeed another one (--master_port N)"),
    ("deepspeed", {"DSFT_JOB": "j.0"}, "unset MASTER_PORT, so that dsft launch finds a free one"),
    ("environment", {}, "set MASTER_PORT to another one, for every rank"),
    ("srun", {}, "set MASTER_PORT to another one, for every rank"),
    ("mpirun", {}, "set MASTER_PORT to another one, for every rank"),
    ("python", {}, "start again"),
])  # fmt: skip
def test_error_of_a_taken_port_names_what_chooses_it(
    taken: int, launcher: str, environ: dict[str, str], way_out: str
) -> None:
    with pytest.raises(WorldError) as refused:
        check_port(launched(launcher, taken), environ)
    output = str(refused.value)
    assert output.startswith(f"port {taken}, at which rank 0 is to listen for the others, is taken")
    assert way_out in output and refused.value.exit_code == 69


def test_a_free_port_and_one_that_is_not_rank_0s_are_no_matter(taken: int) -> None:
    check_port(launched("deepspeed", free_port()), {})
    check_port(launched("deepspeed", taken, rank=1), {})
    check_port(launched("torchrun", taken), {})  # it listens there itself


def test_a_port_whose_connections_linger_is_free() -> None:
    """As after a run that has just ended: rank 0's side of them waits for a minute (TIME_WAIT)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            client.recv(1)
    check_port(launched("deepspeed", port), {})


def test_a_rank_ends_with_69_and_one_sentence(taken: int, tmp_path: Path) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "dsft/train.py", "specs/quickstart.yaml", f"output_dir={tmp_path}"],
        env={**os.environ, **place, "MASTER_PORT": str(taken)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 69
    assert done.stderr.startswith(f"error: port {taken}, ") and done.stderr.count("\n") == 1
