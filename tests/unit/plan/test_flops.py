"""Model FLOPs against published figures that state tokens per second and MFU."""

import pytest

from dsft.plan.census import Census, Parameter
from dsft.plan.flops import gpu_of, peak_tflops, work


def model(numel: int, layers: int, trained: bool = True, tied: bool = True, vocabulary: int = 0) -> Census:
    aliases = ("lm_head.weight",) if tied else ()
    parameters = (
        Parameter("layers.0.w", (numel - vocabulary,), 0, False, (), trained),
        Parameter("embed", (vocabulary,), None, True, aliases, trained),
    )
    return Census("X", layers, None, parameters)


def test_a_published_figure_comes_out() -> None:
    """llm-foundry's table: MPT 7b (6,658,859,008 parameters, 32 layers, width 4,096, tied), 4,096 tokens,
    8,611 tokens a second on each H100: 40.4 % MFU."""
    found = work(model(6_658_859_008, 32), 4096)
    assert found.mfu(8611, 8611 * 4096, 1.0, 989.4) == pytest.approx(0.404, abs=0.0035)


def test_by_hand() -> None:
    """Two examples of 3 and 1 tokens, N = 100, 2 layers, width 8: 6·100·4 + 12·2·8·(9 + 1)."""
    assert work(model(100, 2), 8).mfu(4, 10, 2.0, 1e-9) == pytest.approx((2400 + 1920) / 2000)


def test_frozen_weights_have_no_gradient_and_an_untied_embedding_no_product() -> None:
    assert work(model(100, 2, trained=False), 8).per_token == 400
    assert work(model(100, 2, tied=False, vocabulary=40), 8).per_token == 360


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989.4),
    ("NVIDIA H100 PCIe", 756.0),
    ("NVIDIA H200", 989.4),
    ("NVIDIA A100-SXM4-80GB", 312.0),
    ("NVIDIA L40S", 362.05),
    ("NVIDIA L4", 121.0),
    ("NVIDIA A10", 125.0),
    ("NVIDIA A100", 312.0),
    ("NVIDIA GeForce RTX 4090", 165.2),
    ("NVIDIA RTX 6000 Ada Generation", 364.2),
    ("Tesla V100-SXM2-16GB", 125.0),
    ("Quadro GP100", None),
])  # fmt: skip
def test_the_peak_of_a_device_by_its_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


@pytest.mark.parametrize(
    ("name", "link"),
    [("NVIDIA A100-SXM4-80GB", 300e9), ("NVIDIA A100-PCIE-40GB", 32e9), ("rtx 4090", 32e9), ("T4", 16e9)],
)
def test_the_link_of_a_device_by_its_name(name: str, link: float) -> None:
    gpu = gpu_of(name)
    assert gpu is not None and gpu.link == link
