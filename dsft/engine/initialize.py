"""Start DeepSpeed on a module, and implement what the ZeRO and the pipeline engine have in common.

The DeepSpeed configuration decides how to train; the spec decides what.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import compiler
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import set_z3_leaf_module
from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch, to_device
from dsft.dist.sequence import RowSplit, exchange_of
from dsft.dist.world import World
from dsft.engine import state
from dsft.engine.api import Engine, Fragment, LossScale, ReadRange, StateKind, StepResult
from dsft.engine.base_optimizer import RATE, BaseOptimizer
from dsft.engine.first_step import check_gradients, check_values, sampled_gradients, sampled_state, unchanged
from dsft.engine.gradients import Scaler, StepClip, gradient_squares, install_norms, install_scaler
from dsft.engine.nvme import align_gradients
from dsft.engine.optimizer import build_optimizer, settings_of
from dsft.engine.partition import Snapshot, full_shape
from dsft.engine.reduction import install_reduction
from dsft.engine.replicas import replicated
from dsft.errors import WorldError
from dsft.model.mlp_chunks import is_chunked
from dsft.model.policy import Policy
from dsft.model.routing import StepLoss
from dsft.objective.api import Objective
from dsft.spec.rules import NEEDS_AMPERE
from dsft.spec.schema import Spec


@dataclass(frozen=True)
class DeepSpeedParts:
    """DeepSpeed on a module.

    engine     DeepSpeed's engine
    optimizer  the optimizer that it drives
    clip       only where DeepSpeed's clipping is replaced
    scaler     in fp16 alone
    """

    engine: Any
    optimizer: BaseOptimizer
    clip: StepClip | None
    scaler: Scaler | None = None

    def outcome(self) -> tuple[float | Tensor, bool, LossScale | None]:
        """Return the last step's gradient norm before clipping, whether it was applied, and its loss scale;
        the same on all ranks."""
        if self.clip is not None:
            return self.clip.norm, self.clip.applied, None
        applied = self.engine.was_step_applied()
        if not applied:
            _drop_gradient(self.engine.optimizer)
        loss_scale = self.scaler.step(applied) if self.scaler is not None else None
        return self.engine.get_global_grad_norm(), applied, loss_scale


class TrainingEngine(Engine):
    """The part of an engine that both engines share."""

    _deepspeed: DeepSpeedParts
    _engine: Any  # DeepSpeed's

    def __init__(self, policy: Policy, world: World, objective: Objective) -> None:
        """Set up all but DeepSpeed, which a subclass starts with `_initialize`. A collective."""
        self._world, self._objective, self._shards = world, objective, world.layout.shards
        self._split = RowSplit(policy.causal_lm, world)
        self._causal_lm, self._trained = policy.causal_lm, policy.named_trained()
        self._routing = policy.routing
        if self._routing is not None:
            self._routing.exchange = exchange_of(world)
        self._shapes = {name: full_shape(p) for name, p in self._trained.items()}

    def _initialize(self, module: nn.Module, spec: Spec, config: Mapping[str, Any]) -> None:
        self._deepspeed = initialize_deepspeed(module, self._trained, spec, config)
        self._engine, self._max_norm = self._deepspeed.engine, spec.train.max_grad_norm
        self._settings = {name: settings_of(name, p, spec.optim) for name, p in self._trained.items()}

    def first_step(
        self,
        micro_batches: Sequence[MicroBatch],
        counts: Mapping[str, int],
        learning_rate: float,
        applied_steps: int = 0,
    ) -> StepResult:
        with sampled_gradients(self._trained, self._shapes, self._world.device) as samples:
            before = sampled_state(samples, self.owned_fragments(), ("value",))["value"]
            result = self.step(micro_batches, counts, learning_rate)
        if not result.applied:
            return result
        optimizer = self._deepspeed.optimizer
        after = sampled_state(samples, self.owned_fragments(), get_args(StateKind))
        first = None if applied_steps else optimizer.first_moments(after)
        gradients, squares = check_gradients(samples, first, self._world, optimizer.noise)
        clip = self._max_norm / max(self._max_norm, float(result.grad_norm)) if self._max_norm else 1.0
        factor = clip / self._shards / (result.loss_scale.scale if result.loss_scale else 1.0)
        change = optimizer.expected_change(gradients * factor, after, applied_steps + 1)
        each = [(learning_rate * one.rate, one.weight_decay) for one in self._settings.values()]
        settings = gradients.new_tensor(each).T[..., None]
        faulty = unchanged(gradients, squares, before, after["value"], change, settings)
        check_values(samples, faulty, self._world)
        return result

    def _routed(
        self, micro_batches: Sequence[MicroBatch], counts: Mapping[str, int]
    ) -> AbstractContextManager[None]:
        """Return a context for the passes of a step, which counts the tokens of experts and adds the balance
        loss. For global_batch first count the whole step's tokens, by a forward pass without gradients that
        draws the same random numbers. A collective."""
        routing = self._routing
        if routing is None:
            return nullcontext()
        experts = routing.experts
        if experts.balance == "none" or experts.balance_weight is None:
            return routing.training(None)
        frequencies, device, sequences = None, self._world.device, counts["sequences"]
        if experts.balance == "global_batch":
            devices = [] if device.type == "cpu" else [device]
            with torch.random.fork_rng(devices), routing.counting():
                self.score(micro_batches, training=True)
            frequencies = self._world.sum(routing.pop(device))
        scaler, kind = self._deepspeed.scaler, experts.balance
        scale = experts.balance_weight * self._shards * (scaler.loss_scale if scaler else 1.0)
        return routing.training(StepLoss(kind, scale if sequences else 0.0, sequences, frequencies))

    def snapshot(self, parameters: Iterable[nn.Parameter]) -> Snapshot:
        return Snapshot(self._engine, parameters)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def owned_fragments(self) -> Iterator[Fragment]:
        return state.owned_fragments(self._engine, self._trained, self._world.shard_rank, self._shards)

    def gradient_squares(self) -> AbstractContextManager[Mapping[str, float]]:
        rank, shards = self._world.shard_rank, self._shards
        owned = tuple(state.owned_shards(self._engine, self._trained, rank, shards))
        return gradient_squares(self._deepspeed.optimizer, owned)

    def replicated(self) -> Mapping[str, Tensor]:
        return replicated(self._causal_lm, state.master_weights(self._engine, self._trained))

    def set_loss_scale(self, loss_scale: LossScale) -> None:
        if self._deepspeed.scaler is not None:
            self._deepspeed.scaler.state = loss_scale

    def load(self, read: ReadRange, applied_steps: int) -> None:
        state.load(self._engine, self._trained, read, applied_steps)

    def _probe(self, micro_batch: MicroBatch, number: int) -> None:
        """Make one step on `number` copies of `micro_batch`, which leaves the engine as it was."""
        nothing = {name: 0 for name in ("sequences", *(term.count for term in self._objective.terms))}
        probe(self._engine, lambda: self.step([micro_batch] * number, nothing, 0.0), self._world.device)

    def _begin(
        self, counts: Mapping[str, int], learning_rate: float, number: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Set the learning rate of a step. Return the factors of its sums in the loss, and zeros to add them
        up in, both (n_terms,) float64 on the device. number: of micro-batches whose mean DeepSpeed takes."""
        for group in self._deepspeed.optimizer.param_groups:  # one of optim.groups has its own multiple
            group["lr"] = learning_rate * group[RATE]
        # DeepSpeed takes the mean over the ranks of a stage, too; only this line undoes both.
        scales = torch.tensor(self._objective.scales(counts), dtype=torch.float64)
        scales = to_device(scales * (number * self._shards), self._world.device)
        return scales, torch.zeros_like(scales)

    def _result(self, total: Tensor) -> StepResult:
        """Return the outcome of a step with these sums (n_terms,)."""
        figures = {"experts": self._routing.pop(self._world.device)} if self._routing else {}
        return StepResult(self._split.reported(total), *self._deepspeed.outcome(), figures)

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self._objective.terms), dtype=torch.float64, device=self._world.device)


def initialize_deepspeed(
    module: nn.Module, trained: Mapping[str, nn.Parameter], spec: Spec, config: Mapping[str, Any]
) -> DeepSpeedParts:
    """Start DeepSpeed. A collective: every rank calls it with its own stage. `config` is not changed."""
    install_norms()
    import_muon()
    gather_whole_mlps(module)
    own = copy.deepcopy(dict(config))  # DeepSpeed writes into it
    # In ZeRO 0 and fp32 DeepSpeed steps the bare optimizer, and clips wrongly over pipeline stages.
    clips_here = not own["zero_optimization"]["stage"] and not own["bf16"]["enabled"]
    optimizer = build_optimizer(trained, spec, offloaded=_is_offloaded(own))
    if type(optimizer) not in ZERO_SUPPORTED_OPTIMIZERS:
        ZERO_SUPPORTED_OPTIMIZERS.append(type(optimizer))  # else it warns that it has not tested the class
    with contextlib.redirect_stdout(io.StringIO()):  # it prints memory and topology at any log level
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=own, dist_init_required=False
        )
    state.undo_first_step(engine)
    state.set_parts(engine, trained)
    align_gradients(engine.optimizer)
    install_reduction(engine)
    clip = None
    if clips_here:
        stages = engine.grid.get_pipe_parallel_group() if engine.pipeline_parallelism else None
        clip = StepClip(tuple(trained.values()), spec.train.max_grad_norm, stages)
        optimizer.register_step_pre_hook(clip)
    scaler = install_scaler(engine.optimizer) if spec.train.precision == "fp16" else None
    return DeepSpeedParts(engine, optimizer, clip, scaler)


def gather_whole_mlps(module: nn.Module) -> None:
    """Let ZeRO 3 gather an MLP that is computed in chunks once for all chunks, as one module. DeepSpeed
    reduces the gradients of such a module when the gradient by its input is there (stage3.py:1559
    register_full_backward_hook). A checkpointed model always has that one, since transformers lets the
    embeddings' output require a gradient (enable_input_require_grads)."""
    for part in module.modules():
        if is_chunked(part):
            set_z3_leaf_module(part, True)


def import_muon() -> None:
    """Import DeepSpeed's Muon without torch.compile (deepspeed/runtime/zero/muon/original_muon.py:50
    compile), which would import the compiler: a tenth of a rank's start. Every ZeRO engine imports it; dsft
    has its own."""
    compile, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile


COUNTERS = (
    "global_steps", "global_samples", "micro_steps", "skipped_steps", "_step_applied", "_global_grad_norm"
)  # fmt: skip
"""All attributes of DeepSpeed's engine that a step advances (deepspeed/runtime/engine.py:536 global_steps and
the lines after it)."""


def probe(engine: Any, step: Callable[[], object], device: torch.device) -> None:
    """Call `step`, which must give the optimizer a learning rate and a gradient of 0, then undo it: moments,
    Adam's step count, DeepSpeed's counters and loss scale, random numbers. Weights do not change, since
    optimizers move and decay them by a multiple of the rate. The moments are allocated before it, so that the
    backward pass has them beside its activations, as in every step but a run's first."""
    cpu = device.type == "cpu"
    state.empty_state(engine, 1)
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        with _restored_counters(engine):
            step()
    state.empty_state(engine, 0)


@contextmanager
def _restored_counters(engine: Any) -> Iterator[None]:
    owners = (engine, engine.optimizer)
    saved = [(owner, {k: v for k, v in vars(owner).items() if k in COUNTERS}) for owner in owners]
    for name in ("loss_scaler", "loss_scale_config"):  # in fp16: the first at ZeRO 1 to 3, the second at 0
        scale = getattr(engine.optimizer, name, None)
        if hasattr(scale, "__dict__"):
            saved.append((scale, dict(vars(scale))))
    try:
        yield
    finally:
        for owner, numbers in saved:
            vars(owner).update(numbers)


def check_precision(precision: str) -> None:
    """Raise WorldError for fp16 where DeepSpeed reports that the device does not support it, and for bf16 on
    NVIDIA GPUs that only emulate it."""
    if precision == "fp16" and not get_accelerator().is_fp16_supported():
        raise WorldError(
            f"train.precision: fp16 cannot be computed on this {get_accelerator().device_name()}; use bf16 "
            "or fp32."
        )
    if precision == "bf16" and torch.version.cuda and get_accelerator().device_name() == "cuda":
        capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
        if capability < (8, 0):
            raise WorldError(f"train.precision: bf16 {NEEDS_AMPERE.format(name)}; use fp16 or fp32.")


def set_tf32(tf32: bool, device: torch.device) -> None:
    """Set whether the process multiplies fp32 matrices on its GPU as TF32. This uses the older of torch's two
    settings, which sets the newer one too; after the newer alone torch refuses to return the setting, which
    torch.compile asks for (aten/src/ATen/Context.cpp)."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _drop_gradient(optimizer: Any) -> None:
    """Drop the gradient of a skipped step. ZeRO 1 and 2 with bf16 and offload keep it (stage_1_and_2.py:3057
    reset_cpu_buffers) and add the next one to it: no later step would be finite."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        for group in optimizer.averaged_gradients:
            optimizer.averaged_gradients[group] = None


def _is_offloaded(config: Mapping[str, Any]) -> bool:
    """Whether the update runs in DeepSpeed's own CPU Adam."""
    device = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
    return bool(device != "none" and config.get("zero_force_ds_cpu_optimizer", True))
