"""One case of `scripts/gpu`, in a process of its own.

    python -m benchmarks.gpu.bodies CASE FOLDER [--rehearse]

Takes the case's settings from benchmarks/gpu/cases.py and FOLDER for models, rows and runs, which cases of a
stage share; writes FOLDER/CASE.json: the case's figures, `losses` among them where there are any. What goes
wrong is raised, and what was printed is the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks import paired
from benchmarks.gpu import runs
from benchmarks.gpu.cases import CASES, Case
from benchmarks.gpu.runs import ROOT, Run, base_spec, device, given_of, peer, train, write_rows, write_spec

WARM, TIMED = 4, 21  # steps
PARTS = 3
"""The steps that count are divided into so many parts of equally many steps, whose times are compared."""
Figures = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.bodies")
    parser.add_argument("case", choices=[case.name for case in CASES])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    case = next(case for case in CASES if case.name == options.case)
    options.folder.mkdir(parents=True, exist_ok=True)
    figures = BODIES[case.body](case, options.folder, options.rehearse)
    (options.folder / f"{case.name}.json").write_text(json.dumps(figures))


def clear(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


# --- setup --------------------------------------------------------------------------------------------------


def environment(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    import torch

    facts = paired.machine(
        ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "liger-kernel")
    )
    asked = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit,ecc.mode.current"
    facts |= {
        "CUDA of torch": str(torch.version.cuda),
        "cuDNN": asked_of(torch.backends.cudnn.version),
        "nvidia-smi": printed_by(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]),
        "topology": printed_by(["nvidia-smi", "topo", "-m"]),
        "kernel": platform.release(),
        "disk": f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB free",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["GPUs"] = (
            f"{torch.cuda.device_count()} × {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
        )
        facts["NCCL"] = asked_of(torch.cuda.nccl.version)
    return {"facts": facts}


def asked_of(version: Callable[[], object]) -> str:
    try:
        return str(version())
    except (RuntimeError, AttributeError) as error:
        return str(error).partition(". ")[0]


def printed_by(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}"
    return done.stdout.strip()[:2000]


def ceilings(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """Bytes of a copy are counted read and written. Means of ten after three."""
    import torch

    place, n = device(), 256 if is_rehearsal else 8192
    half = torch.bfloat16
    a, b = (torch.randn(n, n, device=place, dtype=half) for _ in range(2))
    size = 2**20 if is_rehearsal else 2**32
    source, target = (torch.empty(size, device=place, dtype=torch.uint8) for _ in range(2))
    host = torch.empty(size // 4, dtype=torch.uint8, pin_memory=place == "cuda")
    found = {
        "matmul_tflops": 2 * n**3 / seconds_of(lambda: a @ b) / 1e12,
        "copy_tb_s": 2 * size / seconds_of(lambda: target.copy_(source)) / 1e12,
        "to_device_gb_s": size / 4 / seconds_of(lambda: target[: size // 4].copy_(host)) / 1e9,
        "to_host_gb_s": size / 4 / seconds_of(lambda: host.copy_(source[: size // 4])) / 1e9,
    }
    data = os.urandom(2**20) * (8 if is_rehearsal else 2048)
    with (folder / "disk").open("wb") as file:
        began = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    found["disk_write_gb_s"] = len(data) / (time.perf_counter() - began) / 1e9
    (folder / "disk").unlink()
    return found


def seconds_of(work: Callable[[], object], times: int = 10) -> float:
    import torch

    wait = torch.cuda.synchronize if device() == "cuda" else lambda: None
    for _ in range(3):
        work()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - began) / times


def doctor(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    words = [sys.executable, "-c", "from dsft.cli import main; main()", "doctor"]
    words.append(str(ROOT / "specs" / "quickstart.yaml"))
    done = subprocess.run(words, cwd=ROOT, env=runs.environment(), capture_output=True, text=True)
    print(done.stdout, done.stderr, flush=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"dsft doctor: exit code {done.returncode}: {runs.last_words(done.stdout + done.stderr)}"
        )
    return {}


# --- kernels ------------------------------------------------------------------------------------------------


def kernels(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    from benchmarks.gpu.kernels import measure

    return measure(is_rehearsal)


def profile(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """Milliseconds of one step of packed documents by kind of kernel, and of the longest kernels."""
    from benchmarks.gpu.trace import by_kind, kernels_of, longest, only_trace

    spec = large_set(case, folder, is_rehearsal, steps=5)
    run = train(spec, "--profile", "4", until=5).must_end_well()
    kernels = kernels_of(only_trace(run.folder / "logs"))
    return {"step": by_kind(kernels), "longest": longest(kernels)}


def large_set(case: Case, folder: Path, is_rehearsal: bool, steps: int, **keys: Any) -> Path:
    """A spec of packed documents, all of a step in its only micro-batch; its file."""
    model = runs.model_folder(folder, "small" if is_rehearsal else case.settings["model"])
    max_length, batch = (128, 2) if is_rehearsal else (4096, case.settings["batch"])
    rows = folder / f"rows-{case.name}.jsonl"
    write_rows(rows, "documents", (steps + 2) * batch, max_length)
    arguments = base_spec(model, rows, "documents", max_length) | {
        "train.precision": "bf16", "train.micro_batch_size": batch, "train.accumulation_steps": 1,
        "train.max_steps": steps, **case.settings.get("spec", {}), **keys,
    }  # fmt: skip
    return write_spec(clear(folder / case.name) / "spec.yaml", arguments)


# --- the same numbers ---------------------------------------------------------------------------------------


def attention(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """Of packed rows in the attention that dsft chooses here: the largest error of an embedding's gradient
    and of the outputs against eager attention in float64 on the CPU, each segment by itself, relative to the
    largest element; and how much of other segments' outputs changes, bit for bit, when one is changed."""
    from benchmarks.gpu.attention import compare

    return compare(case.settings["dtype"], is_rehearsal)


def small_set(case: Case, folder: Path, is_rehearsal: bool, **more: Any) -> Path:
    """A spec of ten short steps on a model of 100 million parameters; its file."""
    named = case.settings.get("model", "100m")
    model = runs.model_folder(folder, "small" if is_rehearsal and named == "100m" else named)
    max_length = 128 if is_rehearsal else 1024
    rows = folder / f"rows-{'pairs' if 'pairs' in more else 'short'}.jsonl"
    kind = "pairs" if more.pop("pairs", False) else "short"
    steps, batch = more.pop("steps", 4 if is_rehearsal else case.settings.get("steps", 10)), 4
    write_rows(rows, kind, (steps + 1) * batch, max_length)
    keys = base_spec(model, rows, kind, max_length) | {
        "data.on_too_long": "truncate",
        "data.max_truncated_fraction": 1.0,
        "train.micro_batch_size": batch // more.get("ranks", 1),
        "train.accumulation_steps": 1,
        "train.max_steps": steps,
        "optim.name": "sgd",
        "optim.learning_rate": 0.05,
        "data.packing": case.settings.get("packing", True),
    }  # fmt: skip
    keys |= case.settings.get("spec", {}) | more.get("keys", {})
    return write_spec(clear(folder / more.get("name", case.name)) / "spec.yaml", keys)


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Figures:
    """Relative, of losses step by step; one that is no number is a difference."""
    if len(ours) != len(theirs) or not ours:
        raise RuntimeError(f"{len(ours)} steps beside {len(theirs)}")
    found = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    if any(one != one for one in found):
        raise RuntimeError("a loss is no number")
    return {"losses": list(ours), "reference_losses": list(theirs), "first_difference": found[0],
            "difference": max(found)}  # fmt: skip


def parity(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """Against a plain PyTorch loop on this device over the same rows, padded, with SGD."""
    spec = small_set(case, folder, is_rehearsal)
    precision = case.settings["spec"]["train.precision"]
    losses = folder / f"plain-{precision}-{case.settings.get('steps', 10)}.json"
    if not losses.exists():
        work = plain_work(spec)
        losses.write_text(json.dumps(peer("sft_loops", "plain", work)["losses"]))
    ours = train(spec).must_end_well().losses
    return differences(ours, json.loads(losses.read_text())[: len(ours)])


def plain_work(spec: Path, **more: Any) -> Path:
    """The folder that a peer takes, beside the spec."""
    from dsft.spec.load import load_spec

    work = clear(spec.parent / "peer")
    loaded = load_spec(spec)
    (work / "given.json").write_text(json.dumps(given_of(spec) | more))
    (work / "model").symlink_to(Path(str(loaded.model.name_or_path)).resolve())
    return work


def same_losses(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """A run against the same run with other keys, or on the CPU."""
    spec = small_set(case, folder, is_rehearsal)
    other = small_set(case, folder, is_rehearsal, name=f"{case.name}-other", keys=filled(case, folder))
    ours = train(spec).must_end_well()
    theirs = train(other, on=case.settings.get("other_on")).must_end_well()
    return differences(theirs.losses, ours.losses)


def filled(case: Case, folder: Path) -> dict[str, Any]:
    text = json.dumps(case.settings["other"]).replace("{folder}", str(folder.resolve()))
    return dict(json.loads(text))


def quickstart(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """The quickstart on this GPU, and on the CPU beside it."""
    text = (ROOT / "specs" / "quickstart.yaml").read_text(encoding="utf-8")
    found: list[Run] = []
    for place in (None, "cpu"):
        spec = clear(folder / f"quickstart-{place or 'gpu'}") / "spec.yaml"
        spec.write_text(text.replace("name: quickstart", "name: run"), encoding="utf-8")
        steps = 4 if is_rehearsal else 50
        words = (f"train.max_steps={steps}", "train.eval_every=null", "wandb.mode=disabled")
        found.append(train(spec, *words, on=place).must_end_well())
    return differences(found[0].losses, found[1].losses)


def resume(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """A run that is killed behind a checkpoint and started again, against one that was not."""
    keys = {"keys": {"checkpoint.every": 2}}
    whole = train(small_set(case, folder, is_rehearsal, **keys)).must_end_well()
    spec = small_set(case, folder, is_rehearsal, name=f"{case.name}-killed", **keys)
    train(spec, until=3 if is_rehearsal else 7)
    checkpoints = list((spec.parent / "runs" / "run" / "checkpoints").glob("step-*"))
    again = train(spec).must_end_well()
    by_step = {int(record["train/global_step"]): record["train/loss"] for record in again.records}
    found = differences([by_step[step] for step in sorted(by_step)], whole.losses)
    return found | {"checkpoints_at_kill": len(checkpoints)}


def references(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """DPO of an adapter with its reference precomputed, live and by the adapter off: the same losses; at the
    first step, before any update, all margins are 0."""
    found = []
    for way in ("precomputed", "live", "adapter"):
        keys = {"dpo.reference": way}
        spec = small_set(case, folder, is_rehearsal, name=f"{case.name}-{way}", keys=keys, pairs=True)
        found.append(train(spec).must_end_well())
    worst = max(
        (differences(run.losses, found[0].losses) for run in found[1:]), key=lambda one: one["difference"]
    )
    return worst | {"first_margin": abs(found[0].records[0]["train/rewards/margins"])}


def whole_run(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """A run to its end: evaluation, a checkpoint and the export too. phase_error: the largest error of the
    plan in a phase, of what torch allocates; planned_device: the plan's bytes of the whole GPU with its
    driver."""
    rows = folder / f"rows-{case.name}-held-out.jsonl"
    held_out = {"data.eval": [{"path": str(rows)}], "train.eval_every": 3, "checkpoint.every": 3}
    spec = large_set(case, folder, is_rehearsal, 6, **held_out)
    write_rows(rows, "documents", 8, 128 if is_rehearsal else 4096)
    run = train(spec).must_end_well()
    phases = json.loads((run.folder / "memory.json").read_text())["phases"]
    errors = {
        name: abs(of["measured"] / of["planned"] - 1)
        for name, phase in phases.items()
        if isinstance(of := phase.get("device_allocated"), dict) and of.get("planned")
    }
    name = "H100" if is_rehearsal else gpu_name()
    words = [sys.executable, "-c", "from dsft.cli import main; main()", "plan", str(spec), "--json"]
    words.append(f"cluster={{hosts: {{localhost: 1}}, accelerator: {{name: {json.dumps(name)}}}}}")
    done = subprocess.run(words, cwd=ROOT, env=runs.environment(), capture_output=True, text=True, check=True)
    planned = json.loads(done.stdout)["memory"]["per_gpu"][0]["gpu"]
    found: Figures = {"losses": run.losses, "phases": phases, "planned_device": planned}
    found |= {f"error of {name}": error for name, error in errors.items()}
    return found | ({"phase_error": max(errors.values())} if errors else {})


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def out_of_memory(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """A micro-batch that cannot fit ends with exit code 71 and advises fewer tokens, which then fit."""
    model = runs.model_folder(folder, "small" if is_rehearsal else "1b")
    max_length, batch = (256, 64) if is_rehearsal else (4096, 24)
    rows = folder / "rows-memory.jsonl"
    write_rows(rows, "documents", 3 * batch, max_length)
    keys = base_spec(model, rows, "documents", max_length) | {
        "train.micro_batch_size": batch, "train.accumulation_steps": 1, "train.max_steps": 3,
    }  # fmt: skip
    spec = write_spec(clear(folder / case.name) / "spec.yaml", keys)
    if is_rehearsal:
        os.environ["STANDIN_GIB"] = "0.15"
    run = train(spec)
    advised = re.search(r"data\.max_tokens_per_micro_batch to ([\d,]+) or less", run.printed)
    if run.code != 71 or advised is None:
        raise RuntimeError(
            f"exit code {run.code}, not 71 with a size that fits: {runs.last_words(run.printed)}"
        )
    tokens = int(advised[1].replace(",", ""))
    smaller = tokens // max_length * max_length
    again = train(spec, f"data.max_tokens_per_micro_batch={smaller}", until=2)
    if len(again.records) < 2:
        raise RuntimeError(
            f"{smaller} of {tokens} advised tokens do not fit: {runs.last_words(again.printed)}"
        )
    return {"tokens_advised": tokens, "tokens_run": smaller}


# --- speed --------------------------------------------------------------------------------------------------


def speed(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """Tokens per second, MFU and memory of WARM + TIMED steps, of which the TIMED count."""
    arguments = case.settings
    model = runs.model_folder(folder, "small" if is_rehearsal else arguments["model"])
    warm, timed = (1, 2) if is_rehearsal else (WARM, arguments.get("timed", TIMED))
    steps = warm + timed
    max_length = 256 if is_rehearsal else arguments.get("max_length", 4096)
    micro = 2 if is_rehearsal else arguments.get("micro", 4)
    # as many rows a step as fill its one micro-batch: a short one has 205 tokens
    batch = micro * {"documents": 1, "short": max_length // 205 or 1, "pairs": 2}[arguments["rows"]]
    rows = folder / f"rows-{arguments['rows']}-{batch}.jsonl"
    write_rows(rows, arguments["rows"], (steps + 2) * batch, max_length)
    keys = (
        base_spec(model, rows, arguments["rows"], max_length)
        | {
            "train.precision": "bf16",
            "train.micro_batch_size": batch,
            "train.accumulation_steps": 1,
            "model.gradient_checkpointing": bool(arguments.get("checkpointing")),
        }
        | arguments.get("spec", {})
    )
    if arguments["rows"] == "short":  # one micro-batch a step; a plan does not know that its rows are short
        keys["data.max_tokens_per_micro_batch"] = (micro + 1) * max_length
    if arguments.get("lora"):
        keys["model.lora"] = {"rank": arguments["lora"], "alpha": 2.0 * arguments["lora"]}
        keys["model.quantize"] = arguments.get("quantize")
    spec = write_spec(clear(folder / case.name) / "spec.yaml", keys)
    more = {"checkpointing": bool(keys["model.gradient_checkpointing"])}
    more |= {key: arguments.get(key) for key in ("lora", "quantize")}
    given = given_of(spec) | more
    given = {k: v[:steps] if k in ("steps", "packs") else v for k, v in given.items()}
    if arguments["way"] == "dsft":
        run = train(spec, until=steps).must_end_well()
        if len(run.records) < steps:
            raise RuntimeError(f"{len(run.records)} of {steps} steps: {runs.last_words(run.printed)}")
        spent = [record["perf/step_time"] for record in run.records[warm:steps]]
        found = {"losses": run.losses[:steps], **memory_of(run)}
    else:
        work = clear(spec.parent / "peer")
        (work / "given.json").write_text(json.dumps(given))
        (work / "model").symlink_to(model.resolve())
        module = ("dpo" if arguments["rows"] == "pairs" else "sft") + (
            "_peers" if "trl" in arguments["way"] else "_loops"
        )
        result = peer(module, arguments["way"], work)
        ends = result["ends"]
        measured = [after - before for before, after in pairwise(ends[warm - 1 :])]
        spent = [sum(measured) / len(measured)] * timed  # TRL's packing makes its own steps
        spent = measured if len(measured) == timed else spent
        found = {key: result[key] for key in ("losses", "peaks", "reference_seconds") if key in result}
    parts = [sum(spent[i::PARTS]) for i in range(PARTS)] if timed >= PARTS else [sum(spent)]
    apart = {"spread": (max(parts) - min(parts)) / (sum(parts) / len(parts))}
    return found | apart | pace(given, arguments, model, warm, steps, sum(spent))


def pace(given: Mapping[str, Any], arguments: Mapping[str, Any], model: Path, warm: int, steps: int,
         seconds: float) -> Figures:  # fmt: skip
    """Tokens and their squares of the timed steps, in their seconds."""
    pairs = given.get("pairs")
    lengths = [len(row["input_ids"]) for row in given.get("examples", ())] or [
        (len(p["prompt_ids"]) + len(p["chosen_ids"]), len(p["prompt_ids"]) + len(p["rejected_ids"]))
        for p in pairs
    ]
    flat = [n for step in given["steps"][warm:steps] for i in step for n in as_tuple(lengths[i])]
    tokens, squares = sum(flat), sum(n * n for n in flat)
    found: Figures = {"steps": steps - warm, "step_seconds": seconds / (steps - warm), "tokens": tokens,
                      "tokens_per_s": tokens / seconds}  # fmt: skip
    if pairs is not None:
        found["pairs_per_s"] = sum(len(step) for step in given["steps"][warm:steps]) / seconds
    elif (peak := peak_tflops()) is not None:
        found["mfu"] = work_of(model, arguments.get("lora")).mfu(tokens, squares, seconds, peak)
    return found


def as_tuple(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def peak_tflops() -> float | None:
    import torch

    from dsft.plan import flops

    return flops.peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def work_of(model: Path, lora: int | None) -> Any:
    """The model FLOPs of dsft/plan/flops.py; an adapter's own are left out."""
    from dsft.plan.flops import Work

    config = json.loads((model / "config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    layer = 2 * width * width * (1 + groups / heads) + 3 * width * config["intermediate_size"]
    multiplied = layers * layer + width * config["vocab_size"]
    return Work((4 if lora else 6) * multiplied, 12 * layers * width)


def memory_of(run: Run) -> Figures:
    """Bytes: what the GPU held at most, and the plan's figure for the fullest moment before step 1."""
    peaks = {
        name: int(
            max((record.get(f"memory/peak_{name}_gib", 0) for record in run.records), default=0) * 2**30
        )
        for name in ("allocated", "reserved")
    }
    phases = json.loads((run.folder / "memory.json").read_text())["phases"]
    found: Figures = {"peaks": {k: v for k, v in peaks.items() if v}, "phases": phases}
    first = phases.get("first_step", {}).get("device_allocated")
    if isinstance(first, dict) and "planned" in first:
        found["planned"] = first["planned"]
        found["plan_error"] = abs(peaks["allocated"] / first["planned"] - 1)
    return found


# --- several GPUs -------------------------------------------------------------------------------------------


def ranks(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """Two ranks against one, over the same global batches."""
    alone = dict(case.settings["spec"]) | {"parallel.pipeline_stages": 1}
    one = train(small_set(case, folder, is_rehearsal, name=f"{case.name}-one", keys=alone)).must_end_well()
    stages = case.settings["spec"].get("parallel.pipeline_stages", 1)
    two = train(small_set(case, folder, is_rehearsal, ranks=2 // stages), ranks=2).must_end_well()
    return differences(two.losses, one.losses)


def killed_rank(case: Case, folder: Path, is_rehearsal: bool) -> Figures:
    """A rank that is killed in training: how long the other lives on, and the launcher's exit code."""
    spec = small_set(case, folder, is_rehearsal, ranks=2, keys={"data.packing": True}, steps=200)
    run_folder, killed = spec.parent / "runs" / "run", [0.0]

    def kill_one() -> None:
        while not runs.metrics(run_folder):
            time.sleep(0.1)
        me = psutil.Process()
        victims = [p for p in me.children(recursive=True) if p.environ().get("RANK") == "1"
                   and "train.py" in " ".join(p.cmdline())]  # fmt: skip
        victims[0].send_signal(signal.SIGKILL)
        killed[0] = time.monotonic()

    threading.Thread(target=kill_one, daemon=True).start()
    run = train(spec, ranks=2)
    if not killed[0] or run.code in (0, None):
        raise RuntimeError(f"exit code {run.code}: {runs.last_words(run.printed)}")
    return {"seconds_to_end": time.monotonic() - killed[0], "exit_code": run.code}


BODIES: dict[str, Callable[[Case, Path, bool], Figures]] = {
    "environment": environment, "ceilings": ceilings, "doctor": doctor, "kernels": kernels,
    "profile": profile, "whole_run": whole_run, "attention": attention,
    "quickstart": quickstart, "parity": parity, "resume": resume, "same_losses": same_losses,
    "references": references, "out_of_memory": out_of_memory, "speed": speed, "ranks": ranks,
    "killed_rank": killed_rank,
}  # fmt: skip

if __name__ == "__main__":
    main()
