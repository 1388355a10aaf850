"""What the stand-in GPU is there to find: a tensor on the wrong device, a wait of the host; and what it
counts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.launching import LATE, ROOT
from tests.standin import finding_worker
from tests.standin.gpu import answer, environ, reported

pytestmark = pytest.mark.standin


@pytest.fixture(scope="module")
def tried() -> Any:
    """Return what was found in each pass, by its name; in a process that is started as a user starts one."""
    command = [sys.executable, "-m", finding_worker.__name__, "passes"]
    variables = environ("numbers")
    return reported(
        subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=LATE)
    )


def test_tensor_left_on_the_cpu_is_refused(tried: Any) -> None:
    assert "same device" in tried["left_on_cpu"]["error"]


def test_host_wait_is_found_at_its_line(tried: Any) -> None:
    clean, waiting = tried["loss"], tried["waited_for"]
    assert clean["error"] is waiting["error"] is None
    assert clean["waits"] == {} and clean["counts"]["stream_syncs"] == clean["counts"]["to_host"] == 0
    [place] = waiting["waits"]
    assert place.startswith("tests/standin/finding_worker.py:") and place.endswith(" waited_for")
    assert waiting["counts"]["stream_syncs"] == waiting["counts"]["to_host"] == 1


def test_gradients_equal_the_cpu(tried: Any) -> None:
    torch.manual_seed(0)
    weights, rows = torch.randn(8, 16, requires_grad=True), torch.randn(4, 8)
    finding_worker.loss(weights, rows, (torch.arange(16) % 3 == 0).expand(4, 16)).backward()
    assert weights.grad is not None
    assert tried["loss"]["gradient"] == weights.grad.double().sum().item()


@pytest.mark.parametrize(
    ("allocator", "reserved"),
    [
        pytest.param("", 16 << 30, marks=pytest.mark.long),
        ("expandable_segments:True", 820 * (20 << 20)),  # in pieces of 20 MiB
    ],
)
def test_memory_beyond_the_host_is_counted(allocator: str, reserved: int) -> None:
    found = answer("finding_worker", "memory", gib=24, PYTORCH_ALLOC_CONF=allocator)
    assert "Tried to allocate 64.00 GiB" in found.pop("refused") and found == {
        "before": 8 << 30,
        "allocated": 16 << 30,
        "reserved": reserved,
        "after": 8 << 30,
    }
