"""Build the optimizer that DeepSpeed drives, from the trained parameters and a spec's `optim`.

It is built here and not from the DeepSpeed JSON, since the right class depends on where the update runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch import nn

from dsft.dist.world import World
from dsft.engine.adamw_8bit import AdamW8bit
from dsft.engine.muon import MUON, Muon
from dsft.engine.ops import load_op, silent
from dsft.engine.partition import full_shape
from dsft.errors import Problem, SpecError
from dsft.model.weights import DTYPES
from dsft.spec.patterns import group_of, group_problems, is_layers_matrix, is_matrix
from dsft.spec.schema import Optim, Spec


def build_optimizer(
    trained: Mapping[str, nn.Parameter], spec: Spec, offloaded: bool
) -> torch.optim.Optimizer:
    """Build the optimizer over few parameter groups. `offloaded`: fp32 weights and moments are in host
    memory, where DeepSpeed's own Adam updates them; otherwise AdamW is torch's fused one. The parts of
    parameters in the tensors of adamw_8bit and muon are set by `state.set_parts`."""
    optim = spec.optim
    groups = list(parameter_groups(trained, optim))
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.learning_rate, momentum=optim.momentum)
    settings: dict[str, Any] = {"lr": optim.learning_rate, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "adamw_8bit":
        return AdamW8bit(groups, **settings)
    if optim.name == "muon":
        names = [name for name, parameter in trained.items() if settings_of(name, parameter, optim).muon]
        dtype = DTYPES[spec.train.precision]
        return Muon(groups, names, momentum=optim.muon_momentum, dtype=dtype, **settings)
    if offloaded:
        load_op(CPUAdamBuilder(), silent)  # loaded already where a run has prepared it
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
            groups, **settings, adamw_mode=True, fp32_optimizer_states=True
        )
        return optimizer
    return torch.optim.AdamW(groups, **settings, fused=True)


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

RATE = "rate"
"""Key of an optimizer's group: its learning rate as a multiple of the step's."""


def parameter_groups(trained: Mapping[str, nn.Parameter], optim: Optim) -> Iterator[dict[str, Any]]:
    """Yield one group for each distinct `Settings`. No group is empty, so that
    DeepSpeed's code that flattens groups never gets an empty one."""
    found: dict[Settings, list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        found.setdefault(settings_of(name, parameter, optim), []).append(parameter)
    for (rate, weight_decay, muon), parameters in found.items():
        shared = {"weight_decay": weight_decay, "lr": optim.learning_rate * rate}
        yield {"params": parameters, **shared, RATE: rate, MUON: muon}


class Settings(NamedTuple):
    """How a parameter is trained. rate: multiple of the step's learning rate; muon: by Muon."""

    rate: float
    weight_decay: float
    muon: bool


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
    return Settings(rate, decay, optim.name == "muon" and is_layers_matrix(name, shape))
