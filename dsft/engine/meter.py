"""Count what a process allocates and sends, and let its tensors take no memory: for `dsft rehearse`.

`Meter` counts, in a real run too. `NoMemory` puts tensors on torch's meta device and knows on which
device each would be. torch's FakeTensor cannot be used: autograd of a CPU build ends the process at one
on "cuda", and its subclass is not what DeepSpeed expects. Values are computed for tensors of at most
SMALL bytes, as if larger ones were zeros.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode

T = TypeVar("T")
SMALL = 1 << 17
"""Bytes. The lists of modules that ZeRO 3 compares between ranks are smaller."""
BLOCK = 512  # torch's allocator of a GPU rounds up to it
CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)
SENDS = {"allreduce_": 2, "recv_": 0, "barrier": 0}
"""How often a rank of a ring sends (n - 1)/n of a collective's bytes; of others once."""
_base: Any = torch._C.TensorBase
own_device, _is_meta = _base.device.__get__, _base.is_meta.__get__


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return an operation's arguments or results with `function` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(one, function) for one in value])
    return {k: _mapped(v, function) for k, v in value.items()} if isinstance(value, dict) else value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


@dataclass
class Measured:
    """What a phase took. peak: bytes by kind of device; collectives: (kind, ranks of its group) -> calls,
    bytes of the whole tensors, bytes that a rank of a ring sends."""

    peak: Counter[str] = field(default_factory=Counter)
    collectives: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    seconds: float = 0.0


class Meter(TorchDispatchMode):
    """Counts bytes of live storages, by kind of device, and collectives, in phases; of a real run too."""

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.phases: dict[str, Measured] = {}
        self.now, self._began = Measured(), 0.0
        self._homes: dict[int, torch.device] = {}  # of each live storage

    def enter(self, phase: str) -> None:
        """End the running phase and begin this one."""
        gc.collect()
        self.now.seconds = time.perf_counter() - self._began
        self.now = self.phases[phase] = Measured(Counter(self.live))
        self._began = time.perf_counter()

    def begin_training(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """To be called once the engine is built. dtype, shape: of hidden states."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.note(func, args)
        return self._held(func(*args, **(kwargs or {})))

    def _held(self, out: T) -> T:
        """Count the real tensors of an operation's output."""
        for tensor in _tensors(out):
            if not _is_meta(tensor):
                self.hold(tensor, own_device(tensor))
        return out

    def hold(self, tensor: Tensor, device: torch.device) -> bool:
        """Count a tensor's storage until it is freed. Return whether it is a new one."""
        storage = tensor.untyped_storage()
        key, size, kind = storage._cdata, storage.nbytes(), device.type
        if key in self._homes:
            return False
        size += -size % BLOCK if kind == "cuda" else 0
        self._homes[key] = device
        weakref.finalize(storage, self.freed, key, kind, size)
        self.live[kind] += size
        self.now.peak[kind] = max(self.now.peak[kind], self.live[kind])
        return True

    def freed(self, key: int, kind: str, size: int) -> None:
        self.live[kind] -= size
        del self._homes[key]

    def note(self, func: Any, args: Any) -> None:
        """Count a collective."""
        name, ranks = func.__name__.partition(".")[0], CollectiveOp.get_process_group(func, args).size()
        size = max(sum(t.nbytes for t in _tensors(arg)) for arg in args)
        share = size if name == "send" else size * (ranks - 1) // ranks
        found = self.now.collectives.setdefault((name, ranks), [0, 0, 0])
        for index, count in enumerate((1, size, share * SENDS.get(name, 1))):
            found[index] += count


class NoMemory(Meter):
    """Puts all new tensors on the meta device. device: the one that would compute."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.inside = False  # in a kernel, which has to see the meta device
        self._message: list[int] | None = None
        self._values: dict[int, torch.UntypedStorage] = {}

    def begin_training(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        # what a pipeline stage receives before them (pipe/engine.py:945 meta_buf_list)
        self._message = [0, PipelineEngine.DTYPE_TO_ID[dtype], len(shape), *shape]

    def home(self, tensor: Tensor) -> torch.device | None:
        """Return where a tensor of this mode would be; None for others."""
        return self._homes.get(tensor.untyped_storage()._cdata) if _is_meta(tensor) else None

    def values(self, tensor: Tensor) -> Tensor | None:
        """Return a tensor's values, which share memory as the tensors do; None for a large one."""
        if not _is_meta(tensor):
            return tensor
        kept = self._values.get(tensor.untyped_storage()._cdata)
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        return None if kept is None else torch.empty(0, dtype=tensor.dtype).set_(kept, *place)

    def hold(self, tensor: Tensor, device: torch.device) -> bool:
        is_new, storage = super().hold(tensor, device), tensor.untyped_storage()
        if is_new and _is_meta(tensor) and storage.nbytes() <= SMALL:
            self._values[storage._cdata] = torch.zeros(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        return is_new

    def freed(self, key: int, kind: str, size: int) -> None:
        super().freed(key, kind, size)
        self._values.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.inside = self.inside, False
        try:
            return self._dispatch(func, args, dict(kwargs or {}))
        finally:
            self.inside = before

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d":
            return self._collective(func, args)
        if name in ("_pin_memory", "is_pinned"):
            return args[0] if name == "_pin_memory" else True
        given = _tensors((args, kwargs))
        homes = [home for tensor in given if (home := self.home(tensor)) is not None]
        if homes and name in ("_local_scalar_dense", "equal"):
            value = self.values(args[0])
            return name == "equal" or (0 if value is None else value.item())
        kwargs.pop("pin_memory", None)
        target = self._target(func, args, kwargs, given, homes)
        if target is None:
            return self._held(self._called(func, args, kwargs))
        values = self._computed(func, args, kwargs, given)
        if homes and values is not None and not _tensors(values):
            return values
        if name == "copy_" or not func._schema.returns:  # which allocates nothing
            return args[0] if func._schema.returns else None
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        args, kwargs = _mapped((args, kwargs), lambda t: t if _is_meta(t) else t.to(META))
        out = self._called(func, args, kwargs)
        tensors = _tensors(out)
        is_new = [self.hold(tensor, target) for tensor in tensors]
        for tensor, new, value in zip(
            tensors, is_new, _tensors(values) if values is not None else (), strict=False
        ):
            if new and (own := self.values(tensor)) is not None:
                own.copy_(value)
        return out

    def _target(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], given: list[Tensor], homes: list[torch.device]
    ) -> torch.device | None:
        """Return where the results would be; None where they are real, or meant for the meta device."""
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if asked == "cuda":
            return CUDA
        if homes and (asked is None or (asked == "meta" and func is torch.ops.aten._to_copy.default)):
            return CUDA if CUDA in homes else CPU
        if homes and asked == "cpu":
            return CPU
        if given or all(argument.name != "device" for argument in func._schema.arguments):
            return None
        if asked == "meta":  # autograd asks for the device of a tensor of this mode
            return None if self._message is None else self.device
        return CPU

    def _called(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        before, self.inside = self.inside, True
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = before

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Compute an operation of small tensors. Return None where one is large, or the CPU has no
        kernel."""
        known = [self.values(tensor) for tensor in given]
        shape = args[0] if not given and args and isinstance(args[0], (list, tuple)) else ()
        if any(value is None for value in known) or math.prod(shape) > SMALL // 8 or "empty" in func.__name__:
            return None
        values = iter(known)
        args, kwargs = _mapped((args, kwargs), lambda _: next(values))
        with contextlib.suppress(NotImplementedError, RuntimeError):  # meta raises real faults again
            return func(*args, **kwargs | ({"device": CPU} if kwargs.get("device") is not None else {}))
        return None

    def _collective(self, func: Any, args: Any) -> Any:
        """Count a collective, and leave its tensors as they are: as if every rank had this rank's
        values."""
        self.note(func, args)
        if func is torch.ops.c10d.recv_.default and args[0][0].dtype == torch.int32 and self._message:
            got = self.values(args[0][0])
            assert got is not None, "it is small"
            got[: len(self._message)] = torch.tensor(self._message, dtype=torch.int32)
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)
