"""Build the optimizer that DeepSpeed drives, from the trained parameters and a spec's `optim`.

It is built here and not from the DeepSpeed JSON, since the right class depends on where the update runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch import Tensor, nn

from dsft.dist.world import World
from dsft.engine.adamw_8bit import AdamW8bit
from dsft.engine.api import StateKind
from dsft.engine.base_optimizer import RATE, BaseAdam, BaseOptimizer, Samples
from dsft.engine.muon import MATRICES, Muon
from dsft.engine.ops import load_op, silent
from dsft.engine.partition import full_shape
from dsft.errors import Problem, SpecError
from dsft.model.weights import DTYPES
from dsft.spec.patterns import group_of, group_problems, is_matrix, is_orthogonalized
from dsft.spec.schema import Optim, Spec


class Sgd(torch.optim.SGD, BaseOptimizer):
    def kinds_of(self, home: Tensor) -> tuple[StateKind, ...]:
        return ("momentum_buffer",) if any(group["momentum"] for group in self.param_groups) else ()

    def expected_change(self, gradients: Tensor, after: Samples, step: int) -> Tensor:
        change = gradients.abs()  # where there is no momentum, its samples are NaN
        return change if step == 1 else change.fmin(after["momentum_buffer"].abs())


class AdamW(torch.optim.AdamW, BaseAdam):
    """AdamW of torch: on the device, or in host memory where parallel.allow_torch_adam permits it."""


class CpuAdamW(DeepSpeedCPUAdam, BaseAdam):
    """DeepSpeed's AdamW in host memory, which counts its steps in an integer of each tensor, and in C++."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        load_op(CPUAdamBuilder(), silent)  # loaded already where a run has prepared it
        super().__init__(groups, **settings)

    def allocate(self, home: Tensor, steps: int) -> None:
        super().allocate(home, steps)
        self.state[home]["step"] = steps

    def set_steps(self, steps: int) -> None:
        """Advance the powers βᵗ on an element that is thrown away. The C++ side multiplies them step by step,
        and takes pow() after a jump (cpu_adam.h, IncrementStep), which differs in the last bits."""
        scrap, group = [torch.zeros(1) for _ in range(4)], self.param_groups[0]
        for step in range(1, steps + 1):
            self.ds_opt_adam.adam_update(
                self.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"], *scrap
            )


def _adam(spec: Spec) -> dict[str, Any]:
    return {"lr": spec.optim.learning_rate, "betas": spec.optim.betas, "eps": spec.optim.eps}


BUILD: dict[str, Callable[[Sequence[Any], Spec, bool], BaseOptimizer]] = {
    "adamw": lambda groups, spec, offloaded: (
        CpuAdamW(groups, **_adam(spec)) if offloaded else AdamW(groups, **_adam(spec), fused=True)
    ),
    "adamw_8bit": lambda groups, spec, _: AdamW8bit(groups, **_adam(spec)),
    "muon": lambda groups, spec, _: Muon(
        groups, momentum=spec.optim.muon_momentum, dtype=DTYPES[spec.train.precision], **_adam(spec)
    ),
    "sgd": lambda groups, spec, _: Sgd(groups, spec.optim.learning_rate, spec.optim.momentum),
}
"""Name -> what builds the optimizer from its groups; `dsft.spec.optimizers` has its facts. The last argument:
True if DeepSpeed's CPU Adam makes the steps, in host memory."""


def build_optimizer(trained: Mapping[str, nn.Parameter], spec: Spec, offloaded: bool) -> BaseOptimizer:
    """Build the optimizer over few parameter groups, as `BUILD`. `state.set_parts` must be called before its
    first step."""
    return BUILD[spec.optim.name](list(parameter_groups(trained, spec.optim)), spec, offloaded)


def check_groups(trained: Mapping[str, nn.Parameter], spec: Spec, world: World) -> None:
    """Check the parameter groups of all stages. A collective. Raises SpecError for a group of optim.groups
    that matches no trained parameter of the whole model, and in a pipeline for stages that DeepSpeed cannot
    step together."""
    settings = {settings_of(name, parameter, spec.optim) for name, parameter in trained.items()}
    gathered = world.gather((list(trained), len(settings)))
    names = list(dict.fromkeys(name for mine, _ in gathered for name in mine))
    problems = group_problems(spec.optim, names)
    if problems:
        raise SpecError(WRONG, problems)
    counts = [count for _, count in gathered]
    if 0 in counts:
        message = f"stage {world.layout.stage(counts.index(0))} has no trained parameter; set it to 1"
        raise SpecError(WRONG, [Problem("parallel.pipeline_stages", message)])
    if len(set(counts)) > 1 and spec.parallel.zero_stage > 0:
        # DeepSpeed sums the norm of each group over the stages (stage_1_and_2.py, get_grad_norm_direct)
        numbers = " and ".join(str(counts[rank]) for rank in range(0, len(counts), world.layout.shards))
        message = (
            f"the stages have {numbers} parameter groups (one for each different learning rate and weight "
            "decay), and ZeRO 1 in a pipeline needs the same number in every stage; set parallel.zero_stage "
            "to 0, or give every stage parameters of each of optim.groups"
        )
        raise SpecError(WRONG, [Problem("parallel.zero_stage", message)])


WRONG = "The parameters cannot be trained in these groups."


def parameter_groups(trained: Mapping[str, nn.Parameter], optim: Optim) -> Iterator[dict[str, Any]]:
    """Yield one group for each distinct `Settings`; none is empty, which DeepSpeed could not flatten."""
    found: dict[Settings, list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        found.setdefault(settings_of(name, parameter, optim), []).append(parameter)
    for (rate, weight_decay, orthogonalized), parameters in found.items():
        own = {"weight_decay": weight_decay, "lr": optim.learning_rate * rate}
        yield {"params": parameters, **own, RATE: rate, MATRICES: orthogonalized}


class Settings(NamedTuple):
    """How a parameter is trained. rate: multiple of the step's learning rate; orthogonalized: by an update
    whose singular values are near 1."""

    rate: float
    weight_decay: float
    orthogonalized: bool


def settings_of(name: str, parameter: nn.Parameter, optim: Optim) -> Settings:
    """Return the settings of a parameter, by the first group of the spec whose pattern matches.

    A weight decay that a group sets applies to all its parameters. Otherwise matrices and embeddings decay;
    biases, norms and other vectors do not, nor do those that are matrices: the biases of all experts of a
    layer (GPT-OSS), a norm of each head (Cohere).
    """
    index = group_of(name, optim)
    group = optim.groups[index] if index is not None else None
    shape = full_shape(parameter)
    rate, decay = 1.0, optim.weight_decay if is_matrix(name, shape) else 0.0
    if group is not None and group.learning_rate is not None:
        rate = group.learning_rate / optim.learning_rate
    if group is not None and group.weight_decay is not None:
        decay = group.weight_decay
    return Settings(rate, decay, is_orthogonalized(name, shape, optim))
