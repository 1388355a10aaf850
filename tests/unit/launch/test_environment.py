"""What the launchers' variables mean, and which are refused."""

from __future__ import annotations

import pickle

import pytest

from dsft.errors import Problem, SpecError, WorldError
from dsft.launch.environment import RENDEZVOUS, detect

FIVE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_the_five_variables_are_read() -> None:
    launched = detect(FIVE)
    assert (launched.rank, launched.world_size, launched.local_rank) == (3, 4, 1)
    assert (launched.master_addr, launched.master_port, launched.launcher) == ("node1", 29500, "environment")


@pytest.mark.parametrize(
    ("mark", "launcher"), [("TORCHELASTIC_RUN_ID", "torchrun"), ("CROSS_RANK", "deepspeed")]
)
def test_the_launcher_is_told_apart(mark: str, launcher: str) -> None:
    assert detect(FIVE | {mark: "0"}).launcher == launcher


def test_a_process_alone_exports_what_deepspeed_looks_for() -> None:
    launched = detect({})
    environ: dict[str, str] = {}
    launched.export(environ)
    assert set(environ) == set(RENDEZVOUS)
    assert environ["WORLD_SIZE"] == "1" and int(environ["MASTER_PORT"]) > 0


@pytest.mark.parametrize("missing", RENDEZVOUS)
def test_half_a_set_is_refused_by_name(missing: str) -> None:
    environ = {name: value for name, value in FIVE.items() if name != missing}
    with pytest.raises(WorldError, match=f"not {missing}"):
        detect(environ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4, LOCAL_RANK=1 and WORLD_SIZE=4 contradict"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment is not a whole number"),
    ],
)
def test_contradictions_are_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        detect(FIVE | change)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_many_processes_of_an_unread_launcher_do_not_train_beside_each_other(name: str) -> None:
    with pytest.raises(WorldError, match=f"{name}=2"):
        detect({name: "2"})
    assert detect({name: "1"}).world_size == 1


def test_errors_travel_between_ranks() -> None:
    error = SpecError("Two mistakes.", [Problem("train", "no", 3), Problem("optim", "no")])
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SpecError) and str(copy) == str(error) and copy.problems == error.problems
