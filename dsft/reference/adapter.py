"""The reference inside the policy: its own engine scores, with the adapter off or as it was at the start.

Takes the policy and its engine before any step or checkpoint has changed them. The adapter is on again, with
its present values, whatever happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn

from dsft.data.steps.batch import MicroBatch
from dsft.engine.api import Engine
from dsft.engine.partition import home_of
from dsft.model.adapter_names import is_adapter
from dsft.model.policy import Policy
from dsft.objective.answers import answer_logps
from dsft.reference.api import Held, filled
from dsft.spec.schema import Spec


def refer_to_start(policy: Policy, engine: Engine, spec: Spec) -> Held:
    """A new adapter is switched off. One that training continues (model.lora.path) is scored with a frozen
    copy of its values, and so is what is trained beside an adapter (model.lora.modules_to_save).

    Under ZeRO 3 a new one has a copy, too: its product is 0, and DeepSpeed, which gathers ahead what the last
    pass used next, sees the same modules in every pass. Raises as `Remembered` does.
    """
    lora = spec.model.lora
    assert lora is not None, "validated"
    by_copy = lora.path is not None or spec.parallel.zero_stage == 3
    trained = policy.named_trained().items()
    at_start = engine.remember([p for name, p in trained if by_copy or not is_adapter(name)])

    def refer(micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        with nullcontext() if by_copy else adapter_off(policy), at_start.in_place():
            sums = engine.score(micro_batches, answer_logps)
        return filled(micro_batches, sums)

    def weights() -> Iterator[Tensor]:
        yield from (home_of(p) for p in policy.parameters() if not p.requires_grad)
        yield from at_start.values

    return Held(refer, weights)


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Every adapter under `module` has no effect meanwhile. Not by peft's own switch, which would also change
    what requires a gradient."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
