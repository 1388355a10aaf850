"""Which device a rank takes, and when it refuses to train on the CPU. No GPU is here: DeepSpeed's accelerator
and torch's reason are imitated."""

from pathlib import Path

import pytest
import torch

from dsft.dist import device as module
from dsft.dist.device import describe_device, take_device
from dsft.errors import WorldError
from dsft.rank.places import CPU
from dsft.spec.schema import Accelerator

CUDA = "13.0"


class Gpus:
    def __init__(self, count: int) -> None:
        self.count, self.current = count, -1

    def device_name(self) -> str:
        return "cuda" if self.count else "cpu"

    def device_count(self) -> int:
        return self.count

    def set_device(self, number: int) -> None:
        assert number < self.count, "invalid device ordinal"
        self.current = number


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    found = Gpus(0)
    monkeypatch.setattr(module, "get_accelerator", lambda: found)
    monkeypatch.setattr(module, "_NODE", Path("/dev/null/nvidiactl"))
    monkeypatch.setattr(module, "_allocate", lambda device: None)
    return found


def test_each_rank_takes_its_own(gpus: Gpus) -> None:
    gpus.count = 4
    environ = {"LOCAL_RANK": "2"}
    assert take_device(2, None, environ) == torch.device("cuda", 2)
    assert gpus.current == 2 and environ == {"LOCAL_RANK": "2"}


def test_a_process_that_sees_one_gpu_takes_it(gpus: Gpus) -> None:
    gpus.count = 1
    environ = {"LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "RANK": "3"}
    assert take_device(3, None, environ) == torch.device("cuda", 0)
    assert gpus.current == 0
    assert environ == {"LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "RANK": "3"}


def test_a_gpu_whose_first_allocation_fails(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA driver error: unknown error\nmore lines")

    gpus.count = 1
    monkeypatch.setattr(module, "_allocate", refuse)
    for conf, way_out in (("expandable_segments:True", "PYTORCH_ALLOC_CONF= "), ("", "nvidia-smi")):
        with pytest.raises(WorldError, match=f"cuda:0: CUDA driver error: unknown error[.] .*{way_out}"):
            take_device(0, None, {"PYTORCH_ALLOC_CONF": conf})


def test_fewer_gpus_than_processes(gpus: Gpus) -> None:
    gpus.count = 2
    with pytest.raises(WorldError, match=r"LOCAL_RANK=2, but .* sees 2 GPUs \(CUDA_VISIBLE_DEVICES=0,1\)"):
        take_device(2, None, {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_gpu_that_is_asked_for_and_not_there(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "device_name", lambda: "cuda")
    with pytest.raises(WorldError, match="torch sees no GPU: .*; and DS_ACCELERATOR=cuda asks for one"):
        take_device(0, None, {"DS_ACCELERATOR": "cuda"})


H100, NAMED_CPU = Accelerator(name="H100"), Accelerator(name="cpu")


@pytest.mark.parametrize(("built_for", "promised", "has_driver", "text"), [
    (CUDA, None, False, "is built for GPUs"),
    (CUDA, H100, False, "cluster.accelerator names H100"),
    (None, H100, False, "cluster.accelerator names H100"),
    (None, None, True, "this host has NVIDIA's driver"),
    (CUDA, NAMED_CPU, True, None),
    (None, None, False, None),
])  # fmt: skip
def test_the_cpu_is_taken_only_where_it_is_meant(
    built_for: str | None,
    promised: Accelerator | None,
    has_driver: bool,
    text: str | None,
    gpus: Gpus,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 11040).")

    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "init", init)
    if has_driver:
        monkeypatch.setattr(module, "_NODE", tmp_path)
    if text is None:
        assert take_device(0, promised, {}) == torch.device("cpu")
        return
    with pytest.raises(WorldError, match=r"driver .* too old \(found version 11040\); and ") as caught:
        take_device(0, promised, {})
    assert text in str(caught.value) and "DS_ACCELERATOR=cpu" in str(caught.value)
    assert take_device(0, promised, {"DS_ACCELERATOR": "cpu"}) == torch.device("cpu")


def test_cpu_is_described_by_its_kind_alone() -> None:
    assert describe_device(torch.device("cpu")) == CPU
