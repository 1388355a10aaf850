"""Takes variants, each a command; gives samples measured in turn, their paired ratios, and Markdown tables.

A variant is run in a fresh process per round and prints one JSON object of numbers on its last line. Variants
are interleaved (A B C, B C A, …), so that a machine that is slow for a while is slow for all of them, and
compared round by round: absolute figures of a shared machine say little.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

RESAMPLES = 10_000
Samples = Mapping[str, Sequence["Sample"]]


def new_file(name: str) -> Path:
    """The type of an option that names a file to write: one that exists is not overwritten."""
    if os.path.lexists(name):
        raise argparse.ArgumentTypeError(f"{name} exists already, and is not overwritten; name another file")
    return Path(name)


@dataclass(frozen=True)
class Sample:
    """values: what the process printed; seconds: of the whole process; cpu_seconds: of it and of all
    processes that it waited for, user and system."""

    values: Mapping[str, Any]
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Ratio:
    """Of the rounds' own ratios: smallest, median and largest, and the 95 % interval of the median."""

    low: float
    median: float
    high: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        return (
            f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f}; "
            f"95 % {self.interval[0]:.2f} to {self.interval[1]:.2f})"
        )


def measure(
    variants: Mapping[str, Sequence[str]],
    rounds: int,
    environment: Mapping[str, str] | None = None,
    timeout: float = 1800,
) -> dict[str, list[Sample]]:
    """`rounds` samples of each variant, in turn. What happens goes to standard error.

    Raises RuntimeError, with the end of what it wrote, for a variant that fails or takes more than `timeout`
    seconds.
    """
    names, samples = list(variants), {name: list[Sample]() for name in variants}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = run(name, variants[name], environment or {}, timeout)
            samples[name].append(sample)
            note(
                f"round {number + 1} of {rounds}: {name}: {sample.seconds:.1f} s {json.dumps(sample.values)}"
            )
    return samples


def run(name: str, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Sample:
    before, began = os.times(), time.perf_counter()
    with subprocess.Popen(
        command,
        env=os.environ | dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{name}: more than {timeout} s") from None
        finally:
            end(process)
    seconds, after = time.perf_counter() - began, os.times()
    if process.returncode != 0:
        raise RuntimeError(f"{name}: exit code {process.returncode}\n{stdout[-2000:]}\n{stderr[-4000:]}")
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Sample(json.loads(stdout.strip().splitlines()[-1]), seconds, cpu_seconds)


def end(process: subprocess.Popen[str]) -> None:
    """It and all that it started, where it still runs: torchrun gives each rank a session of its own."""
    if process.poll() is None:
        for started in (*psutil.Process(process.pid).children(recursive=True), process):
            started.kill()
    process.wait()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def column(samples: Sequence[Sample], key: str) -> list[float]:
    return [float(sample.values[key]) for sample in samples]


def ratio(samples: Samples, key: str, over: str, under: str) -> Ratio:
    """`key` of variant `over` ÷ that of variant `under`, round by round."""
    pairs = zip(column(samples[over], key), column(samples[under], key), strict=True)
    ratios = [a / b for a, b in pairs]
    return Ratio(min(ratios), statistics.median(ratios), max(ratios), bootstrap(ratios))


def bootstrap(values: Sequence[float], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile interval of the median under resampling with replacement; the same on every call."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples) - 1]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """min / median / max, for a cell of a table."""
    return " / ".join(f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values)))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- where it ran -----------------------------------------------------------------------------------------


def machine(packages: Sequence[str] = ("torch", "deepspeed", "transformers")) -> dict[str, str]:
    """Hardware and versions, for the head of a table; a package that is not installed is named as such."""
    return {
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "gpu": gpu(),
        "threads per process": os.environ.get("OMP_NUM_THREADS", "not set"),
        "Python": platform.python_version(),
        **{package: installed(package) for package in packages},
        "dsft": commit(),
    }


def machine_line(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except OSError:
        return "none"
    return "; ".join(listed.stdout.split("\n")).strip("; ") if listed.returncode == 0 else "none"


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def git(*words: str) -> str:
    """What git prints in this repository; nothing where there is no git, or no repository."""
    try:
        here = Path(__file__).parents[1]
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def commit() -> str:
    """The commit that is measured, with a + where files differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return (git("rev-parse", "--short", "HEAD") or "no commit") + ("+" if changed else "")


# --- memory of this process -------------------------------------------------------------------------------


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """The process's high-water mark, since its start or the last `forget_peak`."""
    return status_bytes("VmHWM")


def forget_peak() -> None:
    """The high-water mark falls to what is resident now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def status_bytes(key: str) -> int:
    """A line of /proc/self/status, such as VmData; RuntimeError where it has none."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def quantized(given: Mapping[str, Any]) -> dict[str, Any]:
    """What from_pretrained takes to quantize linear layers as dsft's model.quantize does."""
    if not given.get("quantize"):
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    form = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=given["quantize"],
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, given.get("dtype", "float32")),
    )
    return {"quantization_config": form, "device_map": {"": 0 if given.get("device") == "cuda" else "cpu"}}


def device_peaks() -> dict[str, int]:
    """Bytes of this process's GPU since its start, by torch's allocator; nothing where it used none."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
