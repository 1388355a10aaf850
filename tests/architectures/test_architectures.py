"""The architectures of the table under ZeRO 2 and 3, and with rows split over two ranks, against a plain
PyTorch loop, from a folder that transformers wrote to one that it reads; one launch. USUAL run always,
all of them with `-m long`. DSFT_UPDATE_GOLDEN=1 makes docs/models.md's table."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsft.spec.architecture import PIPELINE_MODEL_TYPES
from tests.architectures.cases import ARCHITECTURES, BOUND, PACKED, SPLIT, USUAL, small_model
from tests.launching import ROOT, forked
from tests.selected import selected, tiered

WORKER = Path(__file__).with_name("worker.py")
DOCS = ROOT / "docs" / "models.md"
MODES, STEPS = ("zero2", "zero3"), ("padded", "packed")
FIGURES = ("loss", "gradient", "weights")


Found = tuple[dict[str, Any], str]


def launch(kinds: Sequence[str]) -> Found:
    """Return results by architecture, and what the processes wrote."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in kinds:
            model = small_model(kind)
            model.save_pretrained(folder / kind)
            model.config.save_pretrained(folder / f"{kind}-model")
        done = forked(WORKER, 2, [name, *kinds])
        found: dict[str, Any] = {}
        for path in folder.glob("results.*.json"):
            found |= json.loads(path.read_text())
        errors = [error.read_text() for error in sorted(folder.glob("*.error"))]
        return found, "\n".join(errors or (done.stdout + done.stderr).splitlines()[-60:])


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> Found:
    return launch(selected(request, "kind"))


@pytest.mark.parametrize("kind", tiered(ARCHITECTURES, USUAL))
@pytest.mark.parametrize("mode", MODES)
def test_architecture_equals_plain_loop_and_exports_unchanged(kind: str, mode: str, launched: Found) -> None:
    results, log = launched
    assert kind in results, log
    found = results[kind][mode]
    assert found.get("attention") == PACKED.get(kind, "auto"), found
    assert over_bounds(results[kind], mode) == {}
    assert found["export"] == 0.0, "logits of the export"
    assert found["report"] == {}, "what transformers says of the export"
    assert found["names"] == [], "names that stand in one of the two folders"


@pytest.mark.parametrize("kind", tiered([kind for kind in ARCHITECTURES if kind not in PACKED], USUAL))
def test_shared_prompts_equal_two_rows(kind: str, launched: Found) -> None:
    results, log = launched
    assert kind in results, log
    found = results[kind]["shared"]
    assert max(found["answers"], found["gradient"]) <= max(BOUND, 4 * found["rounding"]), found


@pytest.mark.parametrize("kind", tiered(ARCHITECTURES, USUAL))
def test_rows_split_over_two_ranks_equal_the_plain_loop_or_are_refused(kind: str, launched: Found) -> None:
    results, log = launched
    assert kind in results, log
    if kind in SPLIT:
        refused = f"parallel.sequence_parallel: rows of a {kind} model cannot be split: .*{SPLIT[kind]}"
        assert re.search(refused, results[kind]["split"]["refused"])
    else:
        assert over_bounds(results[kind], "split") == {}


def over_bounds(results: dict[str, Any], mode: str) -> dict[tuple[str, str], float]:
    found = {(step, name): results[mode][step][name] for step in STEPS for name in FIGURES}
    return {at: figure for at, figure in found.items() if not figure <= bound(results, *at)}


def bound(results: dict[str, Any], step: str, figure: str) -> float:
    """1e-6, or four times what the plain loop itself is off from float64."""
    return max(BOUND, 4 * float(results["float64"][step][figure]))


def test_table_in_docs_lists_these_architectures() -> None:
    text = DOCS.read_text()
    if os.environ.get("DSFT_UPDATE_GOLDEN"):
        results, _ = launch(list(ARCHITECTURES))
        block = f"<!-- architectures: made by the tests, do not edit -->\n\n{table(results)}\n\n<!-- end -->"
        text = re.sub(r"<!-- architectures.*?<!-- end -->", lambda _: block, text, flags=re.DOTALL)
        DOCS.write_text(text)
    _, *listed = re.findall(r"^\| ([a-z0-9_]+) \|", text, flags=re.MULTILINE)  # after the heading
    assert listed == list(ARCHITECTURES), "DSFT_UPDATE_GOLDEN=1 writes the table again"


def table(results: dict[str, Any]) -> str:
    """Return the largest of the three figures, rounded up to one digit."""
    lines = [
        "| architecture | ZeRO 2 | packed | ZeRO 3 | packed | export | pipeline | split | packed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in ARCHITECTURES:
        cells = [worst(results[kind][mode], step) for mode in MODES for step in STEPS]
        pipeline = "yes" if kind in PIPELINE_MODEL_TYPES else "refused"
        split = ["refused" if kind in SPLIT else worst(results[kind]["split"], step) for step in STEPS]
        lines.append(f"| {kind} | {' | '.join(cells)} | equal | {pipeline} | {' | '.join(split)} |")
    return "\n".join(lines)


def worst(found: dict[str, Any], step: str) -> str:
    attention = found["attention"] if step == "packed" else "auto"
    figure = rounded_up(max(found[step][name] for name in FIGURES))
    return {"auto": figure, "eager": f"{figure} (eager)", "refused": "refused"}[attention]


def rounded_up(value: float) -> str:
    power = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / power) * power:.0e}"
