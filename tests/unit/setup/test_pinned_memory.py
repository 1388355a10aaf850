"""Whether a run pins what it offloads to the memory of its hosts. That the spec and a DeepSpeed JSON go first
is in tests/unit/plan/test_ds_config.py and test_config_file.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut
from dsft.setup import resolve
from dsft.setup.resolve import pinning
from dsft.spec.schema import Spec
from tests.make import make_run
from tests.specs import minimal_spec

COUNTED = Census("X", 1, None, (Parameter("w", (1000, 1000), 0, False, ()),))  # 10 MB locked at ZeRO 1


def spec(offload: dict[str, Any]) -> Spec:
    return minimal_spec(parallel={"zero_stage": 1, "offload_optimizer": offload})


def decide(spec: Spec, device: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str] | None:
    monkeypatch.setattr(resolve, "host_memory", lambda: memory)
    world: Any = SimpleNamespace(stage=0, device=torch.device(device), gather=lambda mine: [mine])
    return pinning(make_run(spec, world), COUNTED, Cut((1,)))


@pytest.mark.parametrize(("memory", "expected"), [(20_000_000, True), (19_000_000, False)])
def test_half_of_the_hosts_memory_may_be_locked(
    memory: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = decide(spec({"device": "cpu"}), "cuda", memory, monkeypatch)
    assert found is not None and found[0] is expected and "0.0 GiB of" in found[1]


def test_nothing_is_locked_where_nothing_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = decide(spec({"device": "cpu"}), "cpu", 2**40, monkeypatch)
    assert found == (False, "there is no GPU to copy to")


def test_there_is_nothing_to_say_without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(spec({"device": "none"}), "cuda", 1, monkeypatch) is None
