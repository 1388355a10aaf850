"""The driver behind `scripts/gpu`: stages of cases, each a process with its own limit, every result kept.

    scripts/gpu STAGE [--out DIR] [--only CASE …] [--rehearse]    STAGE: of benchmarks/gpu/cases.py, or all
    scripts/gpu prepare [--python 3.12]                           wheels for a machine without a network
    scripts/gpu page DIR …                                        docs/gpu.md from results
    scripts/gpu list

DIR gets results.json (rewritten after each case, with what was there of other stages), results.md and
log.txt. The driver itself never touches the GPU; it changes no clock and no setting of one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from benchmarks import paired
from benchmarks.gpu.carry import prepare
from benchmarks.gpu.cases import CASES, STAGE_SECONDS, STAGES, Case, cases_of
from benchmarks.gpu.page import PAGE, compare, judge, merge, page, table

ROOT = Path(__file__).resolve().parents[2]
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
LEFT = 10.0  # seconds of a stage in which no case is begun
AGAIN = 10.0  # seconds after which a GPU whose memory is not free is looked at once more
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "trl")


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a case is ended with its driver
    if options.command == "prepare":
        return prepare(ROOT / ".gpu", options.python)
    if options.command == "page":
        for folder in options.folders:
            if not (folder / "results.json").exists():
                print(f"scripts/gpu: {folder} has no results.json, which a stage writes.", file=sys.stderr)
                return 66
        results = [one for folder in options.folders for one in read(folder / "results.json")]
        PAGE.write_text(page(merge(results)), encoding="utf-8")
        return 0
    if options.command == "list":
        for case in CASES:
            print(
                f"{case.stage:12} {case.name:26} {case.seconds:4} s   {', '.join(map(goal_text, case.goals))}"
            )
        return 0
    if not options.rehearse and not gpu_memory():
        print(
            "scripts/gpu: no GPU was found (nvidia-smi); --rehearse tries the cases without one.",
            file=sys.stderr,
        )
        return 69
    options.out.mkdir(parents=True, exist_ok=True)
    stages = list(STAGES) if options.command == "all" else [options.command]
    failed = [run_stage(stage, options) for stage in stages]
    return int(any(failed))


def goal_text(goal: tuple[str, str, float]) -> str:
    return f"{goal[0]} {goal[1]} {goal[2]}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description="Runs dsft on this machine's GPUs, in stages."
    )
    words = parser.add_subparsers(dest="command", required=True)
    for stage, what in (STAGES | {"all": "all stages, one after the other"}).items():
        word = words.add_parser(stage, help=what)
        word.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the results")
        word.add_argument("--work", type=Path, help="folder of models and runs; by default a temporary one")
        word.add_argument("--only", nargs="+", default=[], metavar="CASE")
        word.add_argument("--rehearse", action="store_true", help="every case, very small: no figure counts")
        word.add_argument("--commit", help="of dsft, where the folder is no git checkout")
        word.add_argument(
            "--seconds", type=float, help="of a stage; 570, and without limit with all or --rehearse"
        )
    word = words.add_parser("prepare", help="make .gpu/, wheels to carry to a machine without a network")
    word.add_argument("--python", default="3.12", help="version of Python there")
    word = words.add_parser("page", help="write docs/gpu.md from results")
    word.add_argument("folders", type=Path, nargs="*")
    words.add_parser("list", help="the cases, their limits and goals")
    options = parser.parse_args()
    unknown = set(getattr(options, "only", ())) - {case.name for case in CASES}
    if unknown:
        parser.error(f"no case is named {', '.join(sorted(unknown))}; scripts/gpu list has all")
    return options


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def run_stage(stage: str, options: argparse.Namespace) -> bool:
    """Whether a case failed; one that was not run has not."""
    is_free = options.command == "all" or options.rehearse
    limit = options.seconds or (float("inf") if is_free else STAGE_SECONDS)
    installed = max(0.0, time.time() - float(os.environ.get("DSFT_GPU_BEGAN", "inf")))  # by scripts/gpu
    ends = time.monotonic() + limit - installed
    facts = paired.machine(PACKAGES)
    own = {case.name for case in cases_of(stage, tuple(options.only))}
    with tempfile.TemporaryDirectory(prefix="dsft-gpu-") as made:
        work = options.work or Path(made)
        work.mkdir(parents=True, exist_ok=True)
        for case in cases_of(stage, tuple(options.only)):
            result = run_case(case, work, ends, options.rehearse) | {
                "stage": stage,
                "commit": options.commit or facts["dsft"],
                "versions": {name: facts[name] for name in ("Python", *PACKAGES)},
                "gpu": facts["gpu"],
                "machine": f"{facts['processor']}, {facts['cores']} cores, {facts['memory']}",
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
                "rehearsed": options.rehearse,
            }
            write(options.out, result, case)
    left_out = [
        one["case"]
        for one in read(options.out / "results.json")
        if one["case"] in own and one["pass"] is None
    ]
    if left_out:
        print(f"not run: {', '.join(left_out)}; scripts/gpu {stage} --only {' '.join(left_out)} runs them")
    return any(one["pass"] is False for one in read(options.out / "results.json") if one["case"] in own)


def write(out: Path, result: dict[str, Any], case: Case) -> None:
    """results.json with this result in place of an earlier one of the same case. Comparisons are computed
    again."""
    kept = [one for one in read(out / "results.json") if one["case"] != case.name]
    results = compare([*kept, result])
    aside = out / ".results.json"
    aside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    aside.replace(out / "results.json")
    (out / "results.md").write_text(table(results), encoding="utf-8")
    printed = result.pop("printed", "")
    now = next(one for one in results if one["case"] == case.name)
    with (out / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"=== {case.name}: {word_of(now)}\n{printed[-200_000:]}\n")
    print(f"{case.name:26} {word_of(now)}", flush=True)


def word_of(result: dict[str, Any]) -> str:
    outcome = {True: "pass", False: "FAIL", None: "not run"}[result["pass"]]
    return f"{outcome} {result.get('seconds', 0):.0f} s {result['reason']}".strip()


def run_case(case: Case, work: Path, ends: float, is_rehearsal: bool) -> dict[str, Any]:
    """Its figures with `pass` and `reason`. Never raises for what the case did."""
    argv = [sys.executable, "-m", "benchmarks.gpu.bodies", case.name, str(work)]
    argv += ["--rehearse"] * is_rehearsal
    result: dict[str, Any] = {"case": case.name, "argv": ["python", *argv[1:4]], "seconds": 0.0}
    why_not = reason_not_to_run(case, ends, is_rehearsal)
    if why_not and "memory are free" in why_not:  # the driver takes its time after a large process
        time.sleep(AGAIN)
        why_not = reason_not_to_run(case, ends, is_rehearsal)
    if why_not:
        return result | {"pass": None, "reason": why_not}
    (work / f"{case.name}.json").unlink(missing_ok=True)
    limit = min(float(case.seconds), ends - time.monotonic()) * (10 if is_rehearsal else 1)
    began = time.monotonic()
    is_patient = case.body != "speed"  # asked to end, a run would first save tens of gigabytes
    code, seen = watch(argv, environ(case, is_rehearsal), limit, work / f"{case.name}.log", is_patient)
    printed = (work / f"{case.name}.log").read_text(errors="replace")
    result |= {"seconds": round(time.monotonic() - began, 1), "printed": printed, **seen}
    if code is None:
        return result | {"pass": False, "reason": f"ended after {limit:.0f} s"}
    if code != 0 or not (work / f"{case.name}.json").exists():
        lines = [line for line in printed.splitlines() if line.strip()]
        return result | {"pass": False, "reason": (lines or [f"exit code {code}"])[-1][:500]}
    result |= json.loads((work / f"{case.name}.json").read_text())
    if "planned_device" in result and result.get("device_peak"):
        result["device_error"] = abs(result["device_peak"] / result["planned_device"] - 1)
    return judge(result, case, is_rehearsal)


def reason_not_to_run(case: Case, ends: float, is_rehearsal: bool) -> str:
    """Empty where the case can be run here and now."""
    from benchmarks.gpu.runs import has_key

    if case.key is not None and not has_key(case.key):
        return f"this version has no {case.key}"
    if case.needs is not None and find_spec(case.needs) is None:
        return f"{case.needs} is not installed"
    if not is_rehearsal:
        return reason_of_the_gpus(case, gpu_memory()) or (
            "the stage's time was over" if ends - time.monotonic() < LEFT else ""
        )
    return reason_not_to_rehearse(case, is_on_cpu=os.environ.get("DS_ACCELERATOR") == "cpu")


def reason_not_to_rehearse(case: Case, is_on_cpu: bool) -> str:
    if case.gpus > 1 and not is_on_cpu:
        return "several ranks are rehearsed with DS_ACCELERATOR=cpu"
    if case.body == "out_of_memory" and is_on_cpu:
        return "the memory of a GPU, or of a stand-in, is what runs out"
    if case.body == "profile" and not is_on_cpu:
        return "a stand-in has no counters that torch's profiler could read"
    if case.settings.get("spec", {}).get("model.compile"):
        return "packed rows are compiled on a GPU alone"
    return ""


def reason_of_the_gpus(case: Case, gpus: list[tuple[int, int]]) -> str:
    """`gpus`: (used, total) MiB of each."""
    if not gpus:
        return "no GPU was found (nvidia-smi)"
    if len(gpus) < case.gpus:
        return f"needs {case.gpus} GPUs, here are {len(gpus)}"
    free = min(total - used for used, total in gpus) / 1024
    if free < case.gib:
        return f"{free:.0f} GiB of the GPU's memory are free, of {case.gib:g} that it needs"
    return ""


def gpu_memory() -> list[tuple[int, int]]:
    """(used, total) MiB of each GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(",") for line in listed.stdout.splitlines()] if listed.returncode == 0 else []
    return [(int(used), int(total)) for used, total in rows]


def environ(case: Case, is_rehearsal: bool) -> dict[str, str]:
    """Of a rehearsal what a stand-in GPU needs: its mode, and no attention of cuDNN, which it has not."""
    standin = {"STANDIN_MODE": case.mode, "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"} if is_rehearsal else {}
    return os.environ | {"PYTHONUNBUFFERED": "1"} | standin


def watch(
    argv: list[str], environ: dict[str, str], limit: float, log: Path, is_patient: bool = True
) -> tuple[int | None, dict[str, Any]]:
    """The exit code, None where the limit ended it; and the largest memory of the host's (all processes'
    resident pages) and of GPU 0 as nvidia-smi has it, in bytes, looked at every two seconds."""
    host = device = 0
    with log.open("w") as output:
        process = subprocess.Popen(
            argv, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        deadline = time.monotonic() + limit
        try:
            while process.poll() is None and time.monotonic() < deadline:
                host = max(host, sum(map(resident, family(process.pid))))
                device = max([device, *(used * 2**20 for used, _ in gpu_memory()[:1])])
                try:
                    process.wait(timeout=min(2.0, max(deadline - time.monotonic(), 0.01)))
                except subprocess.TimeoutExpired:
                    continue
            code = process.poll()
        finally:
            end_all(process, (signal.SIGTERM, signal.SIGKILL) if is_patient else (signal.SIGKILL,))
    return code, {"host_peak": host} | ({"device_peak": device} if device else {})


def family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def end_all(process: subprocess.Popen[Any], signals: Sequence[signal.Signals]) -> None:
    """Send these signals, GRACE seconds apart, to the process group of a case and to what it started in
    groups of their own."""
    started = family(process.pid)
    for sign in signals:
        for one in started:
            try:
                one.send_signal(sign)
            except psutil.Error:
                continue
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            pass
        psutil.wait_procs(started, timeout=GRACE)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
