"""The doctor's checks: facts of two healthy hosts give no warning; each fault in them is reported."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsft.doctor import needs
from dsft.doctor.command import doctor, findings_of
from dsft.doctor.hosts import ProbeAnswers
from dsft.doctor.needs import FolderNeeds, needs_of
from dsft.doctor.network import address_of, chosen, targets
from dsft.doctor.reach import fault
from dsft.doctor.results import CheckResult, ProbeResults
from dsft.doctor.show import print_findings
from dsft.errors import SpecError
from dsft.plan.census import Census, Parameter
from dsft.remote import NoAnswer
from dsft.spec.load import load_spec

ROOT = Path(__file__).resolve().parents[3]
GIB = 2**30
Facts = dict[str, dict[str, Any]]


def host(name: str, address: str) -> dict[str, Any]:
    """What a host without a fault says of itself."""
    link = {"up": True, "addresses": [address], "speed": 10_000}
    interfaces = {"lo": {"up": True, "addresses": ["127.0.0.1"], "speed": 0}, "e0": link}
    resolved = {"node1": ["10.77.0.1"], "node2": ["10.77.0.2"]}
    folder = {"path": "/x", "refused": None, "free": 100 * GIB}
    return {
        "folder": None,
        "on_cpu": False,
        "devices": {"gpus": gpus(8), "fault": None, "cores": 64, "forced": None},
        "software": {"versions": {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8",
                                  "transformers": "5.23.0", "NCCL": "2.28.9", "peft": "0.21.2"},
                     "absent": []},
        "listening": {"free": 40000, **({"port": None} if name == "node1" else {})},
        "network": {"interfaces": interfaces, "named": None, "hostname": name, "resolved": resolved},
        "storage": {"folders": {"output_dir": folder, "TORCH_EXTENSIONS_DIR": folder}, "shm": shm(64)},
        "inputs": {"the spec": {"files": {"/spec.yaml": 100}}},
        "build": {"root": "/ext", "ops": [], "lacking": [], "fault": None},
        "limits": {"files": 65536, "locked": None, "infiniband": []},
        "shared": "/runs/.dsft-doctor-1",
    }  # fmt: skip


def gpus(count: int, name: str = "H100", used: int = 4) -> list[dict[str, Any]]:
    return [
        {"index": str(n), "name": name, "total": 81559, "used": used, "driver": "550.54"}
        for n in range(count)
    ]


def shm(gib: float) -> dict[str, int]:
    return {"free": int(gib * GIB)}


@pytest.fixture
def facts() -> Facts:
    return {"node1": host("node1", "10.77.0.1"), "node2": host("node2", "10.77.0.2")}


def seen(
    facts: Facts, overrides: tuple[str, ...] = (), second: Mapping[str, Any] | None = None
) -> ProbeResults:
    path = ROOT / "specs" / "two_nodes.yaml"
    wanted = needs_of(load_spec(path, ("output_dir=/runs", *overrides)), path, None, 29500, {})
    reached = {"node1": 0.001, "node2": 0.001, "node1 (port 29500)": 0.001}
    text = {name: {"sees": "yes", "reached": reached} for name in facts}
    silent = {name: NoAnswer("", 255, "Connection refused") for name in wanted.hosts if name not in facts}
    return ProbeResults(wanted, ProbeAnswers(facts, {**text, **(second or {})}, silent))


def test_control_characters_of_hosts_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;x\x07\x9b2J"
    findings = [CheckResult("port", "node1", "failure", f"v{evil}", f"w{evil}", f"d{evil}")]
    facts = {"node1": host("node1", "10.0.0.1"), "node2": host("node2", "10.0.0.2")}
    print_findings(seen(facts), findings, 1.0)
    text = capsys.readouterr().out
    shown = r"\x1b]0;x\x07\x9b2J"
    assert all(f"{letter}{shown}" in text for letter in "vwd") and not set("\x1b\x07\x9b") & set(text)


def faults(found: ProbeResults) -> list[str]:
    """What is not in order: each says why, and what to do."""
    bad = [finding for finding in findings_of(found) if finding.level != "pass"]
    assert all(finding.why and finding.do for finding in bad)
    return [f"{finding.level} {finding.check} {finding.host}: {finding.value}" for finding in bad]


def test_two_healthy_hosts(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert faults(seen(facts)) == []
    assert {finding.check for finding in findings_of(seen(facts))} == {
        "reach", "versions", "devices", "hostfile", "names", "interface", "connection", "port",
        "shared", "space", "shm", "files", "compiler", "open files", "locked memory",
    }  # fmt: skip


def test_programs_of_the_launcher(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dsft launch` itself needs neither pdsh nor srun."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("shutil.which", lambda name: None)
    missing = {
        launcher: [
            line for line in faults(seen(facts, (f"cluster.launcher={launcher}",))) if "programs" in line
        ]
        for launcher in ("dsft", "deepspeed", "slurm")
    }
    assert missing == {
        "dsft": [],
        "deepspeed": ["warning programs None: pdsh is not on PATH here"],
        "slurm": ["warning programs None: srun is not on PATH here"],
    }


def put(*path: str, to: Any) -> Callable[[Facts], None]:
    """Plants a value in node2's facts."""

    def change(facts: Facts) -> None:
        place: Any = facts["node2"]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


FAULTS: list[tuple[Callable[[Facts], None], str]] = [
    (put("folder", to="No such file or directory"), "failure folder node2: "),
    (put("software", "versions", "torch", to="2.12.0"),
     "failure versions None: torch differs: node1 2.13.0, node2 2.12.0"),
    (put("software", "versions", "NCCL", to=None),
     "failure versions None: NCCL differs: node1 2.28.9, node2 none"),
    (put("software", "versions", "python", to="3.11.9"), "warning versions None: python differs"),
    (put("software", "versions", "python", to="3.12.7"), "failure versions None: python differs"),
    (put("software", "versions", "peft", to="0.20.0"), "warning versions None: peft differs"),
    (put("devices", "gpus", to=gpus(4)), "failure devices node2: 8 slots and 4 GPU(s) (H100)"),
    (put("devices", "gpus", to=gpus(10)), "warning devices node2: 8 slots and 10 GPU(s) (H100)"),
    (put("devices", "gpus", to=gpus(8, "A100")), "warning devices None: several kinds of GPU"),
    (put("devices", "gpus", to=gpus(8, used=70_000)), "warning devices node2: memory in use: GPU 0 70,000"),
    (put("devices", "fault", to="NVML: Driver/library version mismatch"),
     "failure devices node2: nvidia-smi failed"),
    (put("network", "resolved", "node1", to=[]), "failure names node2: cannot resolve node1"),
    (put("network", "resolved", "node1", to=["127.0.1.1"]), "failure names node2: resolves node1 to itself"),
    (put("network", "interfaces", to={"lo": {"up": True, "addresses": ["127.0.0.1"], "speed": 0}}),
     "failure interface node2: only the loopback is up"),
    (put("network", "named", to="ib0"),
     "failure interface node2: ib0 does not exist; interfaces that are up: e0"),
    (put("storage", "folders", "output_dir", to={"path": "/x", "refused": None, "free": 2**20}),
     "failure space node2: output_dir /x has 1.00 MiB free"),
    (put("storage", "folders", "output_dir", to={"path": "/x", "refused": "Read-only", "free": 0}),
     "failure space node2: output_dir /x cannot be written (Read-only)"),
    (put("storage", "shm", to=shm(0.0625)), "warning shm node2: /dev/shm has 64.00 MiB free"),
    (put("storage", "shm", to=None), "failure shm node2: there is no /dev/shm"),
    (put("inputs", "the spec", to={"missing": "is not there"}), "failure files node2: the spec "),
    (put("inputs", "the spec", to={"files": {"/spec.yaml": 101}}), "failure files None: the spec "),
    (put("build", to={"root": "/ext", "ops": ["cpu_adam"], "lacking": ["cpu_adam"],
                      "compiler": "c++", "fault": ["c++ is not on PATH", "install one"]}),
     "failure compiler node2: cpu_adam cannot be compiled: c++ is not on PATH"),
    (put("limits", "files", to=512), "warning open files node2: 512, and 16 ranks may need 640"),
    (put("limits", "files", to=128), "failure open files node2: 128, "),
    (put("limits", to={"files": 65536, "locked": 2**16, "infiniband": ["mlx5_0"]}),
     "warning locked memory node2: 64.00 KiB, and there is InfiniBand (mlx5_0)"),
    (put("storage", to={"fault": "OSError: it broke"}), "warning storage node2: could not be examined"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "expected"), FAULTS, ids=[expected[:60] for _, expected in FAULTS])
def test_each_fault_is_reported_alone(
    facts: Facts, plant: Callable[[Facts], None], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    plant(facts)
    found = faults(seen(facts))
    assert len(found) == 1 and found[0].startswith(expected), found


def test_unsupported_version_is_a_warning(facts: Facts) -> None:
    for host in facts.values():
        host["software"]["versions"]["transformers"] = "4.57.0"
    assert [line for line in faults(seen(facts)) if "transformers" in line] == [
        "warning versions None: transformers 4.57.0 is outside of the supported range >=5.17,<6"
    ]


def test_absent_package_of_a_sink_matters_on_the_host_of_rank_0(facts: Facts) -> None:
    facts["node2"]["software"]["absent"] = ["wandb"]
    asked = ("wandb.mode=offline",)
    assert not any("wandb" in line for line in faults(seen(facts, asked)))
    facts["node1"]["software"]["absent"] = ["wandb", "swanlab"]
    message = "wandb is set in the spec, but the package wandb is not installed"
    assert f"failure versions node1: {message}" in faults(seen(facts, asked))


def test_failed_connection_and_folder_that_is_not_shared(facts: Facts) -> None:
    lost = {"sees": "No such file or directory", "reached": {"node1": "Connection refused", "node2": 0.1}}
    found = [line for line in faults(seen(facts, second={"node2": lost})) if "hostfile" not in line]
    assert "failure connection node2: cannot connect to node1: Connection refused" in found
    assert any(line.startswith("failure shared node2: output_dir /runs is not the folder") for line in found)


def test_other_hosts_are_checked_if_one_does_not_answer(facts: Facts) -> None:
    del facts["node2"]
    found = findings_of(seen(facts))
    assert [f.value for f in found if f.level == "failure"] == ["no sshd listens there (Connection refused)"]
    assert not [finding for finding in found if finding.check in ("names", "connection", "shared")]
    assert {f.host for f in found if f.check == "shm"} == {"node1"}


def test_slurm_outside_an_allocation_is_a_warning(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    del facts["node2"]
    found = faults(seen(facts, ("cluster.launcher=slurm",)))
    assert any(line.startswith("warning reach node2") for line in found)


def test_known_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of 1,000 elements, of which 800 train: 12 bytes each under AdamW, and an export in bf16."""
    parameters = (
        Parameter("a", (8, 100), None, True, ()),
        Parameter("b", (200,), None, False, (), trained=False),
    )
    monkeypatch.setattr(needs, "known_census", lambda model: Census("Llama", 1, None, parameters))
    path = ROOT / "specs" / "two_nodes.yaml"
    words = (f"output_dir={tmp_path}", "checkpoint.keep_last=3")
    place = needs_of(load_spec(path, words), path, None, 29500, {}).places["output_dir"]
    assert (place.least, place.wanted) == (800 * 12 + 1000 * 2, 4 * 800 * 12 + 1000 * 2)
    for step in (10, 20):
        (tmp_path / "two_nodes" / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "two_nodes" / "checkpoints" / f"step-{step}" / "MANIFEST.json").touch()
    place = needs_of(load_spec(path, words), path, None, 29500, {}).places["output_dir"]
    assert place.wanted == 2 * 800 * 12 + 1000 * 2, "two of the four are there"


def test_space_for_checkpoints_that_are_kept(facts: Facts) -> None:
    """Bytes that are known decide."""
    found = seen(facts)
    places = {**found.needs.places, "output_dir": FolderNeeds("/runs", 3 * GIB, 9 * GIB)}
    object.__setattr__(found.needs, "places", places)  # frozen: a test's own value
    for free, expected in ((2, "failure"), (5, "warning"), (10, "pass")):
        facts["node2"]["storage"]["folders"]["output_dir"] = {
            "path": "/x",
            "refused": None,
            "free": free * GIB,
        }
        level = [f.level for f in findings_of(found) if (f.check, f.host) == ("space", "node2")]
        assert expected in level


@pytest.mark.parametrize(
    ("named", "expected"),
    [("e0", "e0"), ("e", "e0"), ("=e0", "e0"), ("ib,e", "ib"), ("^lo", None), ("", None), (None, None)],
)
def test_chosen_interface(facts: Facts, named: str | None, expected: str | None) -> None:
    assert chosen({**facts["node1"]["network"], "named": named}) == expected


def test_addresses_that_others_connect_to(facts: Facts) -> None:
    assert address_of(facts["node1"]["network"]) == "10.77.0.1"
    assert targets(facts, "node1", 29500) == {
        "node1 (port 29500)": ("node1", 29500), "node1": ("10.77.0.1", 40000), "node2": ("10.77.0.2", 40000),
    }  # fmt: skip
    only_6 = {**facts["node1"]["network"], "named": "e0"}
    only_6["interfaces"]["e0"]["addresses"] = ["fe80::1", "fd00::1"]
    assert address_of(only_6) == "fd00::1"
    facts["node1"]["listening"]["port"] = "process 7 (python)"
    assert "node1 (port 29500)" not in targets(facts, "node1", 29500), "another's port says nothing"


@pytest.mark.parametrize(("code", "text", "expected"), [
    (255, "ssh: Could not resolve hostname n9: Name or service not known", "its name is not known here"),
    (255, "ssh: connect to host node2 port 22: Connection refused", "no sshd listens there"),
    (255, "ssh: connect to host node2 port 22: Connection timed out", "it does not answer"),
    (255, "ssh: connect to host node2 port 22: No route to host", "it does not answer"),
    (255, "root@node2: Permission denied (publickey).", "ssh cannot log in without a password"),
    (255, "Host key verification failed.", "its host key is unknown"),
    (127, "bash: line 1: exec: /v/bin/python: not found", "the Python of this environment does not"),
    (1, "bash: line 1: cd: /srv/dsft: No such file or directory", "dsft's folder does not exist"),
    (1, "/usr/bin/python: No module named dsft.doctor", "its dsft is missing or is another version"),
    (1, "ImportError: cannot import name 'a' from 'dsft.doctor' (/srv)", "its dsft is missing or"),
    (1, "ModuleNotFoundError: No module named 'psutil'", "its Python lacks a package (psutil)"),
    (1, "  File x\nSyntaxError: invalid syntax", "its Python or its packages are other versions"),
    (126, "bash: /venv/bin/python: Permission denied", "its Python cannot be started"),
    (-9, "", "gave no answer in time"),
    (None, "", "gave no answer in time"),
    (3, "what else", "the doctor's program ended with exit code 3 (what else)"),
])  # fmt: skip
def test_cause_of_a_host_without_answer(code: int | None, text: str, expected: str) -> None:
    finding = fault("node2", NoAnswer("", code, text))
    assert finding.value.startswith(expected), finding.value
    assert finding.level == "failure" and finding.do


def test_expected_speed_needs_network() -> None:
    with pytest.raises(SpecError, match="has no effect without --network"):
        doctor(Path("specs/zero2.yaml"), (), expect_gbit=25)
