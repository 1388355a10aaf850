"""The doctor's program and what it looks at, for real on this machine: processes, sockets, a compiler."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsft.doctor import devices, inputs, ops, probe, storage
from dsft.doctor.command import quick
from dsft.doctor.hosts import PROBE, ask_probes
from dsft.doctor.network import listening, reach
from dsft.doctor.software import cuda_of_torch
from dsft.doctor.storage import nonce_file, sees
from dsft.rank.process_setup import has_ninja
from dsft.remote import Channel
from dsft.system.software import version_of
from tests.launching import allowed
from tests.unit.conftest import Dsft

ROOT = Path(__file__).resolve().parents[3]


def orders(folder: Path, **further: Any) -> dict[str, Any]:
    return {
        "folder": str(folder), "names": [], "port": None, "folders": {}, "shared": None,
        "nonce": "n", "inputs": [], "ops": [], "ops_on_cpu": [], **further,
    }  # fmt: skip


def nothing(first: Any) -> dict[str, Any]:
    return {host: {"file": None, "nonce": "n", "targets": {}} for host in first}


def test_the_probe_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pydantic", "deepspeed"}
    code = f"import sys, {PROBE}; print(*sorted(set(sys.modules) & {heavy!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_hosts_with_and_without_answer(tmp_path: Path) -> None:
    """At once, whatever a shell prints before; what gives no answer is reported in its own words."""
    noise = f"printf 'news {{: '; {sys.executable} -m {PROBE}"
    argv: dict[str, Sequence[str]] = {
        "good": [sys.executable, "-m", PROBE],
        "noisy": ["sh", "-c", noise],
        "absent": ["/no/such/program"],
        "failing": ["sh", "-c", "echo out; echo why >&2; exit 3"],
        "torn": ["sh", "-c", "printf 'dsft:{\"a\": '"],
    }
    answered: list[str] = []
    first = {host: orders(tmp_path) for host in argv}
    found = ask_probes(first, nothing, argv.__getitem__, {}, answered.append)
    assert set(found.first) == set(found.second) == set(answered) == {"good", "noisy"}
    assert found.first["noisy"]["folder"] is None
    assert (found.silent["failing"].code, found.silent["failing"].output) == (3, "why\nout")
    assert found.silent["absent"].code == 127 and found.silent["torn"].code == 0


def test_process_of_a_hanging_host_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsft.doctor.hosts.ANSWER", 0.5)
    number = str(time.time_ns() % 10**6 + 10**6)
    found = ask_probes({"hanging": orders(tmp_path)}, nothing, lambda host: ["sleep", number], {})
    assert set(found.silent) == {"hanging"} and found.first == {}
    assert subprocess.run(["pgrep", "-f", f"sleep {number}"], capture_output=True).stdout == b""


def test_quickstart_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec without a cluster: this machine alone, and nothing is left of it."""
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = quick(ROOT / "specs" / "quickstart.yaml", port=port)
    bad = {finding.check: finding.value for finding in found if finding.level == "failure"}
    assert bad == {"port": f"{port} is used by process {os.getpid()} ({Path(sys.executable).name})"} or (
        list(bad) == ["port"] and f"{port} is used by " in bad["port"]
    )
    assert {finding.host for finding in found} <= {"localhost", None}
    assert list(tmp_path.iterdir()) == []


def test_ports_and_their_holders() -> None:
    with listening(None) as first, listening(first["free"]) as second:
        assert "process " in second["port"] or "cannot be seen" in second["port"]
        found = reach({"near": ("127.0.0.1", first["free"]), "no": ("127.0.0.1", 1)})
    assert isinstance(found["near"], float) and found["no"] == "Connection refused"


def test_shared_folder_is_found_by_its_nonce(tmp_path: Path) -> None:
    shared = tmp_path / "a" / "b"
    with nonce_file(str(shared), "xyz") as file:
        assert file is not None
        assert sees(file, "xyz") == "yes" and sees(file, "abc") == "it has other content"
        assert sees(str(tmp_path / "c" / "d"), "xyz") == "No such file or directory"
    assert list(tmp_path.iterdir()) == [], "folders that it made are gone"
    (tmp_path / "file").write_text("")
    with nonce_file(str(tmp_path / "file" / "b"), "xyz") as none:
        assert none is None


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = storage.look(
        {"output_dir": str(tmp_path / "new" / "er"), "data.cache_dir": str(tmp_path / "file")}
    )
    assert found["folders"]["output_dir"]["refused"] is None
    assert found["folders"]["output_dir"]["place"] == str(tmp_path)
    assert found["folders"]["output_dir"]["free"] > 0
    assert found["folders"]["data.cache_dir"]["refused"] == "Not a directory"
    nvme = storage.look({"parallel.offload_optimizer.nvme_path": "/dev/shm"})["folders"]
    assert "is in memory (tmpfs)" in nvme["parallel.offload_optimizer.nvme_path"]["refused"]


def test_files_and_their_sizes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"a\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(9))
    wanted = [
        {"key": "data", "path": str(rows), "kind": "data"},
        {"key": "model", "path": str(tmp_path), "kind": "folder"},
        {"key": "none", "path": str(tmp_path / "no.jsonl"), "kind": "data"},
    ]
    assert inputs.look(wanted) == {
        "data": {"files": {str(rows): 2}},
        "model": {"files": {str(tmp_path / "model.safetensors"): 9}},
        "none": {"missing": "does not exist"},
    }


def test_end_of_the_input_ends_a_probe_at_work(tmp_path: Path) -> None:
    """Its work hangs, as a disk may: `nvidia-smi` sleeps."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ntouch started\nexec sleep 60\n")
    program.chmod(0o755)

    async def close_at_work() -> float:
        channel = await Channel.open(
            [sys.executable, "-m", PROBE], {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        )
        channel.send(orders(tmp_path))
        while not (tmp_path / "started").exists():
            await asyncio.sleep(0.02)
        began = time.monotonic()
        await channel.close(seconds=10)
        assert channel.code == 0
        return time.monotonic() - began

    assert asyncio.run(close_at_work()) < allowed(3)


class OneReader:
    """A connection that refuses a second reader, as a StreamReader does. A reader that is cancelled ends a
    turn of the loop later, so that a second one comes too early on every version of Python."""

    def __init__(self, *questions: Any) -> None:
        self.questions, self.answers, self.is_read = list(questions), [], False

    async def receive(self) -> Any:
        assert not self.is_read, "a second reader"
        self.is_read = True
        try:
            await asyncio.sleep(0.1)
            return self.questions.pop(0)
        finally:
            await asyncio.sleep(0)
            self.is_read = False

    def send(self, answer: Any) -> None:
        self.answers.append(answer)


def test_one_reader_of_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = OneReader({"number": 1}, {"number": 2, "targets": {}}, None)

    async def own() -> OneReader:
        return connection

    monkeypatch.setattr(probe, "own_connection", own)
    monkeypatch.setattr(probe, "facts", lambda question, resources: {"facts": question["number"]})
    monkeypatch.setattr(probe, "second", lambda question, resources: {"second": question["number"]})
    monkeypatch.setattr(os, "_exit", lambda code: None)
    asyncio.run(probe.serve())
    assert connection.answers == [{"facts": 1}, {"second": 2}]


def test_commit_of_a_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    wanted = [{"key": "m", "path": "owner/name", "kind": "hub-model"}]
    assert inputs.look(wanted)["m"]["missing"] == "is not in the cache"
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("0123abc")
    assert inputs.look(wanted) == {"m": {"commit": "0123abc"}}


def test_versions_are_those_of_the_imported_packages() -> None:
    import torch

    found = version_of("torch")
    assert found in (torch.__version__, torch.__version__.partition("+")[0])  # PyPI's leaves out +cu130
    assert cuda_of_torch() == torch.version.cuda
    assert version_of("no-such-package") is None


def test_missing_compiler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found = ops.look(["deepspeed_shm_comm"], on_cpu=True)
    assert found["lacking"] == ["deepspeed_shm_comm"] and found["fault"] is None, found
    monkeypatch.setenv("CXX", "g++-99")
    assert "'g++-99' is not on PATH" in ops.look(["cpu_adam"], on_cpu=True)["fault"][0]
    assert ops.look([], on_cpu=False)["fault"] is None


def test_gpus_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output is imitated: no GPU is here."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        "echo '0, NVIDIA H100, 81559, 3, 550.1, GPU-a1'\n"
        "echo '1, NVIDIA H100, [N/A], 9, 550.1, GPU-b2'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = devices.look({})
    assert [gpu["total"] for gpu in found["gpus"]] == [81559, None] and found["fault"] is None
    assert [gpu["index"] for gpu in devices.look({"CUDA_VISIBLE_DEVICES": "1"})["gpus"]] == ["1"]
    assert devices.look({"CUDA_VISIBLE_DEVICES": ""})["gpus"] == []
    assert [gpu["index"] for gpu in devices.look({"CUDA_VISIBLE_DEVICES": "1,7,0"})["gpus"]] == ["1"]
    assert [gpu["index"] for gpu in devices.look({"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a1"})["gpus"]] == [
        "1",
        "0",
    ]
    (part,) = devices.look({"CUDA_VISIBLE_DEVICES": "MIG-c3"})["gpus"]
    assert part["name"] == "MIG instance" and part["driver"] == "550.1"
    program.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"
    )
    assert "NVML" in devices.look({})["fault"]


def test_ninja_beside_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh's PATH does not name the environment's folder."""
    (tmp_path / "ninja").write_text("#!/bin/sh\n")
    (tmp_path / "ninja").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    environ = {"PATH": "/nowhere"}
    assert has_ninja(environ) and environ["PATH"] == f"/nowhere{os.pathsep}{tmp_path}"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert not has_ninja({"PATH": "/nowhere"})


def test_json_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dsft: Dsft) -> None:
    """Exit code 69 and one object, where a host is not there."""
    monkeypatch.chdir(tmp_path)
    spec = str(ROOT / "specs" / "two_nodes.yaml")
    code, out, err = dsft("doctor", spec, "--json", "cluster.hosts={no-such-host.invalid: 16}")
    printed = json.loads(out)
    assert code == printed["exit_code"] == 69
    assert [each["level"] for each in printed["findings"]][:1] == ["failure"]
    assert "could not start: 1 check(s) failed (reach)" in err
