"""Give a model on the meta device its values: what fresh weights and those of files have in common.

A source of weights is built from the model as transformers builds it, and records its modules and tensors by
name. Then the model may be changed (adapters, a head, a cut), as long as the modules that stay are the same
objects; then the source fills what is left, one tensor after the other, so that a rank that keeps only a
share of each never has the whole in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.errors import DsftError, MissingInputError
from dsft.plan.storage import Storage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type in which a model computes, by train.precision."""
PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}

Shape = tuple[int, ...]

StorageOf = Callable[[Tensor], Storage]
"""What each of a model's parameters is stored as."""


def plain(dtype: torch.dtype) -> StorageOf:
    """Return a function that stores every parameter as one tensor of this type."""
    storage = Storage(PRECISIONS[dtype])
    return lambda parameter: storage


@dataclass(frozen=True)
class Sharding:
    """What this rank keeps of the parameters; by default all of each.

    span  number of elements -> the range of the flattened parameter whose values are needed
    take  called once with each parameter, when its values are final. The second argument is None where the
          parameter has all its values; else it is (n,) with those of the range, and the parameter has no
          memory of its own
    """

    span: Callable[[int], tuple[int, int]] = lambda numel: (0, numel)
    take: Callable[[nn.Parameter, Tensor | None], None] = lambda parameter, part: None


class TensorReader(Protocol):
    """Tensors by their names in the module."""

    @property
    def where(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, Shape]: ...

    @property
    def unexpected(self) -> Iterable[str]:
        """Names of tensors that are not the model's."""
        ...

    def origin(self, name: str) -> str:
        """Return the file that has the tensor, and its name there."""
        ...

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out`, (n,) of any type on the CPU, from the flattened tensor, beginning with element
        `start`."""
        ...


class Weights(Protocol):
    """A source of a model's values."""

    def fill(self, root: nn.Module, storage_of: StorageOf, sharding: Sharding) -> None:
        """Give all tensors on the meta device under `root` their values, on the CPU: parameters as
        `storage_of` says, buffers in their own type. Tensors that have values already (an adapter) are left
        as they are. Every parameter goes through `sharding.take` once. Raises DsftError where there is no
        value for a tensor."""
        ...


class NamedModule(NamedTuple):
    """A module of the model as transformers built it, with its name. owner: the nearest model above it, or
    itself."""

    module: nn.Module
    name: str
    owner: PreTrainedModel


def initialization_order(module: nn.Module, owner: PreTrainedModel, name: str = "") -> Iterator[NamedModule]:
    """Yield the modules, children first, then the module itself: transformers' own order of
    initialization. owner: the nearest model above the module, or itself."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from initialization_order(child, child_owner, f"{name}.{child_name}" if name else child_name)
    yield NamedModule(module, name, owner)


def own_tensors(module: nn.Module) -> list[Tensor]:
    return [t for slot in (module._parameters, module._buffers) for t in slot.values() if t is not None]


class TensorSlots:
    """The modules that refer to each tensor under a root. A tied tensor has several places, and stays one
    tensor."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules = frozenset(id(module) for module in root.modules())
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self._taken: set[int] = set()
        self._kept = [*root.parameters(), *root.buffers()]  # keeps them alive, or an id could be reused
        for module in root.modules():
            for slot in (module._parameters, module._buffers):
                for name, tensor in slot.items():
                    if tensor is not None:
                        self._places.setdefault(id(tensor), []).append((module, name))

    def has(self, module: nn.Module) -> bool:
        return id(module) in self._modules

    def put(self, old: Tensor, value: Tensor) -> Tensor:
        """Put `value` in all places of `old`, as a parameter where `old` is one. Returns the new tensor."""
        new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
        for module, name in self._places[id(old)]:
            slot = module._parameters if isinstance(old, nn.Parameter) else module._buffers
            slot[name] = new  # type: ignore[assignment]
        return new

    def blank(self, old: Tensor) -> Tensor:
        """Put a float32 tensor of NaN, or zeros of another type, in the places of `old`, and return it."""
        floating = old.is_floating_point()
        dtype, value = (torch.float32, math.nan) if floating else (old.dtype, 0)
        return self.put(old, torch.full(old.shape, value, dtype=dtype))

    def take(self, parameter: Tensor, sharding: Sharding, part: Tensor | None = None) -> None:
        if isinstance(parameter, nn.Parameter) and id(parameter) not in self._taken:
            self._taken.add(id(parameter))
            sharding.take(parameter, part)

    def end(self, sharding: Sharding, kind: str) -> None:
        """Check that every tensor has a value, and pass the parameters that `take` has not had yet, such as
        an adapter's, to the sharding."""
        for name, tensor in (*self._root.named_parameters(), *self._root.named_buffers()):
            if tensor.is_meta or (not isinstance(tensor, nn.Parameter) and has_nan(tensor)):
                raise uninitialized_error(kind, name)
            self.take(tensor, sharding)


def has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.isnan().any())


def check_finite(values: Tensor, what: str, shape: Iterable[int], start: int = 0) -> None:
    """Raise MissingInputError where a value is NaN or infinite. `values` (n,) are the elements from `start`
    on of the flattened tensor of `shape` that `what` names. Reads them once and allocates no memory where all
    are finite: 0.1 s per GiB in float32, 0.25 s in bfloat16."""
    if not values.numel():
        return
    if all(math.isfinite(bound) for bound in torch.aminmax(values.detach())):
        return
    first = int(values.isfinite().logical_not().nonzero()[0])
    place = [int(index) for index in torch.unravel_index(torch.tensor(start + first), tuple(shape))]
    dtype = str(values.dtype).removeprefix("torch.")
    too_large = "; or train in bf16 or fp32" if values.dtype == torch.float16 else ""
    raise MissingInputError(
        f"{what} has the value {float(values[first])} at {place}, read as {dtype}; with a NaN or infinite "
        f"weight the loss is not finite either: give a copy without such values{too_large}."
    )


def uninitialized_error(kind: str, name: str) -> DsftError:
    return DsftError(
        f"{kind}: transformers does not initialize {name}, so a model of this architecture cannot be trained "
        "from scratch; start from a pretrained one (model.name_or_path)."
    )
