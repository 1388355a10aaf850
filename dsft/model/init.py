"""Fresh weights: takes a model on the meta device and a seed, fills in the values; touches no other random
state.

Each module draws from a generator seeded by (seed, the module's name), then transformers' own
`_init_weights` does the rest. A tensor's value thus depends on the config, the seed and its name, never on
which other modules exist, how the layers are cut into stages, or on which rank it is made.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from dsft.errors import DsftError
from dsft.model.adapter_names import is_adapter, plain_name


def fill(model: PreTrainedModel, seed: int, dtype: torch.dtype) -> None:
    """Materialise all parameters and buffers of `model` on the CPU. Values are drawn in float32; parameters
    are then rounded to `dtype`, buffers keep theirs. Tied tensors stay one tensor, drawn as the input
    embedding.

    Raises DsftError where transformers leaves a tensor of this architecture without a value.
    """
    _materialise(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        _initialise(model, "", model, seed, _shared(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.isnan().any() and not is_adapter(name):
            raise DsftError(
                f"{type(model).__name__}: transformers gives {name} no first value, so a fresh model of this "
                "architecture cannot be made; start from a pretrained one (model.name_or_path)."
            )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def module_seed(seed: int, name: str) -> int:
    """64 bits of SHA-256, since Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")


def _materialise(model: nn.Module) -> None:
    """Meta tensors become CPU tensors of NaN, in place; one tensor under two names stays one."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # the old one is kept too, or its id could be given again

    def real(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            value = torch.full(tensor.shape, math.nan if tensor.is_floating_point() else 0, dtype=dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = (tensor, nn.Parameter(value, tensor.requires_grad) if is_parameter else value)
        return made[id(tensor)][1]

    for module in model.modules():
        for slot in (module._parameters, module._buffers):
            for name, tensor in slot.items():
                if tensor is not None and tensor.is_meta:
                    slot[name] = real(tensor)  # type: ignore[assignment]


def _initialise(
    module: nn.Module, name: str, owner: PreTrainedModel, seed: int, shared: frozenset[int]
) -> None:
    """Children first, then the module itself by the nearest model above it: transformers' own order."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        below = plain_name(f"{name}.{child_name}" if name else child_name)
        _initialise(child, below, child_owner, seed, shared)
    torch.default_generator.manual_seed(module_seed(seed, name))
    owner._init_weights(module)
    for parameter in module.parameters(recurse=False):
        if id(parameter) in shared:  # the flag by which transformers' init functions leave a tensor alone
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def _shared(model: nn.Module) -> frozenset[int]:
    """Parameters that stand under several names. The first, which is the input embedding's, draws the
    value."""
    ids = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return frozenset(i for i in ids if ids.count(i) > 1)
