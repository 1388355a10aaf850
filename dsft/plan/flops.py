"""Count the FLOPs of training, and look up a GPU's peak: the numbers behind `perf/mfu`."""

from __future__ import annotations

from dataclasses import dataclass

from dsft.plan.census import Census

PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "L40S": 362.05,
    "L4": 121.0,
    "A10": 125.0,
}
"""Word in the device's name -> peak of dense bf16 per GPU, in 10^12 FLOP/s, from NVIDIA's data sheets (half
of the figures "with sparsity"). If one name is a prefix of another, the longer one comes first."""


@dataclass(frozen=True)
class Work:
    """Model FLOPs of training on examples of lengths nᵢ: per_token · Σ nᵢ + per_square · Σ nᵢ²."""

    per_token: float
    per_square: float

    def mfu(self, tokens: int, squares: int, seconds: float, peak_tflops: float) -> float:
        """Return the model FLOPs utilization, 0 to 1. tokens, squares: Σ nᵢ and Σ nᵢ² of the examples trained
        on in `seconds`; peak_tflops: sum over all devices."""
        return (self.per_token * tokens + self.per_square * squares) / (seconds * peak_tflops * 1e12)


def work(census: Census, attention_width: int) -> Work:
    """Return the work of training a model: 6 N + 12 L d n FLOPs per token of an example with n tokens, as
    llm-foundry and torchtitan count.

    N     elements that multiply a token: all but an input embedding that is not tied to the head. The forward
          takes 2 N, the gradient of the inputs 2 N, the gradient of the weights 2 per trained element; LoRA
          therefore takes little more than 4 N.
    L, d  number of layers, and heads × head dimension (`attention_width`). Causal attention is counted in
    full.
    n     length of the example itself, also in a packed row, where a token attends to its own example only.
          Padding and recomputation (gradient checkpointing) are not counted, since the model does not need
          them.
    """
    multiplied = [p for p in census.parameters if not p.embedding or p.aliases]
    whole, trained = sum(p.numel for p in multiplied), sum(p.numel for p in multiplied if p.trained)
    return Work(4 * whole + 2 * trained, 12 * census.num_layers * attention_width)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by the name that its driver reports; None if it is not in the table."""
    words = device_name.replace("-", " ")
    return next((peak for name, peak in PEAK_TFLOPS.items() if f" {name} " in f" {words} "), None)
