"""`scripts/gpu prepare`: a folder of wheels for a GPU machine without a network, whose own Python has torch
and what comes with it. Takes constraints.txt and benchmarks/peers.txt; asks the package index
that pip is set to; writes .gpu/ and a line in git's own list of what it leaves out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.paired import git

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 64  # of the folder and the repository together
PLATFORMS = (
    "manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1",
)  # fmt: skip

# Not torch, accelerate, peft, tokenizers, safetensors, huggingface_hub, pyarrow, numpy and their like, which
# an image for GPUs has; not wandb, without which a run works. DeepSpeed has no wheel: one is made here.
WHEELS = (
    "transformers", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions",
    "msgpack", "hjson", "httpx",
    "trl", "datasets", "dill", "multiprocess", "xxhash",  # for the peers
    "liger-kernel", "bitsandbytes",
)  # fmt: skip


def prepare(folder: Path, python: str) -> int:
    """The exit code. `python`: the version there, such as 3.12."""
    folder.mkdir(exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    leave_out(folder)
    pins = pinned()
    wanted = [f"{name}=={pins[normal(name)]}" for name in WHEELS]
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    target = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    commands = (
        [*pip, "download", *target, *platforms, "-d", str(folder), *wanted],
        [
            *pip,
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(folder),
            f"deepspeed=={pins['deepspeed']}",
        ],
    )
    for command in commands:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
        )
        if done.returncode != 0:
            print(f"scripts/gpu: pip ended with exit code {done.returncode}", file=sys.stderr)
            return done.returncode
    for wheel in folder.glob("bitsandbytes-*.whl"):
        slim(wheel)
    size = (sum(file.stat().st_size for file in folder.iterdir()) + tracked_bytes()) / 2**20
    print(f"{folder.name}/ and the repository: {size:.0f} MiB; take both there, then: scripts/gpu setup")
    if size > LIMIT_MIB:
        print(f"scripts/gpu: more than {LIMIT_MIB} MiB", file=sys.stderr)
        return 1
    return 0


def slim(wheel: Path) -> None:
    """Leave out the libraries for other GPUs and for CUDA before 13, nine tenths of it."""
    aside = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in whole.infolist():
            if not re.search(r"_(xpu|rocm|cuda1[12])\d+\.so$", entry.filename):
                kept.writestr(entry, whole.read(entry))
    aside.replace(wheel)


def pinned() -> dict[str, str]:
    lines = [
        line
        for file in (ROOT / "constraints.txt", ROOT / "benchmarks" / "peers.txt")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    ]
    return {normal(name): pin for name, _, pin in (line.partition("==") for line in lines)}


def normal(name: str) -> str:
    return name.replace("_", "-").lower()


def leave_out(folder: Path) -> None:
    """In .git/info/exclude, so that the folder is no change of the repository."""
    where = git("rev-parse", "--git-path", "info/exclude")
    if not where:
        return
    path = ROOT / where
    path.parent.mkdir(parents=True, exist_ok=True)
    line = f"/{folder.name}/"
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if line not in known:
        path.write_text("\n".join([*known, line]) + "\n", encoding="utf-8")


def tracked_bytes() -> int:
    """The size of the repository's files; without git, of all files outside of hidden folders and runs/."""
    listed = git("ls-files", "-z").strip("\0")
    files = [ROOT / name for name in listed.split("\0")] if listed else list(others(ROOT))
    return sum(file.stat().st_size for file in files if file.is_file())


def others(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name in ("runs", "shared") or path.is_symlink():
            continue
        if path.is_dir():
            yield from others(path)
        else:
            yield path
