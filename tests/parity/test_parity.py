"""Losses, gradients, norms and weights of every mode against a plain PyTorch loop; one launch per number of
ranks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu
from tests.parity.cases import Case, cases

WORKER = Path(__file__).with_name("worker.py")
FARTHER = 2.0


@functools.cache
def launch(ranks: int) -> tuple[dict[str, Any], str]:
    """Results by case, and what the processes wrote; a case that failed is absent, and so are those after
    it."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        try:
            with on_the_cpu():
                done = forked(WORKER, ranks, [str(results)])
            log = done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            log = f"{expired.stdout!r}\n{expired.stderr!r}\nended after {expired.timeout:.0f} s\n"
        found = json.loads(results.read_text()) if results.exists() else {}
        if kept := os.environ.get("PARITY_RESULTS"):  # a folder, for the table in docs/numerics.md
            Path(kept, f"{ranks}ranks.json").write_text(json.dumps(found, indent=1))
        errors = [error.read_text() for error in sorted(Path(folder).glob("*.error"))]
        return found, "\n".join(errors or log.splitlines()[-60:])


@pytest.mark.parametrize(
    "case", [c for ranks in (1, 2, 3, 4) for c in cases(ranks)], ids=lambda case: case.name
)
def test_equals_the_plain_loop(case: Case) -> None:
    results, log = launch(case.ranks)
    assert case.name in results, log
    found = results[case.name]
    beyond = {name: found[name] for name, bound in case.bounds().items() if not found[name] <= bound}
    # Processors round differently: two float32 gradients that are each 1e-6 from the exact one may be farther
    # than that from each other. The engine's may be no more than twice as far from it as the plain loop's.
    if 0 < found["farther"] <= FARTHER:
        beyond.pop("gradient")
    assert not beyond, f"bounds {case.bounds()}, found {found}"
    assert not found["finite_when_skipped"], "a step whose norm is reported as finite was skipped"


def test_every_name_stands_for_one_case() -> None:
    names = [case.name for ranks in (1, 2, 3, 4) for case in cases(ranks)]
    assert len(set(names)) == len(names)
