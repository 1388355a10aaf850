"""The stand-in GPU's tests with other releases of torch: the oldest that dsft takes, one that images for GPUs
often have, and the newest, which a plain `pip install` brings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launching import LATE, ROOT

pytestmark = [pytest.mark.standin, pytest.mark.long]
RELEASES = ("2.10.0", "2.11.0", "2.15.0")


@pytest.mark.parametrize("release", RELEASES)
def test_standin_tests_pass_with_other_torch(release: str) -> None:
    chosen = os.environ | {"STANDIN_TORCH": release}
    subprocess.run([ROOT / "scripts" / "standin"], env=chosen, check=True, timeout=LATE)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/standin", "-m", "standin"]
    done = subprocess.run(tests, env=chosen, cwd=ROOT, capture_output=True, text=True, timeout=2 * LATE)
    assert done.returncode == 0, done.stdout[-5000:]
