"""Which operations a plan needs, and what becomes of a run that cannot have one."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from dsft.dist.world import World
from dsft.engine import ops
from dsft.errors import BuildError
from dsft.spec.schema import Spec
from tests.specs import minimal_spec

NOWHERE = cast(World, None)
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/disk"}


def spec(optimizer: str = "adamw", **parallel: Any) -> Spec:
    return minimal_spec(
        data={"train": [{"path": "a.jsonl"}]},
        parallel={"zero_stage": 3, **parallel},
        optim={"name": optimizer, "learning_rate": 1.0},
    )


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(ops, "load_everywhere", lambda builder, world, say: names.append(builder.name))
    return names


def prepared(spec: Spec, say: Callable[[str], None] = print) -> bool | None:
    return ops.prepare_ops(spec, NOWHERE, say)


@pytest.mark.parametrize(("made", "names"), [
    (spec(), []),
    (spec(offload_optimizer=CPU), ["cpu_adam"]),
    (spec("sgd", offload_optimizer=CPU), []),
    (spec(offload_parameters=NVME), ["pin_memory", "async_io"]),
    (spec(offload_optimizer=NVME), ["cpu_adam", "pin_memory", "async_io"]),
])  # fmt: skip
def test_ops_needed_by_a_spec(loaded: list[str], made: Spec, names: list[str]) -> None:
    assert prepared(made) is (True if "cpu_adam" in names else None)
    assert loaded == names


def test_deepspeed_cpu_adam_is_used_if_available(loaded: list[str]) -> None:
    assert prepared(spec(offload_optimizer=CPU, allow_torch_adam=True)) is True


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(builder: Any, world: World, say: Any) -> None:
        raise BuildError(f"DeepSpeed's {builder.name} cannot be built on node2: the cause.")

    monkeypatch.setattr(ops, "load_everywhere", fails)


def test_torch_adam_is_used_if_allowed(broken: None) -> None:
    lines: list[str] = []
    assert prepared(spec(offload_optimizer=CPU, allow_torch_adam=True), lines.append) is False
    assert len(lines) == 1 and "cpu_adam cannot be built on node2: the cause; by parallel.allow" in lines[0]


def test_missing_cpu_adam_is_an_error_unless_allowed(broken: None) -> None:
    with pytest.raises(BuildError, match=r"the cause; or set parallel\.allow_torch_adam: true") as raised:
        prepared(spec(offload_optimizer=CPU))
    assert raised.value.exit_code == 72


def test_nvme_states_need_deepspeed_cpu_adam(broken: None) -> None:
    with pytest.raises(BuildError, match=r"the cause\.$"):
        prepared(spec(offload_optimizer=NVME, allow_torch_adam=True))
