"""How long the parts of a model take: takes a spec's model section and a micro-batch, gives the seconds of a
forward and a backward pass of each layer, of what comes before the layers and of what comes after.

One layer of each kind is built, of its real size and on the device that trains, with fresh values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dsft.data.steps.batch import MicroBatch
from dsft.model.attention import attend_per_segment
from dsft.model.joints import check_cut, one_of_each, shallow
from dsft.model.policy import Policy, behind_inputs
from dsft.model.stage import Joints
from dsft.older import checkpoint_activations
from dsft.plan.cut import Cut
from dsft.spec.schema import Model

TIMES = 3
"""The least of so many passes counts, after one that is not counted."""


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch; layers: of each."""

    layers: tuple[float, ...]
    before: float
    after: float


def seconds_of(
    model: Model,
    config: PreTrainedConfig,
    batch: MicroBatch,
    dtype: torch.dtype,
    device: torch.device,
    packed_up_to: int | None,
) -> Seconds:
    """`config`: the resolved one; packed_up_to: data.max_length where rows are packed. SpecError for a model
    that cannot be cut. With adapters all else is frozen, and they themselves are not there."""
    joints = check_cut(config, Cut((config.num_hidden_layers,)))
    stands_for = one_of_each(config)
    kinds = sorted(set(stands_for))
    policy = _policy(model, shallow(config, kinds), dtype, device)
    if packed_up_to is not None:
        attend_per_segment(policy.causal_lm, model.attention, packed_up_to, device)
    took = _by_module(policy, joints, batch.to(device))
    of_kind = {kind: took[f"{joints.layers}.{index}"] for index, kind in enumerate(kinds)}
    before, after = (sum(took.get(name, 0.0) for name in names) for names in (joints.before, joints.after))
    return Seconds(tuple(of_kind[kind] for kind in stands_for), before, after)


def _policy(model: Model, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Policy:
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), device:
        causal_lm = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if model.gradient_checkpointing:
        checkpoint_activations(causal_lm)
    policy = Policy(causal_lm.train())
    return policy.requires_grad_(model.lora is None)


def _by_module(policy: Policy, joints: Joints, batch: MicroBatch) -> Mapping[str, float]:
    """Name -> seconds, of all that a pass calls of the layers and of what has parameters beside them."""
    model, calls = policy.causal_lm, dict[str, tuple[Any, Any]]()
    number = len(model.get_submodule(joints.layers))  # type: ignore[arg-type]
    names = [*joints.before, *joints.after, *(f"{joints.layers}.{index}" for index in range(number))]
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, kwargs, name=name: calls.setdefault(name, (args, kwargs)) and None,
            with_kwargs=True,
        )
        for name in names
    ]
    with torch.no_grad():
        policy(batch.input_ids, *behind_inputs(batch, noisy=False))
    for hook in hooks:
        hook.remove()
    return {name: _seconds(model.get_submodule(name), *call) for name, call in calls.items()}


def _seconds(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The least of a forward and a backward pass."""
    given = tuple(
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    )
    found = []
    for _ in range(1 + TIMES):
        _wait()
        start = time.perf_counter()
        output = module(*given, **kwargs)
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        _wait()
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
