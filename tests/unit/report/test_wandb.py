"""Weights & Biases: real offline runs; servers that are absent or refuse. Nothing leaves this machine."""

import http.server
import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsft.report.wandb_run import mode_of, run_id_of, section_of
from dsft.spec.schema import Wandb
from tests.launching import allowed

KEY = "0123456789abcdef0123456789abcdef01234567"
WORKER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from dsft.report.sinks import Report
from dsft.spec.schema import Wandb

folder, mode, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = {"task": "sft", "cluster": {"env": {"HF_TOKEN": "canary-config"}}}
wandb = None if mode == "none" else Wandb(mode=mode)
asked = SimpleNamespace(wandb=wandb, tensorboard=False, swanlab=None)
report = Report.open(folder, 10, first, asked, config, enabled=True)
longest = 0.0
for step in range(first + 1, first + 6):
    began = time.perf_counter()
    report.metrics({"train/global_step": step, "train/loss": 1 / (3 * step)})
    longest = max(longest, time.perf_counter() - began)
    time.sleep(0.02)
report.metrics({"train/global_step": step, "eval/loss": 0.25})
began = time.perf_counter()
report.close({"best/eval_loss": 0.25})
print("longest", longest)
print("wandb imported", "wandb" in sys.modules)
"""


def report(folder: Path, mode: str, first: int = 0, **environ: str) -> str:
    """A run of its own process, with secrets in its environment and on its command line."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    outside["WANDB_INIT_TIMEOUT"] = "4"
    canaries = {"HF_TOKEN": "canary-hf", "HOME": str(folder.parent), "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", WORKER, str(folder), mode, str(first), "--token=canary-argv"]
    done = subprocess.run(command, env=outside | canaries | environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert float(done.stdout.split("longest ")[1].split()[0]) < allowed(0.5)  # seconds: no step waits for W&B
    return done.stdout


def records(segment: Path) -> list[Any]:
    """W&B's transaction log: LevelDB's log format (32 KiB blocks; crc, length, type, data) after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = segment.glob("*.wandb")
    data, position, part, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def history(segment: Path) -> list[dict[str, float]]:
    rows = [record.history for record in records(segment) if record.WhichOneof("record_type") == "history"]
    return [{"/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in rows]


def no_canary(folder: Path) -> None:
    for path in filter(Path.is_file, folder.rglob("*")):
        content = path.read_bytes()
        assert b"canary" not in content and KEY.encode() not in content, path


def test_offline_twice_is_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    printed = report(folder, "auto")
    time.sleep(1.1)  # wandb names segments by the second
    report(folder, "auto", first=4)

    first, second = segments(folder)
    runs = [record.run for s in (first, second) for record in records(s) if record.HasField("run")]
    assert {run.run_id for run in runs} == {json.loads((folder / "wandb.json").read_text())["id"]}
    assert {(run.display_name, run.job_type, run.project) for run in runs} == {("my-run", "sft", "dsft")}
    assert f"wandb sync --id {runs[0].run_id} {folder}/wandb/offline-run-*" in printed

    rows = history(first)
    assert [row["train/global_step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["train/loss"] for row in rows] == [1 / 3, 1 / 6, 1 / 9, 1 / 12, 1 / 15]
    assert rows[-1]["eval/loss"] == 0.25  # an evaluation is in its step's row
    assert [row["_step"] for row in history(second)] == [5, 6, 7, 8, 9]
    axes = {(r.metric.glob_name, r.metric.step_metric) for r in records(first) if r.HasField("metric")}
    assert ("*", "train/global_step") in axes
    no_canary(folder)


@pytest.mark.parametrize("mode", ["disabled", "none"])
def test_what_is_not_asked_for_imports_and_writes_nothing(tmp_path: Path, mode: str) -> None:
    printed = report(tmp_path / "run", mode)
    assert "wandb imported False" in printed and "W&B" not in printed
    assert not (tmp_path / "run" / "wandb.json").exists()


def test_a_section_asks_for_it_or_a_key_and_a_project_in_the_environment(tmp_path: Path) -> None:
    """The server that the environment names is not there."""
    absent = {"NETRC": str(tmp_path / "absent")}
    both = absent | {"WANDB_API_KEY": KEY, "WANDB_PROJECT": "mine", "WANDB_ENTITY": "us"}
    assert section_of(None, both) == Wandb(project="mine", entity="us")
    assert section_of(None, both | {"WANDB_PROJECT": " "}) is None
    for alone in ({}, {"WANDB_PROJECT": "mine"}, {"WANDB_API_KEY": KEY}):
        assert section_of(None, absent | alone) is None
    assert section_of(Wandb(project="of the spec"), both) == Wandb(project="of the spec")
    folder = tmp_path / "run"
    printed = report(
        folder, "none", WANDB_API_KEY=KEY, WANDB_PROJECT="mine", WANDB_BASE_URL="http://127.0.0.1:9"
    )
    assert "W&B: recording offline, " in printed
    (segment,) = segments(folder)
    assert {record.run.project for record in records(segment) if record.HasField("run")} == {"mine"}
    assert len(history(segment)) == 5
    no_canary(folder)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers every question with `status`."""

    status = 200

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.status)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}"
    listening.shutdown()
    listening.server_close()


@pytest.mark.parametrize(
    ("status", "reason"), [pytest.param(500, "HTTP 500", marks=pytest.mark.long), (401, "error 401")]
)
def test_a_server_that_refuses(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, status: int, reason: str
) -> None:
    monkeypatch.setattr(Server, "status", status)
    folder = tmp_path / "run"
    printed = report(folder, "online", WANDB_API_KEY=KEY, WANDB_BASE_URL=server)
    (line,) = [line for line in printed.splitlines() if line.startswith("W&B: recording offline, ")]
    assert reason in line
    assert len(history(segments(folder)[0])) == 5
    no_canary(folder)


def test_a_folder_that_wandb_cannot_write(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "wandb.json").mkdir()
    printed = report(folder, "offline")
    assert "W&B: stopped, " in printed and "metrics.jsonl has everything" in printed
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize(("mode", "environ", "expected"), [
    ("auto", {}, "offline"),
    ("auto", {"WANDB_API_KEY": KEY}, "online"),
    ("auto", {"WANDB_API_KEY": ""}, "offline"),
    ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
    ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
    ("auto", {"WANDB_MODE": "online"}, "offline"),  # there is no key
    ("online", {}, "offline"),
    ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "disabled"}, "online"),  # the spec is asked first
    ("offline", {"WANDB_API_KEY": KEY}, "offline"),
    ("disabled", {"WANDB_API_KEY": KEY}, "disabled"),
])  # fmt: skip
def test_which_mode_it_is(tmp_path: Path, mode: Any, environ: dict[str, str], expected: str) -> None:
    assert mode_of(Wandb(mode=mode), {"NETRC": str(tmp_path / "absent")} | environ) == expected


@pytest.mark.parametrize(("content", "base", "expected"), [
    (f"machine api.wandb.ai login user password {KEY}", None, "online"),
    (f"machine wandb.my.org login user password {KEY}", None, "offline"),
    (f"machine wandb.my.org login user password {KEY}", "https://wandb.my.org:8080/", "online"),
    ("machine", None, "offline"),
])  # fmt: skip
def test_the_key_in_a_netrc_file(tmp_path: Path, content: str, base: str | None, expected: str) -> None:
    path = tmp_path / "netrc"
    path.write_text(content)
    path.chmod(0o600)
    environ = {"NETRC": str(path)} | ({"WANDB_BASE_URL": base} if base else {})
    assert mode_of(Wandb(), environ) == expected


def test_a_new_folder_is_another_run(tmp_path: Path) -> None:
    first = run_id_of(tmp_path)
    assert run_id_of(tmp_path) == first and first.startswith(tmp_path.name[:50])
    (tmp_path / "wandb.json").write_text("{")  # cut by a kill
    assert run_id_of(tmp_path) != first
