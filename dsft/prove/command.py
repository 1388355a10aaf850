"""`dsft prove SPEC`: train a small model in the spec's own mode, compare the run with a plain PyTorch loop,
and print a certificate: losses, gradient norms, weights, masks and a resume, each with its bound."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from dsft.errors import printable
from dsft.plan.tables import printed, table
from dsft.prove import plain
from dsft.prove.runs import make_runs
from dsft.prove.small import STEPS, refused
from dsft.spec.load import load_spec
from dsft.spec.schema import Spec
from dsft.system.files import temporary_folder

BOUNDS = {
    "fp32": {"loss": 1e-5, "gradient norm": 1e-4, "weights": 1e-3, "least": 0.01},
    "bf16": {"loss": 2e-3, "gradient norm": 1e-2, "weights": 2e-1, "least": 1.0},
}
RESUMED = BOUNDS | {"bf16": {"loss": 1e-4, "gradient norm": 2e-3, "weights": 1e-2, "least": 1.0}}
"""Bounds of the differences from the loop, and of those of a resumed run from the one without a stop. least:
what a tensor's change counts as at least, in units of the mean tensor's: where gradients are nearly 0 their
rounding decides what AdamW makes of them."""
OF_ANSWERS = {"loss": 1e-2, "weights": 3e-1}
"""Bounds in bf16 where the loss is of whole answers, such as a difference of sums over a pair's."""
_FLOOR = 0.1  # a loss below is compared as if it were this

Tensors = Mapping[str, torch.Tensor]
Check = dict[str, Any]
"""what is compared; the figures found and expected, None for weights; their difference; its bound."""


def prove(path: Path, overrides: Sequence[str], processes: int | None, *, as_json: bool) -> int:
    """Print the certificate and write it to OUTPUT_DIR/NAME-certificate.json. Return 0 if all holds, else 1.
    Raises DsftError, of a small run that fails with its exit code."""
    spec = load_spec(path, overrides)
    if spec.train.precision not in BOUNDS:
        raise refused("train.precision", f"dsft prove does not know {spec.train.precision} yet; use another")
    logging.disable_progress_bar()
    result = Path(spec.output_dir, f"{spec.name}-certificate.json")
    folder = Path(spec.output_dir, f"prove-{secrets.token_hex(4)}").absolute()
    with temporary_folder(folder):
        facts, outcomes = make_runs(spec, folder, processes)
    checks = list(compared(spec, outcomes))
    holds = all(one["holds"] for one in checks) and not facts["masks"]["different"]
    found = {"spec": str(path), "overrides": list(overrides), "holds": holds, **facts, "checks": checks}
    result.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(json.dumps(found, indent=1) if as_json else report(found, result), flush=True)
    return 0 if found["holds"] else 1


def compared(spec: Spec, outcomes: Mapping[str, plain.Outcome]) -> Iterator[Check]:
    """Yield the comparisons of the outcomes of `make_runs`."""
    precision, run, loop = spec.train.precision, outcomes["run"], outcomes["loop"]
    of_answers = OF_ANSWERS if spec.task_kind.whole and precision == "bf16" else {}
    yield from _compared("", run, loop, loop.start, BOUNDS[precision] | of_answers)
    yield from _compared("resumed: ", outcomes["again"], run, loop.start, RESUMED[precision])
    if "exact" in outcomes:
        yield from _compared("in fp32: ", outcomes["exact"], loop, loop.start, BOUNDS["fp32"])


def _compared(
    name: str, found: plain.Outcome, expected: plain.Outcome, start: Tensors, bounds: Mapping[str, float]
) -> Iterator[Check]:
    """Compare the last steps, as many as were made, and what came of them. name: before those of the checks;
    start: the weights before all steps."""
    first = STEPS - len(found.losses)
    figures = {"loss": (found.losses, expected.losses), "gradient norm": (found.norms, expected.norms)}
    for what, (ours, theirs) in figures.items():
        for step, (one, other) in enumerate(zip(ours, theirs[-len(ours) :], strict=True), first + 1):
            yield _relative(f"{name}{what}, step {step}", one, other, bounds[what])
    if expected.held_out is not None:
        assert found.held_out is not None, "a run evaluates what it holds out after its last step"
        yield _relative(f"{name}held-out loss", found.held_out, expected.held_out, bounds["loss"])
    mine, its = found.weights.keys(), expected.weights.keys()
    yield _check(f"{name}trained tensors", len(mine), len(its), len(mine ^ its), 0.0)
    yield _weights(f"{name}weights", found.weights, expected.weights, start, bounds)


def _relative(what: str, found: float, expected: float, bound: float) -> Check:
    return _check(what, found, expected, abs(found - expected) / max(abs(expected), _FLOOR), bound)


def _check(what: str, found: float | None, expected: float | None, difference: float, bound: float) -> Check:
    figures = {"what": what, "found": found, "expected": expected, "difference": difference, "bound": bound}
    return figures | {"holds": difference <= bound}


def _weights(
    what: str, found: Tensors, expected: Tensors, start: Tensors, bounds: Mapping[str, float]
) -> Check:
    """Compare the tensors that both have: the largest ‖difference‖ ÷ ‖change‖."""
    names = found.keys() & expected.keys() & start.keys()
    change = {name: float((expected[name].double() - start[name].double()).norm()) for name in names}
    elements = sum(start[name].numel() for name in names)
    least = bounds["least"] * (sum(one * one for one in change.values()) / elements) ** 0.5
    off = {}
    for name in sorted(names):
        difference = float((found[name].double() - expected[name].double()).norm())
        off[name] = difference / max(change[name], least * start[name].numel() ** 0.5, 1e-30)
    worst = max(off, key=lambda name: off[name])
    return _check(f"{what}, largest in {worst}", None, None, off[worst], bounds["weights"])


def report(found: Mapping[str, Any], path: Path) -> str:
    """Return the certificate as text."""
    rows = [
        [one["what"], *("" if one[key] is None else f"{one[key]:.7g}" for key in ("found", "expected"))]
        + [f"{one['difference']:.1e}", f"{one['bound']:.0e}", "" if one["holds"] else "FAILS"]
        for one in found["checks"]
    ]
    failed, seen = sum(not one["holds"] for one in found["checks"]), found["masks"]
    lines = [
        f"tokens and masks of {seen['compared']} rows: {len(seen['different'])} differ",
        *(f"  {place}" for place in seen["different"]),
        *(f"not compared: {count} rows, {reason}" for reason, count in seen["left"].items()),
        f"{failed} of {len(rows)} differ by more than their bound"
        if failed
        else f"all {len(rows)} figures hold",
        f"certificate: {path}",
    ]
    head = printed([table(["", "found", "expected", "difference", "bound", ""], rows)])
    text = "\n".join([found["mode"], f"resumed in: {found['resumed_in']}", head + lines[0], *lines[1:]])
    return printable(text)
