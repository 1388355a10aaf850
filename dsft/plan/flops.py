"""Count the FLOPs of training, and look up a GPU's peak: the numbers behind `perf/mfu`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsft.plan.census import Census


@dataclass(frozen=True)
class Gpu:
    """Data-sheet figures of a GPU.

    tflops  peak of dense bf16 with sums in fp32 (of fp16 where it has no bf16), in 10^12 FLOP/s
    link    bytes per second that it sends to another GPU of its host: half of NVLink's or PCIe's total
    memory  in GB (10^9 bytes); None if it is sold with several sizes
    """

    tflops: float
    link: float
    memory: float | None = None


PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes, one direction

GPUS = {
    "B200": Gpu(2250.0, 900e9, 180),
    "H200": Gpu(989.4, 450e9, 141),
    "H100 NVL": Gpu(835.5, 300e9, 94),
    "H100 PCIe": Gpu(756.0, PCIE_5, 80),
    "H100": Gpu(989.4, 450e9, 80),
    "H20": Gpu(148.0, 450e9, 96),
    "A100 PCIE": Gpu(312.0, PCIE_4),
    "A100": Gpu(312.0, 300e9),
    "A40": Gpu(149.7, PCIE_4, 48),
    "A30": Gpu(165.0, PCIE_4, 24),
    "A10": Gpu(125.0, PCIE_4, 24),
    "L40S": Gpu(362.05, PCIE_4, 48),
    "L40": Gpu(181.05, PCIE_4, 48),
    "L4": Gpu(121.0, PCIE_4, 24),
    "RTX 6000 Ada": Gpu(364.2, PCIE_4, 48),
    "RTX A6000": Gpu(154.8, PCIE_4, 48),
    "RTX 5090": Gpu(209.5, PCIE_5, 32),
    "RTX 4090": Gpu(165.2, PCIE_4, 24),
    "RTX 3090": Gpu(71.0, PCIE_4, 24),
    "V100": Gpu(125.0, 150e9),
    "T4": Gpu(65.0, PCIE_3, 16),
}
"""Words in the device's name -> its figures, from NVIDIA's data sheets and the white papers of Ampere
(GA102), Ada and Blackwell (half of the figures "with sparsity"). If one name is a prefix of another, the
longer one comes first."""


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

    N     elements that multiply a token: all but an input embedding that is not tied to the head, and of a
          mixture of experts those that the token passes through. The forward
          takes 2 N, the gradient of the inputs 2 N, the gradient of the weights 2 per trained element; LoRA
          therefore takes little more than 4 N.
    L, d  number of layers, and heads × head dimension (`attention_width`). Causal attention is counted in
    full.
    n     length of the example itself, also in a packed row, where a token attends to its own example only.
          Padding and recomputation (gradient checkpointing) are not counted, since the model does not need
          them.
    """
    multiplied = [p for p in census.parameters if not p.embedding or p.aliases]
    whole, trained = sum(p.active for p in multiplied), sum(p.active for p in multiplied if p.trained)
    return Work(4 * whole + 2 * trained, 12 * census.num_layers * attention_width)


def gpu_of(device_name: str) -> Gpu | None:
    """Return the figures of a GPU by the name that its driver reports; None if it is not in the table."""
    words = f" {device_name.replace('-', ' ')} ".lower()
    return next((gpu for name, gpu in GPUS.items() if f" {name.lower()} " in words), None)


def memory_of(device_name: str) -> float | None:
    """Return the memory of a GPU in GB by its name, which may have it (A100-SXM4-40GB), or by the table; None
    if both do not."""
    if found := re.search(r"(\d+) ?GB\b", device_name, re.IGNORECASE):
        return float(found.group(1))
    gpu = gpu_of(device_name)
    return gpu.memory if gpu else None


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by its name; None if it is not in the table."""
    gpu = gpu_of(device_name)
    return gpu.tflops if gpu else None
