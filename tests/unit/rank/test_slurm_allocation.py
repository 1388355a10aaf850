"""Slurm's variables as Slurm 22.05 writes them, and hostfiles made of them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsft.cli import app
from dsft.commands.hostfile import hosts_of, write_hostfile
from dsft.errors import DsftError, SpecError, StorageError, WorldError
from dsft.generate.hostfile import of_words, parse
from dsft.rank.slurm import allocation

NODES = {"SLURM_JOB_NODELIST": "n[1-3],m"}


@pytest.mark.parametrize(("environ", "slots", "counts"), [
    ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, None, [2, 2, 2, 1]),
    ({"SLURM_TASKS_PER_NODE": "1,2,3,4"}, None, [1, 2, 3, 4]),
    ({"SLURM_NTASKS_PER_NODE": "2"}, None, [2, 2, 2, 2]),
    ({"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "8"}, None, [8] * 4),
    ({"SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_GPUS_ON_NODE": "0"}, None, [2] * 4),
    ({"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": "1"}, None, [4] * 4),
    ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, None, [6] * 4),
    ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, 5, [5] * 4),
    ({}, 3, [3] * 4),
])  # fmt: skip
def test_slots_of_a_slurm_node(environ: Mapping[str, str], slots: int | None, counts: list[int]) -> None:
    found = allocation(NODES | environ, slots).hosts
    assert list(found.items()) == list(zip(["n1", "n2", "n3", "m"], counts, strict=True))


@pytest.mark.parametrize(("environ", "kind", "words"), [
    ({}, WorldError, "SLURM_JOB_NODELIST is not set, so this is not a Slurm job"),
    (NODES, WorldError, "give --processes N"),
    (NODES | {"SLURM_TASKS_PER_NODE": "2(x3)"}, SpecError, "is for 3 hosts, SLURM_JOB_NODELIST has 4"),
    (NODES | {"SLURM_TASKS_PER_NODE": "2(x3),0"}, SpecError, "such as 2(x3),1"),
    (NODES | {"SLURM_TASKS_PER_NODE": "2(x3),1; id"}, SpecError, "such as 2(x3),1"),
    (NODES | {"SLURM_TASKS_PER_NODE": "2(x999999)"}, SpecError, "such as 2(x3),1"),
    (NODES | {"SLURM_GPUS_ON_NODE": "many"}, SpecError, "'many' is not a number of GPUs"),
    ({"SLURM_JOB_NODELIST": "-oProxyCommand=id"}, SpecError, "is neither a host name"),
    ({"SLURM_JOB_NODELIST": "n[1-2],n2"}, SpecError, "n2 is in"),
    ({"SLURM_JOB_NODELIST": "n[1-2"}, SpecError, "is not a list of hosts"),
])  # fmt: skip
def test_invalid_slurm_variables_are_refused(
    environ: Mapping[str, str], kind: type[DsftError], words: str
) -> None:
    with pytest.raises(kind) as error:
        allocation(environ)
    assert words in str(error.value)


def test_hosts_and_slots_from_words() -> None:
    assert of_words(["node[01-02]:8", "fe80::1:4", "a,b:1"], None) == {
        "node01": 8, "node02": 8, "fe80::1": 4, "a": 1, "b": 1,
    }  # fmt: skip
    assert of_words(["node[01-02]", "a"], 2) == {"node01": 2, "node02": 2, "a": 2}


@pytest.mark.parametrize(("words", "reason"), [
    (["node1:0"], "a host needs at least 1 slot"),
    (["node1"], "has no number of slots"),
    (["node1:8x"], "'8x' is not a number of slots"),
    (["node1:8 trailing"], "'8 trailing' is not a number of slots"),
    (["node1:-1"], "'-1' is not a number of slots"),
    (["node[1-2]:1", "NODE2:1"], "NODE2 is given twice"),
    (["-oProxyCommand=id:1"], "is neither a host name"),
    (["a\n:1"], "is neither a host name"),
])  # fmt: skip
def test_invalid_words_for_hosts_are_refused(words: list[str], reason: str) -> None:
    with pytest.raises(SpecError) as error:
        of_words(words, None)
    assert reason in str(error.value)


def test_slots_given_twice_are_refused() -> None:
    with pytest.raises(SpecError, match="has a number of slots, as --processes 4 does"):
        of_words(["node1:8"], 4)
    assert of_words(["fe80::1"], 4) == {"fe80::1": 4}


def test_a_hostfile_that_differs_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "hostfiles" / "two"
    write_hostfile({"a": 1, "b": 2}, path, force=False)
    assert parse(path.read_text(), "two") == {"a": 1, "b": 2}
    write_hostfile({"a": 1, "b": 2}, path, force=False)
    with pytest.raises(StorageError, match="has other content"):
        write_hostfile({"a": 2}, path, force=False)
    assert parse(path.read_text(), "two") == {"a": 1, "b": 2}
    write_hostfile({"a": 2}, path, force=True)
    assert path.read_text() == "a slots=2\n"
    with pytest.raises(StorageError, match="cannot be written"):
        write_hostfile({"a": 1}, tmp_path, force=True)


def test_the_hosts_come_from_one_place() -> None:
    for words, from_slurm in (((), False), (("a:1",), True)):
        with pytest.raises(SpecError, match="or --from-slurm"):
            hosts_of(words, NODES, None, from_slurm=from_slurm)


def test_the_command(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["hostfile", "node[1-2]:8"])
    assert (done.exit_code, done.output) == (0, "node1 slots=8\nnode2 slots=8\n")
    environ = NODES | {"SLURM_TASKS_PER_NODE": "2(x3),1"}
    out = tmp_path / "hosts"
    done = CliRunner().invoke(app, ["hostfile", "--from-slurm", "--out", str(out)], env=environ)
    assert done.exit_code == 0 and "4 hosts, 7 processes" in done.output
    assert out.read_text().endswith("m slots=1\n")
