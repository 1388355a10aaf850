"""Settings of every test: no network, no W&B, one thread, kept compiled operations, GPU tests skipped
where there is none. Variables that are set already are left alone, but for those that reach outside."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.launching import LATE
from tests.standin.gpu import why_not

ROOT = Path(__file__).resolve().parent.parent


LAUNCHED = {"architectures", "integration", "lab", "parity", "standin"}
"""Folders of tests that start several processes."""
LONGEST = (
    "parity/test_parity.py", "integration/test_quantize.py", "integration/test_rehearse.py",
    "lab/test_ways_in.py", "integration/test_prove.py", "integration/test_stopped.py",
    "lab/test_supervised_faults.py", "integration/test_commands_in_docs.py", "parity/test_state.py",
    "architectures/test_architectures.py", "integration/test_distill.py", "integration/test_replay.py",
    "integration/test_reference.py", "integration/test_kto.py", "integration/test_killed.py",
    "standin/test_rehearse.py", "integration/test_wheel.py", "integration/test_launchers.py",
    "integration/test_data_build.py", "integration/test_api.py", "standin/test_quantized.py",
    "parity/test_frozen.py", "integration/test_lora.py", "integration/test_long_rows.py",
    "integration/test_resume.py", "integration/test_reward.py", "integration/test_differing.py",
    "standin/test_jobs.py", "lab/test_network.py", "parity/test_probe.py",
    "unit/launcher/test_attempt.py", "integration/test_classify.py", "integration/test_loading.py",
    "integration/test_evaluate.py", "integration/test_compile.py", "lab/test_world.py",
    "standin/test_memory.py", "integration/test_first_step.py",
)  # fmt: skip
"""Files that take more than some eight seconds of a core, the longest first."""


def count_gpus() -> int:
    """CUDA devices; torch is asked only where the driver answers, since asking costs seconds."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listed.returncode != 0:
        return 0
    import torch

    return torch.cuda.device_count()


GPUS = count_gpus()

# Before any test imports torch or deepspeed, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if GPUS == 0:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", WANDB_MODE="disabled")
os.environ["DSFT_VERBOSE"] = "1"  # runs print every step and the details of their start
LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "TORCHELASTIC_", "PET_")
for name in list(os.environ):
    if name.startswith(LAUNCHERS):
        del os.environ[name]
for name in (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "DSFT_JOB", "DSFT_HEARTBEAT", "DSFT_LOGS",
    "NPROC_PER_NODE", "NNODES", "NODE_RANK", "ADDR", "PORT", "WANDB_API_KEY", "WANDB_PROJECT",
):  # fmt: skip
    os.environ.pop(name, None)

# Signals that are ignored (nohup, a command in the background) stay so in every process that a test starts;
# one with a handler is the default again there. A hangup does not end the tests themselves.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


QUICK = 20
"""Examples of a property at most, but for `-m long`: there as many as it says, or hypothesis's 100."""

# A busy machine is no fault of an example.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=QUICK)
hypothesis.settings.register_profile("full", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """`-m long` runs everything; as pytest takes it, it would leave out all that does not take long. A pytest
    that a test starts is no worker of xdist."""
    if not hasattr(config, "workerinput"):
        os.environ.pop("PYTEST_XDIST_WORKER", None)
    if config.option.markexpr == "long":
        config.option.markexpr = "long or not long"
    hypothesis.settings.load_profile("full" if "long" in config.option.markexpr else "quick")


def shorten(item: pytest.Item) -> None:
    """A property that says how many examples it takes has QUICK of them at most."""
    test = getattr(item, "obj", None)
    settings = getattr(test, "_hypothesis_internal_use_settings", None)
    if settings is not None and settings.max_examples > QUICK:
        test._hypothesis_internal_use_settings = hypothesis.settings(settings, max_examples=QUICK)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected is never garbage: it is not looked through, now or by any test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def place_in_line(item: pytest.Item) -> int:
    file = item.path.relative_to(ROOT / "tests").as_posix()
    if file in LONGEST:
        return LONGEST.index(file)
    return len(LONGEST) + (not LAUNCHED & set(item.path.parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "long" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        for item in items:
            shorten(item)
    # First the files that take longest, then all that start processes: no worker is left alone at the end.
    items.sort(key=place_in_line)
    for item in items:
        if LAUNCHED & set(item.path.parts):  # the launch is given up first, which says what its ranks wrote
            item.add_marker(pytest.mark.timeout(2 * LATE))
        if item.get_closest_marker("standin") and (reason := why_not()):
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and GPUS == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, this machine has none"))


@pytest.fixture(scope="session")
def lab() -> Iterator[Any]:
    """Two hosts (tests/lab/hosts.py), one pair for all tests of this process: leave it as `lab.reset()` does.
    A test that wants a pair of its own takes `two_hosts()`, which costs a third of a second."""
    from tests.lab.hosts import two_hosts, why_not

    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made
