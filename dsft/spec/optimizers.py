"""Define the properties of each optimizer, which all other packages read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsft.spec.schema import Optim


@dataclass(frozen=True)
class OptimizerFacts:
    """Properties of an optimizer.

    keys        those of the spec's `optim` that it has, among those that not all optimizers have
    instead     keys that it does not have -> how a message about them ends
    moments     returns the number of fp32 moments of an element
    matrices    that number for a layer's matrix, of an optimizer that orthogonalizes these (Muon); else None
    in_8_bits   whether the moments are stored in 8 bits
    smaller     name of the same with moments in 8 bits
    offloads    whether it steps where fp32 weights and moments are in host memory
    on_host     whether DeepSpeed has a CPU version, the op cpu_adam
    rates       its name in a message, lowest and highest usual learning rate; None: those of AdamW
    trial_rate  learning rate at which weights change by more than their rounding in few steps (dsft prove)
    """

    keys: tuple[str, ...]
    instead: Mapping[str, str] = field(default_factory=dict)
    moments: Callable[[Optim], int] = lambda optim: 2
    matrices: int | None = None
    in_8_bits: bool = False
    smaller: str | None = None
    offloads: bool = True
    on_host: bool = False
    rates: tuple[str, float, float] | None = None
    trial_rate: float = 1e-3


_ADAM, _BETAS = ("betas", "eps"), {"momentum": ", whose momentum is betas[0]; leave it out"}

OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(_ADAM, _BETAS, smaller="adamw_8bit", on_host=True),
    "adamw_8bit": OptimizerFacts(_ADAM, _BETAS, in_8_bits=True, offloads=False),
    "muon": OptimizerFacts(
        (*_ADAM, "muon_momentum"), {"momentum": "; use muon_momentum"}, matrices=1, offloads=False
    ),
    "sgd": OptimizerFacts(
        ("momentum",),
        dict.fromkeys(_ADAM, ", which has no second moment; leave it out"),
        moments=lambda optim: int(optim.momentum > 0),
        rates=("SGD", 1e-4, 1.0),
        trial_rate=0.1,
    ),
}
