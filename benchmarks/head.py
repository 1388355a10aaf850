"""The output layer and its loss, forward and backward: time, memory and error of ways to compute them.

    python -m benchmarks.head [--rounds 5] [--tokens 2048] [--vocabulary 65536] [--hidden 512] [--write FILE]

Prints the Markdown table of docs/internals/benchmarks.md; FILE gets every sample as JSON. Each is a process
of its own, on as many threads as OMP_NUM_THREADS says. Memory is how far the process's high-water mark rises
above its inputs, with both gradients in it. The error is that of the loss against float64 on the same inputs.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks import paired
from benchmarks.paired import Sample

Loss = Callable[[Tensor, nn.Linear, Tensor], Tensor]
"""Hidden states (n, H), output layer and targets (n,) -> mean loss, a differentiable scalar."""

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
VARIANTS = {
    "full": "logits whole, log_softmax in fp32",
    "checkpointed": "checkpoint per 512 tokens, fp32",
    "torch": "linear_cross_entropy, no options",
    "torch-512": "linear_cross_entropy, batch_chunk_size 512, accurate",
    "uniform": "dsft, next-token loss",
    "general": "dsft, any gradient per token",
}
OTHERS = {"torch-auto": "linear_cross_entropy, automatic chunks"}  # many times slower on a CPU
EXACT = "float64"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=[*VARIANTS, *OTHERS])
    parser.add_argument("--write", type=paired.new_file, help="a file for every sample, as JSON")
    parser.add_argument("--one", nargs=2, metavar=("VARIANT", "PRECISION"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    shape = (given.tokens, given.vocabulary, given.hidden)
    if given.one:
        variant, precision = given.one
        print(json.dumps(exact(precision, shape) if variant == EXACT else sample(variant, precision, shape)))
        return
    sizes = ("--tokens", str(shape[0]), "--vocabulary", str(shape[1]), "--hidden", str(shape[2]))
    command = (sys.executable, "-m", "benchmarks.head", *sizes, "--one")
    samples = paired.measure({p: [*command, EXACT, p] for p in PRECISIONS}, rounds=1)
    each = {f"{variant} {p}": [*command, variant, p] for p in PRECISIONS for variant in given.variants}
    samples |= paired.measure(each, given.rounds)
    facts = paired.machine(("torch",))
    if given.write:
        kept = {name: [asdict(one) for one in taken] for name, taken in samples.items()}
        given.write.write_text(json.dumps({"machine": facts, "shape": shape, "samples": kept}, indent=1))
    print(f"{shape[0]:,} tokens × {shape[1]:,} vocabulary × hidden {shape[2]}, {given.rounds} rounds.")
    print(f"{paired.machine_line(facts)}\n")
    print(table(samples, given.variants))


def table(samples: dict[str, list[Sample]], variants: Sequence[str]) -> str:
    header = ("", "peak MB", "÷ full", "CPU s", "÷ full", "wall s", "÷ full", "error of the loss")
    rows = []
    for precision in PRECISIONS:
        (exactly,) = paired.column(samples[precision], "loss")
        for variant in variants:
            name, full = f"{variant} {precision}", f"full {precision}"
            row = [f"{(VARIANTS | OTHERS)[variant]}, {precision}"]
            for key, digits in (("peak_mb", 0), ("cpu_s", 2), ("wall_s", 2)):
                row.append(paired.spread(paired.column(samples[name], key), digits))
                row.append("1" if name == full else str(paired.ratio(samples, key, name, full)))
            errors = [abs(found - exactly) / exactly for found in paired.column(samples[name], "loss")]
            rows.append([*row, f"{max(errors):.1e}"])
    return paired.markdown(header, rows)


# --- one sample -------------------------------------------------------------------------------------------


def inputs(precision: str, tokens: int, vocabulary: int, hidden: int) -> tuple[Tensor, nn.Linear, Tensor]:
    """Hidden states (tokens, hidden), output layer and targets (tokens,), the same in every process."""
    dtype = PRECISIONS[precision]
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).to(dtype).requires_grad_()
    layer = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    return states, layer, torch.randint(0, vocabulary, (tokens,))


def sample(variant: str, precision: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """One forward and backward in this process, after a small one that wakes the kernels."""
    loss_of = losses(variant)
    loss_of(*inputs(precision, 64, 512, shape[2])).backward()
    states, layer, targets = inputs(precision, *shape)
    paired.forget_peak()
    resident, wall, cpu = paired.resident_bytes(), time.perf_counter(), time.process_time()
    loss = loss_of(states, layer, targets)
    loss.backward()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = paired.peak_bytes() - resident
    assert states.grad is not None and layer.weight.grad is not None
    return {"peak_mb": peak / 1e6, "cpu_s": cpu, "wall_s": wall, "loss": float(loss.detach())}


@torch.no_grad()
def exact(precision: str, shape: tuple[int, int, int]) -> dict[str, float]:
    """The loss in float64, of inputs that are rounded already where they are bf16; a few rows at a time."""
    states, layer, targets = inputs(precision, *shape)
    weight, parts = layer.weight.double(), zip(states.split(128), targets.split(128), strict=True)
    total = sum(float(F.cross_entropy(s.double() @ weight.T, t, reduction="sum")) for s, t in parts)
    return {"loss": total / len(targets)}


def losses(variant: str) -> Loss:
    if variant in ("uniform", "general"):
        return functools.partial(ours, variant == "uniform")
    found: dict[str, Loss] = {
        "full": full,
        "checkpointed": checkpointed,
        "torch": functools.partial(in_torch, lambda: None),
        "torch-512": functools.partial(
            in_torch, lambda: nn.LinearCrossEntropyOptions(batch_chunk_size=512, acc_policy="accurate")
        ),
        "torch-auto": functools.partial(in_torch, lambda: nn.LinearCrossEntropyOptions()),
    }
    return found[variant]


def full(states: Tensor, layer: nn.Linear, targets: Tensor) -> Tensor:
    return summed(states, layer.weight, targets) / len(targets)


def checkpointed(states: Tensor, layer: nn.Linear, targets: Tensor) -> Tensor:
    parts = zip(states.split(512), targets.split(512), strict=True)
    sums = [checkpoint(summed, s, layer.weight, t, use_reentrant=False) for s, t in parts]
    return torch.stack(sums).sum() / len(targets)


def summed(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logps = F.log_softmax(F.linear(states, weight).float(), -1)
    return -logps.gather(1, targets[:, None]).sum()


def in_torch(options: Callable[[], Any], states: Tensor, layer: nn.Linear, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(states, layer.weight, targets, options=options())


def ours(uniform: bool, states: Tensor, layer: Any, targets: Tensor) -> Tensor:
    from dsft.model.head import Head  # here, since the others need no transformers

    layer.__class__ = Head
    layer.uniform = uniform
    logps: Tensor = layer(states[None], targets[None], len(targets))
    return -logps.double().sum() / len(targets)


if __name__ == "__main__":
    main()
