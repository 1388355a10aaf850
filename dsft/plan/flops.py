"""Count the FLOPs of training, and look up a GPU's peak: the numbers behind `perf/mfu`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dsft.plan.census import Census
from dsft.spec.patterns import is_layers_matrix


@dataclass(frozen=True)
class Gpu:
    """Figures of a GPU.

    tflops  peak of dense bf16 with sums in fp32 (of fp16 where it has no bf16), in 10^12 FLOP/s
    link    bytes per second that it sends to another GPU of its host: half of NVLink's or PCIe's total
    memory  in MiB, as nvidia-smi shows it, with ECC where that is on by default; None if it is sold with
            several sizes
    """

    tflops: float
    link: float
    memory: float | None = None


PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes, one direction

GPUS = {
    "B200": Gpu(2250.0, 900e9, 183359),
    "H200": Gpu(989.4, 450e9, 143771),
    "H100 NVL": Gpu(835.5, 300e9, 95830),
    "H100 PCIe": Gpu(756.0, PCIE_5, 81559),
    "H100": Gpu(989.4, 450e9, 81559),
    "H20": Gpu(148.0, 450e9, 97871),
    "A100 PCIE": Gpu(312.0, PCIE_4),
    "A100": Gpu(312.0, 300e9),
    "A40": Gpu(149.7, PCIE_4, 46068),
    "A30": Gpu(165.0, PCIE_4, 24576),
    "A10": Gpu(125.0, PCIE_4, 23028),
    "L40S": Gpu(362.05, PCIE_4, 46068),
    "L40": Gpu(181.05, PCIE_4, 46068),
    "L4": Gpu(121.0, PCIE_4, 23034),
    "RTX 6000 Ada": Gpu(364.2, PCIE_4, 49140),
    "RTX A6000": Gpu(154.8, PCIE_4, 49140),
    "RTX 5090": Gpu(209.5, PCIE_5, 32607),
    "RTX 4090": Gpu(165.2, PCIE_4, 24564),
    "RTX 3090": Gpu(71.0, PCIE_4, 24576),
    "V100": Gpu(125.0, 150e9),
    "T4": Gpu(65.0, PCIE_3, 15360),
}
"""Words in the device's name -> its figures. Speeds are from NVIDIA's data sheets and the white papers of
Ampere (GA102), Ada and Blackwell (half of the figures "with sparsity"), memory from outputs of nvidia-smi in
public repositories (drivers 525 and newer); a data sheet rounds, and counts what ECC and the driver take. If
one name is a prefix of another, the longer one comes first."""


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


ITERATIONS = 5
"""Of Newton-Schulz, with which muon brings the singular values of a matrix near 1."""


def orthogonal_flops(census: Census) -> float:
    """Return the FLOPs of these iterations for the matrices of the layers, (r, c) with r ≤ c: two products of
    2 r² c and one of 2 r³ in each."""
    found = 0.0
    for p in census.parameters:
        if p.trained and is_layers_matrix(p.name, p.shape):
            short = min(p.shape[-2:])
            found += 2.0 * ITERATIONS * (2 * short * p.numel + p.numel // max(p.shape[-2:]) * short**2)
    return found


def gpu_of(device_name: str) -> Gpu | None:
    """Return the figures of a GPU by the name that its driver reports; None if it is not in the table."""
    words = f" {device_name.replace('-', ' ')} ".lower()
    return next((gpu for name, gpu in GPUS.items() if f" {name.lower()} " in words), None)


def memory_of(device_name: str) -> float | None:
    """Return the memory of a GPU in GiB by the table, or by its name (40 of A100-SXM4-40GB; GH200's name has
    that of its CPU); None if both do not have it."""
    gpu = gpu_of(device_name)
    if gpu and gpu.memory:
        return gpu.memory / 1024
    found = re.search(r"(?<!GH200 )\b(\d+) ?GB\b", device_name, re.IGNORECASE)
    return float(found.group(1)) if found else None


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a GPU by its name; None if it is not in the table."""
    gpu = gpu_of(device_name)
    return gpu.tflops if gpu else None
