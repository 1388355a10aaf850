"""Losses, gradients, norms and weights of every mode against a plain PyTorch loop; one launch per number of
ranks. A few cases that try every pair of values run always, and a few of those whose rows are split; all of
them with `-m long`."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launching import forked, on_the_cpu
from tests.parity.cases import PAIRED, SPLIT, Case, all_cases, core
from tests.selected import selected, tiered
from tests.swap_disk import why_no_swap

WORKER = Path(__file__).with_name("worker.py")
FARTHER = 2.0
GIVES_UP = 5
"""Launches in a row without a result after which the cases that are left are not tried."""

CASES = all_cases()
WHOLE = [case for case in CASES if case.sequence_parallel == 1]
CORE = core(WHOLE)
ALWAYS = [*CORE, *(case for case in CASES if case.name in SPLIT)]
Launch = Callable[[Sequence[str]], tuple[dict[str, Any], str]]


def launch(ranks: int, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return results by case, up to the first that fails, and then why."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        try:
            with on_the_cpu():
                done = forked(WORKER, ranks, [str(results), *names])
            log = done.stdout + done.stderr
        except subprocess.TimeoutExpired as expired:
            log = f"{expired.stdout!r}\n{expired.stderr!r}\nended after {expired.timeout:.0f} s\n"
        found = json.loads(results.read_text()) if results.exists() else {}
        errors = [error.read_text() for error in sorted(Path(folder).glob("*.error"))]
        return found, "\n".join(errors or log.splitlines()[-60:])


def try_each(names: Sequence[str], launch: Launch) -> dict[str, Any]:
    """Return a result of each case, or its error. A case that fails may leave ranks in a collective and so
    ends its launch; those after it go into another."""
    found: dict[str, Any] = {}
    without_result = 0
    while left := [name for name in names if name not in found]:
        results, log = launch(left)
        found |= results
        without_result = 0 if results else without_result + 1
        failed = [name for name in left if name not in results]
        found |= dict.fromkeys(failed if without_result == GIVES_UP else failed[:1], log)
    return found


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Callable[[int], dict[str, Any]]:
    """By number of ranks: the results or errors of the cases that are asked for."""

    @functools.cache
    def of(ranks: int) -> dict[str, Any]:
        wanted = [case for case in selected(request, "case") if case.ranks == ranks]
        names = [case.name for case in wanted if not (case.on_disk and why_no_swap())]
        results = try_each(names, functools.partial(launch, ranks))
        if folder := os.environ.get("PARITY_RESULTS"):  # for the table in docs/internals/numerics.md
            Path(folder, f"{ranks}ranks.json").write_text(json.dumps(results, indent=1))
        return results

    return of


@pytest.mark.parametrize("case", tiered(CASES, ALWAYS), ids=lambda case: case.name)
def test_engine_equals_plain_loop(case: Case, found: Callable[[int], dict[str, Any]]) -> None:
    if case.on_disk and (reason := why_no_swap()):
        pytest.skip(reason)
    result = found(case.ranks)[case.name]
    if isinstance(result, str):
        pytest.fail(result)
    beyond = {name: result[name] for name, bound in case.bounds().items() if not result[name] <= bound}
    # Processors round differently: two float32 gradients that are each 1e-6 from the exact one may be farther
    # than that from each other. The engine's may be no more than twice as far from it as the plain loop's.
    if 0 < result["farther"] <= FARTHER:
        beyond.pop("gradient", None)
    if 0 < result["norm_exact"] <= case.bounds()["norm"]:  # the weights of the two loops have drifted apart
        beyond.pop("norm", None)
    assert not beyond, f"bounds {case.bounds()}, found {result}"
    assert not result["finite_when_skipped"], "a step whose norm is reported as finite was skipped"


def test_core_covers_every_pair_of_values() -> None:
    def values(cases: Sequence[Case], names: tuple[str, ...]) -> set[object]:
        return {tuple(getattr(case, name) for name in names) for case in cases}

    fields = [(name,) for name in vars(CASES[0])]
    for names in (*PAIRED, *fields):
        assert values(CORE, names) == values(WHOLE, names), names
    assert len(values(CORE, ("zero_stage", "trained"))) == 12 and len(CORE) < len(WHOLE) / 6
    assert set(SPLIT) < {case.name for case in ALWAYS}


def test_cases_after_a_failure_still_run() -> None:
    launches: list[list[str]] = []

    def until_one_fails(names: Sequence[str]) -> tuple[dict[str, Any], str]:
        launches.append(list(names))
        done = list(itertools.takewhile(lambda name: name not in ("b", "c", "e"), names))
        return dict.fromkeys(done, {}), f"no {names[len(done)]}" if len(done) < len(names) else ""

    assert try_each("abcdef", until_one_fails) == {
        "a": {},
        "b": "no b",
        "c": "no c",
        "d": {},
        "e": "no e",
        "f": {},
    }
    assert launches == [list("abcdef"), list("cdef"), list("def"), list("f")]
    assert try_each("abcdefgh", lambda names: ({}, "no torch")) == dict.fromkeys("abcdefgh", "no torch")
