"""`dsft/train.py` up to the import of torch; `tests/integration/test_launchers.py` has whole runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsft.errors import MissingInputError
from dsft.rank.environment import RENDEZVOUS
from dsft.rank.heartbeat import Heartbeat
from dsft.rank.stopping import Stopping
from dsft.train import QUICKSTART, main, parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in RENDEZVOUS})
    monkeypatch.setattr("dsft.rank.promise._parents", lambda: iter(()))
    monkeypatch.setattr(
        "dsft.train.set_up_process", lambda *_: (Heartbeat(0, 0, None), Stopping())
    )  # no signal's handler


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the jobs that `main` would run, each with the environment of its moment."""
    found: list[Any] = []
    module: Any = ModuleType("dsft.run")
    module.Job = lambda **named: SimpleNamespace(**named)
    module.run = lambda job: found.append(SimpleNamespace(spec=job.spec, environ=dict(os.environ)))
    monkeypatch.setitem(sys.modules, "dsft.run", module)
    return found


@pytest.mark.parametrize(("environ", "message"), [
    ({"RANK": "1"}, "the environment has RANK but not"),
    (dict(RANK="3", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="a", MASTER_PORT="1"),
     "contradict each other"),
])  # fmt: skip
def test_process_without_a_rank_prints_its_error(
    environ: dict[str, str], message: str, jobs: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(environ)
    assert main([]) == 69 and not jobs
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("step", ["specs/zero2.yaml", "0", "-3", "1.5"])
def test_a_step_to_trace_that_is_none(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse([f"--profile={step}"])
    assert end.value.code == 2
    assert f"'{step}' is not a step (the first is 1); give SPEC before --profile" in capsys.readouterr().err


def test_one_process_of_many_prints_a_mistake(
    capsys: pytest.CaptureFixture[str], jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait: were one of them the first to end, a launcher would end rank 0 before it spoke."""
    waits: list[float] = []
    monkeypatch.setattr("dsft.train.time.sleep", waits.append)
    for rank, prints in (("0", True), ("1", False)):
        values = (rank, "2", rank, "a", "1")
        os.environ.update(zip(RENDEZVOUS, values, strict=True))
        assert main(["train.max_stepz=1"]) == 2 and not jobs
        assert ("max_stepz" in capsys.readouterr().err) is prints
        assert bool(waits) is not prints


def test_no_secret_is_printed_in_a_traceback_or_a_message(
    capsys: pytest.CaptureFixture[str], jobs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.update(HF_TOKEN="canary-token", WANDB_API_KEY="canary-key")
    ends: list[Any] = []
    monkeypatch.setattr(Heartbeat, "end", lambda self, *words: ends.append(words))
    text = "GET https://user:canary-key@hub/x with canary-token\x1b[2J failed"

    def fails(error: Exception) -> Any:
        def run(job: Any) -> None:
            raise error

        return run

    module: Any = sys.modules["dsft.run"]
    for error, code in ((RuntimeError(text), 1), (MissingInputError(text), 66)):
        monkeypatch.setattr(module, "run", fails(error))
        assert main([str(QUICKSTART)]) == code
    printed = capsys.readouterr().err
    hidden = "GET https://(hidden)@hub/x with (hidden)"
    assert "Traceback (most recent call last):\n" in printed and f"RuntimeError: {hidden}" in printed
    assert f"error: {hidden}\\x1b[2J failed\n" in printed
    assert [code for code, _ in ends] == [1, 66] and all(hidden in message for _, message in ends)
    assert "canary" not in printed + str(ends)


def test_every_launchers_processes_have_the_variables_of_the_spec(jobs: list[Any]) -> None:
    cluster = "cluster={hosts: {localhost: 1}, interface: eth7, env: {NCCL_DEBUG: WARN}}"
    assert main([str(QUICKSTART), cluster]) == 0
    (job,) = jobs
    assert job.environ["NCCL_DEBUG"] == "WARN" and job.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_a_finished_run_is_named_before_the_imports(
    jobs: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 10):
        (tmp_path / f"quickstart/checkpoints/step-{step}").mkdir(parents=True)
        (tmp_path / f"quickstart/checkpoints/step-{step}/MANIFEST.json").touch()
    for steps, is_told in ((10, True), (11, False)):
        assert main([str(QUICKSTART), f"output_dir={tmp_path}", f"train.max_steps={steps}"]) == 0
        assert ("quickstart has all of its steps" in capsys.readouterr().out) == is_told
    assert len(jobs) == 2


def test_a_python_without_the_packages_names_the_way_in() -> None:
    """As where the environment is not activated."""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "dsft/train.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 66 and done.stderr.count("\n") == 1
    assert re.match(r"error: this Python, \S+, has no torch, deepspeed, .*activate$", done.stderr)


def test_what_launchers_add_is_no_mistake() -> None:
    for option in ("--local_rank=1", "--local-rank=1"):
        options = parse([option, "specs/x.yaml", "train.seed=1", "--deepspeed"])
        assert (options.spec, options.overrides) == (Path("specs/x.yaml"), ["train.seed=1"])
    assert parse(["train.seed=1"]).spec == QUICKSTART == ROOT / "specs" / "quickstart.yaml"


def test_wrong_spec_is_refused_before_this_process_becomes_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[str] = []
    monkeypatch.setattr(os, "execv", lambda path, argv: became.extend(argv))
    assert main(["--num_gpus=2", "specs/zero2.yaml", "train.foo=3"]) == 2
    assert "there is no such key in train" in capsys.readouterr().err and not became
