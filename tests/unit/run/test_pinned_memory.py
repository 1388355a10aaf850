"""Who decides whether memory is page-locked: the spec, a DeepSpeed JSON, or the run by its hosts' memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsft.plan.census import Census, Parameter
from dsft.plan.cut import Cut
from dsft.plan.ds_config import deepspeed_config
from dsft.rank.environment import Launched
from dsft.run import resolve
from dsft.run.job import Job
from dsft.run.resolve import with_pinned_memory
from dsft.spec.batch import batch_sizes
from dsft.spec.layout import Layout
from dsft.spec.schema import Spec

COUNTED = Census("X", 1, None, (Parameter("w", (1000, 1000), 0, False, ()),))  # 10 MB locked at ZeRO 1


def job(offload: dict[str, Any], decided: frozenset[str] = frozenset()) -> Job:
    spec = Spec.model_validate(
        {
            "name": "small",
            "task": "pretrain",
            "model": {"from_config": {"model_type": "llama"}},
            "data": {"train": [{"path": "builtin:quickstart"}]},
            "parallel": {"zero_stage": 1, "offload_optimizer": offload},
            "train": {"micro_batch_size": 1, "accumulation_steps": 1},
            "optim": {"learning_rate": 1e-3},
        }
    )
    batch = batch_sizes(spec.train, 1)
    launched = Launched("python", 0, 1, 0, "127.0.0.1", 1)
    config = deepspeed_config(spec, batch)
    return Job(spec=spec, batch=batch, config=config, launched=launched, layout=Layout(1, 1), decided=decided)


def decide(before: Job, device: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[str]]:
    monkeypatch.setattr(resolve, "host_memory", lambda: memory)
    world: Any = SimpleNamespace(stage=0, device=torch.device(device), gather=lambda mine: [mine])
    said: list[str] = []
    config = with_pinned_memory(before, before.config, COUNTED, Cut((1,)), world, said.append)
    section = config["zero_optimization"]
    return section.get("offload_optimizer", {}).get("pin_memory"), said


@pytest.mark.parametrize(("memory", "expected"), [(20_000_000, True), (19_000_000, False)])
def test_half_of_the_hosts_memory_may_be_locked(
    memory: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, said = decide(job({"device": "cpu"}), "cuda", memory, monkeypatch)
    assert value is expected
    assert len(said) == 1 and said[0].startswith(f"pin_memory: {str(expected).lower()}, ")


def test_nothing_is_locked_where_nothing_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    value, said = decide(job({"device": "cpu"}), "cpu", 2**40, monkeypatch)
    assert value is False and said == ["pin_memory: false, there is no GPU to copy to"]


@pytest.mark.parametrize("value", [True, False])
def test_the_spec_decides(value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(job({"device": "cpu", "pin_memory": value}), "cuda", 1, monkeypatch) == (value, [])


def test_a_deepspeed_json_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    before = job({"device": "cpu"}, frozenset({"offload_optimizer"}))
    assert decide(before, "cuda", 1, monkeypatch) == (True, [])


def test_there_is_nothing_to_say_without_offload(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(job({"device": "none"}), "cuda", 1, monkeypatch) == (None, [])
