"""Fill a model on the meta device with fresh weights, by a seed. No other random state is touched.

Each module draws from a generator seeded by (seed, the module's name), then transformers' own `_init_weights`
does the rest. A tensor's value thus depends on the config, the seed and its name, never on which other
modules exist, how the layers are cut into stages, or on which rank it is computed.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from dsft.model.weights import (
    DTYPES,
    NamedModule,
    Sharding,
    StorageOf,
    TensorSlots,
    has_nan,
    initialization_order,
    own_tensors,
    uninitialized_error,
)
from dsft.plan.storage import Storage


class FreshWeights:
    """The values that a model has before any training."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """`model` is on the meta device, as transformers builds it."""
        self._kind = type(model).__name__
        self._seed = seed
        self._order = tuple(initialization_order(model, model))
        self._tied = _tied(model)
        self._finished = _finished(self._order, self._tied)

    def fill(self, root: nn.Module, storage_of: StorageOf, sharding: Sharding) -> None:
        """See `Weights.fill`. Values are drawn in float32, then rounded; tied tensors are drawn as the
        input embedding. Raises DsftError where transformers leaves a tensor of this architecture without a
        value."""
        slots = TensorSlots(root)
        created: dict[int, tuple[Tensor, Storage]] = {}  # by the id of the meta tensor
        tied: set[int] = set()
        with init_scope():
            for named, finished in zip(self._order, self._finished, strict=True):
                if not slots.has(named.module):
                    continue
                for old in own_tensors(named.module):
                    if old.is_meta:
                        created[id(old)] = slots.blank(old), storage_of(old)
                        if id(old) in self._tied:
                            tied.add(id(created[id(old)][0]))
                torch.default_generator.manual_seed(module_seed(self._seed, named.name))
                initialize_module(named, tied)
                for key in finished:
                    if key in created:
                        self._finish(named, *created[key], slots, sharding)
        slots.end(sharding, self._kind)

    def _finish(
        self, named: NamedModule, tensor: Tensor, storage: Storage, slots: TensorSlots, sharding: Sharding
    ) -> None:
        if not isinstance(tensor, nn.Parameter):
            return
        if has_nan(tensor):
            local = next(name for name, p in named.module.named_parameters() if p is tensor)
            raise uninitialized_error(self._kind, f"{named.name}.{local}")
        tensor.data = tensor.data.to(DTYPES[storage.precision])
        slots.take(tensor, sharding)


@contextmanager
def init_scope() -> Iterator[None]:
    with torch.no_grad(), torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        yield


def initialize_module(named: NamedModule, tied: Set[int]) -> None:
    """Initialize a module's tensors. A tied tensor gets its value from the first module that has it, the
    input embedding."""
    named.owner._init_weights(named.module)
    for tensor in own_tensors(named.module):
        if id(tensor) in tied:
            mark_initialized(tensor)


def mark_initialized(tensor: Tensor) -> None:
    """Set the flag by which transformers' init functions leave a tensor as it is."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def module_seed(seed: int, name: str) -> int:
    """Return 64 bits of SHA-256, since Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big")


def _tied(model: nn.Module) -> frozenset[int]:
    """Return the ids of parameters that have several names."""
    found = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return frozenset(key for key, number in found.items() if number > 1)


def _finished(order: Sequence[NamedModule], tied: frozenset[int]) -> list[list[int]]:
    """Return, by module, the tensors that have their final value once it is initialized. They are found on
    the meta device, by the count of writes that torch keeps of each tensor: GPT-2's attention, for one,
    writes again into the projection inside it. Where an architecture cannot be initialized there, all are
    final at the end."""
    last: dict[int, int] = {}
    try:
        with init_scope():
            for index, named in enumerate(order):
                tensors = [*named.module.parameters(), *named.module.buffers()]
                before = [tensor._version for tensor in tensors]
                initialize_module(named, tied)
                own = {id(tensor) for tensor in own_tensors(named.module)}
                for tensor, version in zip(tensors, before, strict=True):
                    if tensor._version != version or id(tensor) in own - last.keys():
                        last[id(tensor)] = index
    except (NotImplementedError, RuntimeError):
        last = dict.fromkeys((id(t) for named in order for t in own_tensors(named.module)), len(order) - 1)
    finished: list[list[int]] = [[] for _ in order]
    for key, index in last.items():
        finished[index].append(key)
    return finished
