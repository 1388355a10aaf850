"""Let one process be one rank of many, without GPUs and other processes: for `dsft rehearse`.

A user has no stand-in for a GPU, so tensors take no memory (dsft/engine/meter.py) and the process group
is torch's fake one. `begin` changes torch.cuda, properties of torch.Tensor and DeepSpeed's accelerator
for good, so a rehearsal is a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import deepspeed
import torch
import torch._dynamo  # it reads torch.cuda, so before that is changed  # noqa: F401
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import DefaultDeviceType

from dsft.dist.world import World
from dsft.engine.meter import CPU, CUDA, NoMemory, own_device
from dsft.model import attention_choice
from dsft.model.weights import DTYPES, Sharding, StorageOf, TensorSlots
from dsft.spec.layout import Layout

T = TypeVar("T")
WORKSPACE = 32 << 20
"""Bytes that torch gives cuBLAS on a GPU of compute capability 9.0
(aten/src/ATen/cuda/CublasHandlePool.cpp)."""
_own_to: Any = Tensor.to
_own_tolist: Any = Tensor.tolist


@dataclass(frozen=True)
class LoneRank(World):
    """A rank whose process is the only one. What ranks gather is as if all had the same, but for lists,
    which are the names of a stage's parameters (`find_ties`, `check_groups`). trained: these, by
    stage."""

    trained: Mapping[int, list[str]] = field(default_factory=dict)

    def gather(self, mine: T) -> list[T]:
        def of(stage: int, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(of(stage, one) for one in value)
            return self.trained[stage] if stage != self.stage and isinstance(value, list) else value

        return [of(self.layout.stage(rank), mine) for rank in range(self.world_size)]

    def broadcast(self, mine: T) -> T:
        return mine


def begin(
    mode: NoMemory, rank: int, layout: Layout, memory: int, trained: Mapping[int, list[str]]
) -> LoneRank:
    """Make this process a rank of a run on `mode.device`, for good. memory: bytes of a GPU; trained: see
    `LoneRank`."""
    gc.collect()
    gc.freeze()  # what is imported need not be searched at each phase
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(layout.world_size)}
    _change_tensors(mode)
    if mode.device.type == "cuda":
        os.environ.pop("DS_ACCELERATOR", None)
        _change_cuda(mode, memory)
        set_accelerator(_Accelerator())
        deepspeed.runtime.engine.is_deepcompile_supported = lambda: False  # else it imports inductor: 1 s
    OpBuilder._loaded_ops["cpu_adam"] = Nothing()
    comm: Any = importlib.import_module("deepspeed.comm.torch")  # `deepspeed.comm.torch` is torch
    comm.build_shm_op = lambda: None  # on a CPU it would compile an op and print to stdout
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    return LoneRank(rank, layout.world_size, 0, layout, mode.device, trained=trained)


def _tensor_of(dtype: torch.dtype) -> Any:
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=CUDA))


class _Accelerator(CUDA_Accelerator):
    """DeepSpeed's of a GPU, where torch has none."""

    FloatTensor, ByteTensor = _tensor_of(torch.float32), _tensor_of(torch.uint8)
    IntTensor, LongTensor = _tensor_of(torch.int32), _tensor_of(torch.int64)
    _init_pynvml = range_push = range_pop = lambda self, *_, **__: None
    pin_memory = lambda self, tensor, *_, **__: tensor  # noqa: E731


class Nothing:
    """A stream or an event of a device, or an op of DeepSpeed's, that computes nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Nothing()


def _change_cuda(mode: NoMemory, memory: int) -> None:
    """Let torch.cuda know one GPU, of compute capability 9.0."""
    device = SimpleNamespace(
        name="", major=9, minor=0, total_memory=memory, multi_processor_count=132, uuid="", warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": device,
        "get_device_capability": (9, 0), "is_bf16_supported": True, "current_stream": Nothing(),
        "default_stream": Nothing(), "stream": contextlib.nullcontext(), "reset_peak_memory_stats": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    nothing = "_lazy_init set_device synchronize set_rng_state manual_seed manual_seed_all empty_cache"
    cuda: Any = torch.cuda
    for name, answer in (answers | dict.fromkeys(nothing.split())).items():
        setattr(cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda.Stream, cuda.Event, cuda.device = Nothing, Nothing, contextlib.nullcontext
    cuda.mem_get_info = lambda *_: (memory - mode.live["cuda"], memory)
    cuda.memory_allocated = cuda.memory_reserved = lambda *_: mode.live["cuda"]
    mode.live["cuda"] += WORKSPACE
    DefaultDeviceType.set_device_type("cuda")  # whose random numbers a checkpointed layer draws again
    torch._C._set_only_lift_cpu_tensors(True)  # then torch.tensor(…, device="cuda") comes to the mode
    attention_choice.differ = lambda pairs: False  # kernels compute nothing


def _attention(  # noqa: PLR0913, PLR0917  the signature of torch's
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Call the kernel that torch chooses. For the meta device it chooses one that stores all
    scores."""
    aten: Any = torch.ops.aten
    if enable_gqa and not (query.is_cuda and attn_mask is None and query.dtype != torch.float32):
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    given = query, key, value
    if not query.is_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(*given, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    if attn_mask is None and query.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(*given, dropout_p, is_causal, scale=scale)[0]
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(*given, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _change_tensors(mode: NoMemory) -> None:
    """Let tensors say on which device they would be."""

    def device(tensor: Tensor) -> torch.device:
        return own_device(tensor) if mode.inside else mode.home(tensor) or own_device(tensor)

    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], Tensor):
            args = (device(args[0]), args[0].dtype, *args[1:])
        place: torch.device | None
        place, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        kind = None if place is None else place.type
        if mode.inside or kind == "meta":
            return _own_to(tensor, *args, copy=copy, **kwargs)
        if kind in (None, device(tensor).type):
            if dtype in (None, tensor.dtype):
                return tensor.clone() if copy else tensor
            place = None
        return torch.ops.aten._to_copy(
            tensor, dtype=dtype, device=CUDA if place and kind == "cuda" else place
        )

    def tolist(tensor: Tensor) -> Any:
        with _disable_current_modes():
            known = mode.values(tensor)
            return _own_tolist(torch.zeros(tensor.shape, dtype=tensor.dtype) if known is None else known)

    found: Any = Tensor
    found.device, found.to = property(device), to
    found.is_cuda = property(lambda tensor: device(tensor).type == "cuda")
    found.is_cpu = property(lambda tensor: device(tensor).type == "cpu")
    found.is_meta = property(lambda tensor: device(tensor).type == "meta")
    found.cuda, found.cpu = (lambda t, *_, **__: to(t, CUDA)), (lambda t, *_, **__: to(t, CPU))
    found.tolist = tolist
    found.record_stream = lambda tensor, stream: None
    F.scaled_dot_product_attention = _attention


@dataclass(frozen=True)
class NoValues:
    """A source of weights (`dsft.model.weights.Weights`) that gives them memory, which `make` returns."""

    make: Callable[..., Tensor] = torch.empty

    def fill(self, root: nn.Module, storage_of: StorageOf, sharding: Sharding) -> None:
        slots = TensorSlots(root)
        for buffer in list(root.buffers()):
            if buffer.is_meta:
                slots.put(buffer, torch.zeros(buffer.shape, dtype=buffer.dtype, device=CPU))
        for parameter in list(root.parameters()):
            if parameter.is_meta:
                storage = storage_of(parameter)
                [stored] = storage.tensors(parameter.numel())
                make = functools.partial(self.make, dtype=DTYPES[storage.precision], device=CPU)
                shape = parameter.shape if storage.form == "plain" else (stored.numel,)
                start, stop = sharding.span(stored.numel)
                if stop - start == stored.numel:
                    slots.take(slots.put(parameter, make(shape)), sharding)
                else:
                    slots.take(slots.put(parameter, make(1).expand(shape)), sharding, make(stop - start))
        slots.end(sharding, type(root).__name__)

    def tensor(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        return self.make(parameter.shape, dtype=dtype)
