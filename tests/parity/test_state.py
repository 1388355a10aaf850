"""Runs saved under one layout and resumed under the same or another, against uninterrupted runs.

Same layout: equal to the last bit, values and moments, whatever the optimizer. Another: fp32 to 1e-6 of
each tensor's largest element (the order of sums differs); bf16 between ZeRO 1, 2 and 3 on as many ranks:
equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.launching import forked, on_the_cpu
from tests.selected import selected, tiered
from tests.swap_disk import why_no_swap

WORKER = Path(__file__).with_name("state_worker.py")
EXACT = 0.0
ROUNDING = 1e-6
CODES = 2e-2  # a block that lay on two ranks is quantized again, and a moment between two codes gets another
MUON = 1e-5  # singular values are brought near 1, those of rounding too
BF16 = 2e-3  # ZeRO 0 adds micro-batches up in bf16, another Adam rounds otherwise: a bf16 weight flips

SAVED = (
    *("z0-fp32", "z1-fp32", "z2-fp32", "z3-fp32", "z3-fp32-tied", "z3-fp32-offload"),
    *("z0-bf16", "z1-bf16", "z2-bf16", "z3-bf16", "z1-bf16-offload", "z2-bf16-offload", "z3-bf16-offload"),
    *("z0-fp32-pipe", "z1-fp32-pipe", "z0-bf16-pipe", "z1-bf16-pipe", "z1-bf16-pipe-offload"),
    *("z0-fp32-pipe-tied", "z1-fp32-pipe-tied", "z1-bf16-pipe-tied", "z1-bf16-pipe-tied-offload"),
    *("z3-bf16-host", "z3-bf16-offload-host"),
    *("z0-fp32-8bit", "z2-fp32-8bit", "z3-bf16-8bit", "z1-fp32-pipe-8bit"),
    *("z0-fp32-muon", "z2-fp32-muon", "z3-fp32-muon", "z3-bf16-muon", "z1-fp32-pipe-muon"),
    *("z0-fp32-momentum", "z2-fp32-momentum", "z3-fp32-sgd", "z0-bf16-momentum"),
    "z2-fp32-lion",
)
ON_TWO: dict[str, float] = {
    **{f"{name}:{name}:3": EXACT for name in SAVED},
    **{f"{name}:{name}:0": EXACT for name in ("z0-fp32", "z2-fp32", "z3-bf16", "z0-bf16", "z3-bf16-offload")},
    "z2-fp32:z3-fp32:3": ROUNDING,
    "z2-fp32:z3-fp32:0": 4 * ROUNDING,  # six steps, the first of them Adam's largest
    "z3-fp32:z1-fp32:3": ROUNDING,
    "z0-fp32:z2-fp32:3": ROUNDING,
    "z3-fp32:z0-fp32:3": ROUNDING,
    "z3-fp32-tied:z1-fp32-tied:3": ROUNDING,
    "z1-fp32:z1-fp32-pipe:3": ROUNDING,
    "z1-fp32-pipe:z1-fp32:3": ROUNDING,
    "z0-fp32-pipe:z3-fp32:3": ROUNDING,
    "z1-fp32-pipe-tied:z3-fp32-tied:3": ROUNDING,
    "z3-fp32-tied:z0-fp32-pipe-tied:3": ROUNDING,
    "z2-fp32-momentum:z3-fp32-momentum:3": ROUNDING,
    "z2-fp32-8bit:z0-fp32-8bit:3": CODES,
    "z2-fp32-muon:z3-fp32-muon:3": MUON,
    "z3-fp32-muon:z0-fp32-muon:3": MUON,
    "z1-fp32-pipe-muon:z2-fp32-muon:3": MUON,
    "z2-fp32-lion:z3-fp32-lion:3": ROUNDING,
    "z2-bf16:z3-bf16:3": EXACT,
    "z3-bf16:z1-bf16:3": EXACT,
    "z1-bf16-offload:z3-bf16-offload:3": ROUNDING,  # its vector loop takes other elements together
    "z0-bf16:z1-bf16:3": BF16,
    "z1-bf16:z0-bf16:3": BF16,
    "z3-bf16:z3-bf16-offload:3": BF16,
    "z3-bf16-offload-host:z3-bf16-offload:3": EXACT,
    "z2-bf16:z3-bf16-host:3": EXACT,
}
ON_THREE: dict[str, float] = {"z2-fp32:z3-fp32:3": ROUNDING, "z3-fp32:z0-fp32:3": ROUNDING}
ON_FOUR: dict[str, float] = {
    "z1-fp32-pipe:z3-fp32:3": ROUNDING,
    "z2-fp32:z2-fp32:3": ROUNDING,
    "z2-fp32:z3-fp32-hpz:0": 4 * ROUNDING,
    "z3-fp32:z1-fp32-pipe:3": ROUNDING,
    "z0-fp32:z0-fp32-pipe:3": ROUNDING,
    "z3-fp32-tied:z1-fp32-pipe-tied:3": ROUNDING,
    "z3-fp32-offload:z3-fp32-offload:3": ROUNDING,
}
RANKS = {2: ON_TWO, 3: ON_THREE, 4: ON_FOUR}

# Where libaio is: states and parameters on NVMe, and the same in host memory.
IN_MEMORY = ("z3-fp32-large-offload", "z3-bf16-large-offload-params")
SWAPPED_ALWAYS = (
    *("z3-fp32-large-nvme:z3-fp32-large-nvme:3", "z3-fp32-large-nvme:z3-fp32-large-offload:3"),
    "z3-bf16-large-nvme-params:z3-bf16-large-nvme-params:3",
)
SWAPPED = (
    *SWAPPED_ALWAYS,
    "z3-fp32-large-nvme:z3-fp32-large-nvme:0",  # over a step's own moments and gradients
    "z3-fp32-large-nvme-momentum:z3-fp32-large-nvme-momentum:3",
    "z3-bf16-large-params:z3-bf16-large-params:3",
    "z3-bf16-large-offload-params:z3-bf16-large-offload-params:3",
    "z3-bf16-large-nvme-host:z3-bf16-large-nvme-host:3",
    "z3-bf16-large-offload:z3-bf16-large-nvme-params:3",
)


LOADS = [(ranks, case, bound) for ranks, cases in RANKS.items() for case, bound in cases.items()]
SHORT = ("z2-fp32", "z2-fp32-8bit", "z2-fp32-muon", "z3-fp32-tied", "z1-fp32-pipe-tied", "z2-fp32-momentum",
    "z2-fp32-lion", "z3-bf16", "z2-bf16-offload", "z3-bf16-offload-host")  # fmt: skip
"""Layouts of saved runs, one of each kind, that are always resumed; the others with `-m long`."""
REPEATED = {
    (2, "z3-bf16:z3-bf16:0"), (2, "z2-fp32:z3-fp32:0"),  # from step 0 as z2-fp32
    (2, "z2-fp32-momentum:z3-fp32-momentum:3"),  # as z2-fp32 and z2-fp32-muon
    (2, "z3-fp32-tied:z0-fp32-pipe-tied:3"),  # on four ranks into a pipeline
    (2, "z3-bf16:z3-bf16-offload:3"), (2, "z3-fp32-tied:z1-fp32-tied:3"),  # as z3-bf16 to ZeRO 1
    (3, "z2-fp32:z3-fp32:3"), (4, "z2-fp32:z2-fp32:3"),  # as the others on four ranks
}  # fmt: skip
"""Loads of these runs that go as others do, and are tried with `-m long`."""
ALWAYS = [load for load in LOADS if load[1].partition(":")[0] in SHORT and load[:2] not in REPEATED]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case, those of loads with the number of ranks."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "model").mkdir()
    asked = selected(request, "load")
    sources = {case.partition(":")[0] for _, case, _ in asked}
    for ranks in RANKS:
        loads = [case for number, case, _ in asked if number == ranks]
        cases = [*(sorted(sources) if ranks == 2 else ()), *loads]
        if ranks == 2 and not why_no_swap():
            swapped = selected(request, "swapped")
            cases += [*dict.fromkeys((*IN_MEMORY, *(case.partition(":")[0] for case in swapped))), *swapped]
        if cases:
            launch(folder, ranks, cases)
    print(table(folder))
    return dict(read(folder))


def launch(folder: Path, ranks: int, cases: list[str]) -> None:
    with on_the_cpu():
        done = forked(WORKER, ranks, [str(folder), *cases])
    if done.returncode:
        pytest.fail("\n".join(done.stderr.splitlines()[-60:]))


def read(folder: Path) -> Iterator[tuple[str, Any]]:
    for line in (folder / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        yield result["case"] + (f" on {result['ranks']}" if "ranks" in result else ""), result


def table(folder: Path) -> str:
    """As in docs/checkpoints.md: the largest difference after step 6, relative to its tensor's largest."""
    lines = ["| saved | gone on | ranks | from step | values | moments |", "|---|---|---|---|---|---|"]
    for _, result in read(folder):
        if "differences" in result:
            source, target, step = result["case"].split(":")
            moments = max((d for k, d in result["differences"].items() if k != "value"), default=0.0)
            value = result["differences"]["value"]
            lines.append(
                f"| {source} | {target} | {result['ranks']} | {step} | {value:.1e} | {moments:.1e} |"
            )
    return "\n".join(lines)


@pytest.mark.parametrize("load", tiered(LOADS, ALWAYS), ids=lambda load: f"{load[0]}-{load[1]}")
def test_resumed_run_equals_uninterrupted_run(results: dict[str, Any], load: tuple[int, str, float]) -> None:
    check_goes_on(results, *load)


@pytest.mark.parametrize("swapped", tiered(SWAPPED, SWAPPED_ALWAYS))
def test_run_resumed_from_nvme_is_the_same(results: dict[str, Any], swapped: str) -> None:
    skip_without_a_disk()
    check_goes_on(results, 2, swapped, EXACT)


def test_nvme_offload_trains_the_same(results: dict[str, Any]) -> None:
    skip_without_a_disk()
    assert results["z3-fp32-large-nvme"]["losses"] == results["z3-fp32-large-offload"]["losses"]
    kinds = ("nvme-params", "offload-params", "nvme-host")  # of states and of parameters
    runs = [results[name]["losses"] for kind in kinds if (name := f"z3-bf16-large-{kind}") in results]
    assert len(runs) >= 2 and all(losses == runs[0] for losses in runs)


def skip_without_a_disk() -> None:
    if reason := why_no_swap():
        pytest.skip(reason)


def check_goes_on(results: dict[str, Any], ranks: int, case: str, bound: float) -> None:
    source, _, saved_at = case.split(":")
    found, without_break = results[f"{case} on {ranks}"], results[source]
    assert found["moved"] > 1e-3, "the steps after the checkpoint change the weights, else nothing is shown"
    expected = without_break["losses"][int(saved_at) :]
    assert len(found["losses"]) == len(expected)
    for loss, other in zip(found["losses"], expected, strict=True):
        assert abs(loss - other) <= bound * other
    kinds = {"value"} if bound == BF16 else found["differences"].keys()
    assert {kind: found["differences"][kind] for kind in kinds if found["differences"][kind] > bound} == {}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_cpu_adam_resumes_bit_for_bit_after_many_steps() -> None:
    """Its C++ side carries powers of the betas from step to step, which no tensor holds."""
    from dsft.engine import state
    from dsft.engine.optimizer import CpuAdamW

    torch.manual_seed(0)
    weight, gradients = torch.randn(64), torch.randn(60, 64)
    runs = []
    for _ in range(2):
        parameter = torch.nn.Parameter(weight.clone())
        runs.append((parameter, CpuAdamW([parameter], lr=0.1, betas=(0.9, 0.95))))
    (parameter, optimizer), (resumed, other) = runs
    for gradient in gradients[:40]:
        parameter.grad = gradient
        optimizer.step()
    state.empty_state(SimpleNamespace(optimizer=other), 40)
    with torch.no_grad():
        resumed.copy_(parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            other.state[resumed][kind].copy_(optimizer.state[parameter][kind])
    for gradient in gradients[40:]:
        for one, adam in runs:
            one.grad = gradient
            adam.step()
        assert torch.equal(parameter, resumed)
