"""Starts DeepSpeed on a module: what the ZeRO engine and the pipeline have in common.

Takes the module, the trained parameters and the DeepSpeed configuration, which decides how; the spec
decides what.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dsft.engine import norm, state
from dsft.engine.api import LossScale
from dsft.engine.clip import StepClip
from dsft.engine.optimizer import RATE, build_optimizer
from dsft.engine.scaler import Scaler, install_scaler
from dsft.errors import WorldError
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class Started:
    """engine: DeepSpeed's; optimizer: the one that it drives; clip: only where DeepSpeed's clipping is
    replaced; scaler: of fp16 alone."""

    engine: Any
    optimizer: torch.optim.Optimizer
    clip: StepClip | None
    scaler: Scaler | None = None

    def set_learning_rate(self, learning_rate: float) -> None:
        """That of the step; a group of optim.groups has its own multiple of it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group[RATE]

    def outcome(self) -> tuple[float | Tensor, bool, LossScale | None]:
        """The last step's gradient norm before clipping, whether it was applied, and its loss scale; the same
        on all ranks."""
        if self.clip is not None:
            return self.clip.norm, self.clip.applied, None
        applied = self.engine.was_step_applied()
        if not applied:
            _drop_gradient(self.engine.optimizer)
        loss_scale = self.scaler.step(applied) if self.scaler is not None else None
        return self.engine.get_global_grad_norm(), applied, loss_scale


def start(
    module: nn.Module, trained: Mapping[str, nn.Parameter], spec: Spec, config: Mapping[str, Any]
) -> Started:
    """A collective: every rank calls it with its own stage. `config` is not changed."""
    norm.install()
    own = copy.deepcopy(dict(config))  # DeepSpeed writes into it
    clips_here = _is_plain_fp32(own)
    if clips_here:
        own["gradient_clipping"] = 0.0
    optimizer = build_optimizer(trained, spec.optim, offloaded=_is_offloaded(own))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints memory and topology, past any log level
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=own, dist_init_required=False
        )
    state.forget_first_step(engine)
    clip = None
    if clips_here:
        stages = engine.grid.get_pipe_parallel_group() if engine.pipeline_parallelism else None
        clip = StepClip(tuple(trained.values()), spec.train.max_grad_norm, stages)
        optimizer.register_step_pre_hook(clip)
    scaler = install_scaler(engine.optimizer) if spec.train.precision == "fp16" else None
    return Started(engine, optimizer, clip, scaler)


def check_precision(precision: str) -> None:
    """Raises WorldError for fp16 where DeepSpeed says that the device cannot compute in it."""
    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise WorldError(
            f"train.precision: fp16 cannot be computed on this {get_accelerator().device_name()}; use bf16 "
            "or fp32."
        )


def set_tf32(tf32: bool, device: torch.device) -> None:
    """Whether the process multiplies fp32 matrices on its GPU as TF32. By the older of torch's two settings,
    which sets the newer one too; after the newer alone, torch refuses to say what is set, as torch.compile
    asks it (aten/src/ATen/Context.cpp)."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _drop_gradient(optimizer: Any) -> None:
    """ZeRO 1 and 2 with bf16 and offload keep the gradient of a step that they skip (stage_1_and_2.py:3057
    reset_cpu_buffers),
    and add the next one to it: no later step would be finite."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def _is_plain_fp32(config: Mapping[str, Any]) -> bool:
    """ZeRO 0 in fp32: DeepSpeed steps the bare optimizer, with a clipping that is wrong over pipeline
    stages."""
    return not config["zero_optimization"]["stage"] and not config["bf16"]["enabled"]


def _is_offloaded(config: Mapping[str, Any]) -> bool:
    """Whether the update runs in DeepSpeed's own CPU Adam."""
    device = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    return bool(device != "none" and config.get("zero_force_ds_cpu_optimizer", True))
