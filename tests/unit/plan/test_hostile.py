"""Thousands of host names and arguments, most of them made to run a command: none does, and every one that
is legal arrives byte for byte, through the generated scripts, run by a real bash."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsft.errors import SpecError
from dsft.generate.hostfile import of_words, parse
from dsft.generate.scripts import deepspeed_script
from dsft.generate.slurm import slurm_script
from dsft.generate.torchrun import torchrun_script
from dsft.spec.hosts import expand, is_host
from dsft.spec.schema import Cluster
from tests.unit.plan.hostile import ATTACKS, argument, armed
from tests.unit.plan.recording import Stage

EXAMPLES, AT_ONCE = 90, 12
QUICK = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)  # fmt: skip


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A canary that lives at the end: nothing of what was generated has run."""
    stage = Stage(tmp_path_factory.mktemp("hostile"))
    yield stage
    assert not (stage.root / "canary").exists()


arguments = st.lists(argument, min_size=AT_ONCE, max_size=AT_ONCE)


def test_the_attacks_are_real(tmp_path: Path) -> None:
    """A script that leaves one unquoted would run it."""
    ran = 0
    for attack in armed(ATTACKS, tmp_path):
        subprocess.run(["bash", "-c", os.fsencode(f"echo {attack}")], cwd=tmp_path, capture_output=True)
        ran += (tmp_path / "canary").exists()
        (tmp_path / "canary").unlink(missing_ok=True)
    assert ran > 12


@QUICK
@given(arguments)
def test_arguments_of_a_script_arrive(stage: Stage, texts: list[str]) -> None:
    """Given to `dsft generate`, they are in the scripts; given to a script, they follow."""
    texts = armed(texts, stage.root)
    generated, typed = texts[: AT_ONCE // 2], texts[AT_ONCE // 2 :]
    cluster = Cluster(hosts={"node1": 1, "node2": 1})
    place = ("x", "dsft/train.py", "specs/x.yaml", generated)
    arrived = [os.fsencode(word) for word in ["specs/x.yaml", *generated, *typed]]
    stage.run("x.deepspeed.sh", deepspeed_script(cluster, *place), typed)
    assert stage.asked("deepspeed") == [
        b"--master_port=29500", b"--hostfile", b"hostfiles/x", b"dsft/train.py", *arrived,
    ]  # fmt: skip
    stage.run("x.torchrun.sh", torchrun_script(cluster, *place), ["--node-rank=1", *typed])
    asked = stage.asked("torchrun")
    assert asked is not None and asked[6:] == [b"dsft/train.py", *arrived]
    stage.run("x.slurm.sh", str(slurm_script(cluster, *place)), typed)
    assert stage.asked("srun") == [b"--kill-on-bad-exit=1", b"python", b"dsft/train.py", *arrived]


@QUICK
@given(st.lists(argument, min_size=3, max_size=3), st.lists(argument.filter(str.isprintable), max_size=3))
def test_paths_and_variables_of_a_script_arrive(stage: Stage, texts: list[str], values: list[str]) -> None:
    train, spec, override = armed(texts, stage.root)
    env = {f"V{number}": value for number, value in enumerate(armed(values, stage.root))}
    cluster = Cluster(hosts={"localhost": 1}, env=env)
    place = ("x", train or "t", spec, [override])
    seen = Stage(
        stage.root / "seen", {"torchrun": 'for each in "${!V@}"; do printf "%s\\0" "${!each}"; done > got'}
    )
    seen.run("x.torchrun.sh", torchrun_script(cluster, *place))
    asked = seen.asked("torchrun")
    assert asked is not None and asked[5:] == [os.fsencode(word) for word in (train or "t", spec, override)]
    got = (seen.root / "got").read_bytes().split(b"\0")
    assert got[:-1] == [os.fsencode(value) for value in env.values()]


label = st.text("abyzAZ0189-", min_size=1, max_size=14).map(lambda text: text.strip("-") or "a")
good = st.lists(label, min_size=1, max_size=3).map(".".join).filter(is_host)
bad = st.one_of(argument, st.tuples(argument, good).map("".join), st.tuples(good, argument).map("".join))
names = st.lists(st.one_of(good, bad), min_size=AT_ONCE, max_size=AT_ONCE)


@QUICK
@given(names)
def test_names_are_hosts_or_refused(stage: Stage, texts: list[str]) -> None:
    """As words of `dsft hostfile`, as lines of a hostfile, as ranges; and in scripts those that are hosts."""
    taken: dict[str, int] = {}
    for name in armed(texts, stage.root):
        try:
            taken |= dict.fromkeys(expand(name), 1)
        except ValueError:
            assert not is_host(name)
            with pytest.raises(SpecError):
                of_words([f"{name}:1"], None)
            with pytest.raises(SpecError):
                parse(f"{name} slots=1\nn slots=0\n", "hosts")
    assert all(is_host(name) for name in taken)
    if not taken:
        return
    cluster = Cluster(hosts=taken)
    done = stage.run("x.torchrun.sh", torchrun_script(cluster, "x", "dsft/train.py", "s"), ["--node-rank=0"])
    assert done.returncode == 0, done.stderr
    asked = stage.asked("torchrun")
    if not set(taken) <= {"localhost"}:
        assert asked[4] == f"--master-addr={next(iter(taken))}".encode()
