import os
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from dsft.generate.scripts import deepspeed_argv, deepspeed_script, environment, environment_text
from dsft.spec.schema import Cluster
from tests.unit.plan.recording import Stage

TWO = Cluster(hosts={"node1": 8, "node2": 8})


def argv(cluster: Cluster | None) -> list[str]:
    return deepspeed_argv(cluster, "hostfiles/x", "dsft/train.py", "specs/x.yaml")


def test_the_launchers_arguments() -> None:
    run = ["dsft/train.py", "specs/x.yaml"]
    assert argv(None) == ["deepspeed", *run]
    assert argv(TWO) == ["deepspeed", "--hostfile", "hostfiles/x", *run]
    here = ["--no_ssh_check", "--master_addr", "127.0.0.1"]
    assert argv(Cluster(hosts={"localhost": 8})) == ["deepspeed", "--hostfile", "hostfiles/x", *here, *run]
    assert argv(Cluster(hosts={"node7": 8})) == [
        "deepspeed", "--hostfile", "hostfiles/x", "--force_multi", *run,
    ]  # fmt: skip


def test_the_interface_is_named_for_both_backends_and_the_spec_has_the_last_word() -> None:
    cluster = Cluster(
        hosts={"a": 1, "b": 1}, interface="eth0", env={"NCCL_SOCKET_IFNAME": "ib0", "HF_HUB_OFFLINE": "1"}
    )
    expected = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0", "HF_HUB_OFFLINE": "1"}
    assert environment(cluster) == expected
    assert environment_text(cluster) == "NCCL_SOCKET_IFNAME=ib0\nGLOO_SOCKET_IFNAME=eth0\nHF_HUB_OFFLINE=1\n"
    assert environment_text(Cluster(hosts={"localhost": 1}, interface="eth0")) is None
    assert environment_text(TWO) is None


def run_script(root: Path, script: str, *arguments: str) -> dict[str, Any]:
    """Run the script; return the folder, arguments and variables of its `deepspeed`."""
    stage = Stage(root, {"deepspeed": f"pwd > {shlex.quote(str(root))}/cwd; env -0 > asked/env"})
    given = {name: value for name, value in os.environ.items() if name == "MASTER_PORT"}
    done = stage.run("x.deepspeed.sh", script, arguments, given)
    assert done.returncode == 0, done.stderr
    env = dict(entry.decode().split("=", 1) for entry in stage.asked("env") or [])
    argv = [word.decode() for word in stage.asked("deepspeed") or []]
    return {"argv": argv, "cwd": (root / "cwd").read_text().strip(), "env": env}


def test_the_script_runs_from_the_root_and_passes_what_the_user_adds(tmp_path: Path) -> None:
    root = tmp_path / "a root's folder"
    hostile = "it's $HOME; `id`"
    cluster = Cluster(hosts={"localhost": 2}, interface="lo", env={"GREETING": "two words; echo"})
    script = deepspeed_script(cluster, "x", "dsft/train.py", f"specs/{hostile}.yaml")
    seen = run_script(root, script, "parallel.zero_stage=3", "name=a b")
    assert Path(seen["cwd"]).samefile(root)
    assert seen["argv"][-3:] == [f"specs/{hostile}.yaml", "parallel.zero_stage=3", "name=a b"]
    assert seen["env"]["GREETING"] == "two words; echo" and seen["env"]["GLOO_SOCKET_IFNAME"] == "lo"


def test_variables_for_other_hosts_go_through_deepspeeds_file(tmp_path: Path) -> None:
    cluster = Cluster(hosts={"a": 1, "b": 1}, env={"HF_HUB_OFFLINE": "1"})
    seen = run_script(tmp_path, deepspeed_script(cluster, "x", "dsft/train.py", "specs/x.yaml"))
    assert Path(seen["env"]["DS_ENV_FILE"]) == tmp_path / "scripts/launch/x.env"
    assert "DS_ENV_FILE" not in deepspeed_script(TWO, "x", "dsft/train.py", "specs/x.yaml")


def test_a_script_fails_with_its_run(tmp_path: Path) -> None:
    script = deepspeed_script(None, "x", "dsft/train.py", "specs/x.yaml")
    assert "set -euo pipefail" in script.splitlines()
    assert shlex.split(script.splitlines()[-1])[0] == "exec"


@pytest.mark.parametrize("cluster", [None, Cluster(hosts={"localhost": 2})])
def test_on_this_machine_a_script_finds_a_free_port(tmp_path: Path, cluster: Cluster | None) -> None:
    script = deepspeed_script(cluster, "x", "dsft/train.py", "specs/x.yaml")
    with socket.create_server(("", 0)) as taken:
        ports = {port_of(run_script(tmp_path / str(number), script)) for number in range(3)}
        assert len(ports) == 3 and not ports & {29500, taken.getsockname()[1]}


def test_several_hosts_meet_at_a_known_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = deepspeed_script(TWO, "x", "dsft/train.py", "specs/x.yaml")
    assert port_of(run_script(tmp_path / "unset", script)) == 29500
    monkeypatch.setenv("MASTER_PORT", "29777")
    assert port_of(run_script(tmp_path / "set", script)) == 29777
    script = deepspeed_script(None, "x", "dsft/train.py", "specs/x.yaml")
    assert port_of(run_script(tmp_path / "alone", script)) == 29777


def port_of(seen: dict[str, Any]) -> int:
    name, _, port = seen["argv"][0].partition("=")
    assert name == "--master_port"
    return int(port)
