"""Keys and bytes of offload to NVMe."""

import json
from typing import Any

import pytest

from dsft.plan.census import Census, Elements, Parameter
from dsft.plan.ds_config import deepspeed_config
from dsft.plan.ds_entries import HostFacts
from dsft.plan.ds_keys import problems
from dsft.plan.memory.offload import AIO_ROWS, swapped

DISK = {"device": "nvme", "nvme_path": "/disk"}
STATES = {"zero_stage": 3, "offload_optimizer": DISK}
BOTH = {**STATES, "offload_parameters": DISK}
MODEL = Census(
    "X",
    1,
    None,
    (Parameter("embed", (3000, 1000), None, True, ()),
     Parameter("layers.0.w", (1000, 1001), 0, False, ()),
     Parameter("layers.0.frozen", (1000, 1000), 0, False, (), trained=False)),
)  # fmt: skip


def test_deepspeed_takes_the_keys_and_dsft_knows_them(make_spec: Any) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    config = deepspeed_config(make_spec(parallel=BOTH), None)
    assert list(problems(config)) == []
    parsed = DeepSpeedConfig(json.loads(json.dumps(config | {"train_micro_batch_size_per_gpu": 1})))
    offload = parsed.zero_config.offload_optimizer
    assert (str(offload.nvme_path), offload.buffer_count, offload.pipeline) == ("/disk", 4, False)
    assert (parsed.zero_config.offload_param.buffer_count, parsed.zero_config.offload_param.max_in_cpu) == (
        5,
        0,
    )
    assert parsed.aio_config == {key: value for key, (value, _) in AIO_ROWS.items()}


def test_no_key_of_a_disk_without_one(make_spec: Any) -> None:
    config = deepspeed_config(
        make_spec(parallel={"zero_stage": 3, "offload_optimizer": {"device": "cpu"}}), None
    )
    assert "aio" not in config and "buffer_count" not in config["zero_optimization"]["offload_optimizer"]
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] > 0


def test_parameters_on_a_disk_are_not_read_ahead_whatever_the_model(make_spec: Any) -> None:
    config = deepspeed_config(make_spec(parallel=BOTH), None, HostFacts(Elements(10**9, 10**9)))
    zero = config["zero_optimization"]
    assert (zero["stage3_prefetch_bucket_size"], zero["stage3_max_reuse_distance"]) == (0, 0)
    assert zero["reduce_bucket_size"] == 50_000_000, "what else is sized by the model is"


def test_bytes_of_a_rank(make_spec: Any) -> None:
    """Two ranks: 1,500,000 and 500,500 elements of each that is trained, 500,000 frozen."""
    trained, frozen = 1_500_000 + 500_500, 500_000
    states = swapped(MODEL, make_spec(parallel=STATES, train={"precision": "bf16"}), 2)
    assert states.on_disk == states.states == trained * (4 + 8 + 4)
    assert (states.parameters, states.locked) == (0, 4 * trained * 4)
    both = swapped(MODEL, make_spec(parallel=BOTH, train={"precision": "bf16"}), 2)
    assert both.parameters == (trained + frozen) * 2
    assert both.locked == states.locked + (5 * 1_500_000 + 2 * trained) * 2


def test_buffers_are_bounded_by_the_sub_group(make_spec: Any) -> None:
    """A sub-group ends with the parameter that fills it, the largest at worst."""
    spec = make_spec(parallel=STATES, train={"precision": "bf16"})
    assert swapped(MODEL, spec, 2, sub_group=100_000).locked == 4 * (100_000 + 1_500_000) * 4
