"""Floating-point operations of training, and a GPU's peak: takes a census and the shape of attention, gives
the numbers behind `perf/mfu`. Pure arithmetic.
"""

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
"""Dense bf16 per GPU, in 10^12 a second, from NVIDIA's data sheets (half of the figures "with sparsity"), by
the word of the device's name; where one name is the beginning of another the longer one stands first."""


@dataclass(frozen=True)
class Work:
    """What training on examples of lengths nᵢ costs in model FLOPs: per_token · Σ nᵢ + per_square · Σ nᵢ²."""

    per_token: float
    per_square: float

    def mfu(self, tokens: int, squares: int, seconds: float, peak_tflops: float) -> float:
        """Model FLOPs utilisation, 0 to 1: `tokens` is Σ nᵢ and `squares` Σ nᵢ² of the examples that were
        trained on in `seconds` on devices of `peak_tflops` together."""
        return (self.per_token * tokens + self.per_square * squares) / (seconds * peak_tflops * 1e12)


def work(census: Census, attention_width: int) -> Work:
    """6 N + 12 L d n FLOPs for each token of an example of n tokens, as llm-foundry and torchtitan count.

    N     elements that multiply a token: all but an input embedding that is not the head, too. The forward
          takes 2 N, the gradient of the inputs 2 N, that of the weights 2 for each element that is trained:
          so 4 N for LoRA, and little more.
    L, d  layers, and heads × head dimension (`attention_width`). No discount for the causal half.
    n     the example's own length, also in a packed row, where a token sees its own example only. Padding and
          recomputation (gradient checkpointing) are work that the model does not need, and are not counted.
    """
    multiplied = [p for p in census.parameters if not p.embedding or p.aliases]
    whole, trained = sum(p.numel for p in multiplied), sum(p.numel for p in multiplied if p.trained)
    return Work(4 * whole + 2 * trained, 12 * census.num_layers * attention_width)


def peak_tflops(device_name: str) -> float | None:
    """Of one GPU by the name that its driver gives; None for one that is not in the table."""
    words = device_name.replace("-", " ")
    return next((peak for name, peak in PEAK_TFLOPS.items() if f" {name} " in f" {words} "), None)
