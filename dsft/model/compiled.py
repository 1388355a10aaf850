"""torch.compile on each decoder layer: takes a transformers model, compiles its layers at their first use.

One layer at a time, since all layers of a kind share one graph; with dynamic shapes, since each micro-batch
has its own length. Parameters keep their names.
"""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

BACKEND = "inductor"


def compile_layers(causal_lm: PreTrainedModel) -> None:
    """In place. Gradient checkpointing is compiled with the layer; attention with padded rows too."""
    for module in causal_lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True, backend=BACKEND)
