"""Make the recurrent layers of gated-delta models exact over packed rows: each segment begins with an empty
state (Qwen3-Next, Qwen3.5, Kimi Linear and their kin); and the layers of LFM2, which are a convolution alone.

Such a layer mixes tokens in two functions of transformers only: a causal convolution, and a gated delta
rule in chunks. All else in it acts on each token by itself. So only these two are computed per segment, by
transformers' own code: the segments become the rows of padded batches, of about one length each. Padding
comes after a segment's tokens, where a causal function does not see it. A segment that continues a shared
prompt becomes a row with that prompt before it.

transformers itself passes cu_seqlens and seq_idx to the kernels of fla and causal_conv1d, and raises
ValueError where these are missing (5.23, `use_kernel_func_from_hub_with_fallback`). Here neither is passed
on: with and without these packages rows are padded.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dsft.data.steps.batch import Segments, borders_of, to_device

SEGMENT_ROWS = "segment_rows"
"""Keyword of a model's forward that brings the `SegmentRows` to the recurrent layers."""

CONVOLUTION = "causal_conv1d_fn"  # its input is (B, channels, T)
RECURRENCES = frozenset({"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"})
PER_TOKEN = frozenset({"g", "beta"})  # their keywords of (B, T, ...), beside query, key and value
CHUNK = 64  # tokens of their chunks: a row costs as much as one of the next multiple


class SegmentRows(NamedTuple):
    """Where the T tokens of a packed row are in padded batches with a segment per row.

    batches  for each batch (rows, tokens) int64: the packed row's token at each place; padding repeats the
             last token of its row
    places   (T,) int64: the place of each token in all batches, flattened and joined
    """

    batches: tuple[Tensor, ...]
    places: Tensor


def segment_rows(segments: Segments, device: torch.device) -> SegmentRows | None:
    """Return the rows of a micro-batch's segments; None for one segment, which is a row already. Rows that
    need as many chunks are in one batch."""
    lengths = segments.lengths
    if len(lengths) == 1:
        return None
    begins, *shared = (part.numpy() for part in borders_of(lengths, segments.starts))
    ends, tokens = shared or (begins, np.arange(begins[-1]))
    rows = np.split(tokens, ends[1:-1])
    alike = defaultdict[int, list[int]](list)
    for number, row in enumerate(rows):
        alike[-(-len(row) // CHUNK)].append(number)
    batches, places, before = [], np.empty(begins[-1], dtype=np.int64), 0
    for numbers in alike.values():
        width = max(len(rows[number]) for number in numbers)
        for number in numbers:
            end = before + len(rows[number])
            places[begins[number] : begins[number + 1]] = np.arange(end - lengths[number], end)
            before += width
        batch = np.stack([np.pad(rows[number], (0, width - len(rows[number])), "edge") for number in numbers])
        batches.append(to_device(torch.from_numpy(batch.astype(np.int64)), device))
    return SegmentRows(tuple(batches), to_device(torch.from_numpy(places), device))


def recurrent_layers(kind: type[PreTrainedModel]) -> frozenset[str]:
    """Return the types of a model's layers, other than attention, that can be packed: those that mix tokens
    in the functions above, as the code of its modules says."""
    classes = [one for one in vars(sys.modules[kind.__module__]).values() if isinstance(one, type)]
    mixers = [_mixers(one) for one in classes if issubclass(one, nn.Module)]
    recurrent = {"linear_attention"} if any(found & RECURRENCES for found in mixers) else set()
    return frozenset(recurrent | ({"conv"} if {CONVOLUTION} in mixers else set()))


def mix_per_segment(causal_lm: PreTrainedModel) -> bool:
    """Give each module that calls the functions above a forward that calls them per segment. Return whether
    there are such modules."""
    found = False
    for module in list(causal_lm.modules()):
        kind = type(module)
        mixers = _mixers(kind)
        if mixers:
            found = True
            forward: Any = inspect.unwrap(kind.forward)
            names = {name: _per_segment(name, forward.__globals__[name]) for name in mixers}
            members = {"forward": with_globals(forward, names)}
            module.__class__ = type(f"PerSegment{kind.__name__}", (kind,), members)
    return found


def saved_bytes(causal_lm: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return for each module with a recurrence, by name, the bytes per token that its backward needs, in 16
    bits and in float32: of its matrices and of transformers' torch functions, which compute in float32 and
    keep many times as much as they return. `causal_lm` is on the meta device, where this is counted."""
    counted: dict[str, tuple[int, int]] = {}  # of modules that are alike
    found = {}
    for name, module in causal_lm.named_modules():
        if _mixers(type(module)) & RECURRENCES:
            alike = repr([(p.shape, p.requires_grad) for p in module.parameters()])
            if alike not in counted:
                counted[alike] = _per_token(module, torch.bfloat16), _per_token(module, torch.float32)
            found[name] = counted[alike]
    return found


def _per_token(module: nn.Module, dtype: torch.dtype) -> int:
    few, more = (_saved(module, dtype, chunks * CHUNK) for chunks in (4, 8))
    return (more - few) // (4 * CHUNK)  # some tensors have the size of a weight


def _saved(module: nn.Module, dtype: torch.dtype, tokens: int) -> int:
    kept: dict[int, torch.UntypedStorage] = {}
    module = copy.deepcopy(module).to(dtype)
    forward: Any = inspect.unwrap(type(module).forward)
    names = {name: inspect.unwrap(forward.__globals__[name]) for name in _mixers(type(module))}
    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    width: Any = module.hidden_size
    hidden = torch.empty(1, tokens, width, dtype=dtype, device="meta", requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with_globals(forward, names)(module, hidden)
    return sum(storage.nbytes() for storage in kept.values())


def _mixers(kind: type[nn.Module]) -> frozenset[str]:
    """Return the functions that mix tokens, by name, that the forward of a module's class calls."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return (RECURRENCES | {CONVOLUTION}).intersection(getattr(code, "co_names", ()))


def with_globals(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """Return a copy of `function` for which these names mean something else."""
    made = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _per_segment(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` with the segments as rows, where it gets SEGMENT_ROWS."""

    def convolved(mixed: Tensor, *weights: Tensor, **keywords: Any) -> Tensor:
        rows, keywords = _split(keywords)
        if rows is None:
            return function(mixed, *weights, **keywords)
        tokens = mixed.transpose(1, 2)
        outputs = [
            function(_batch(tokens, batch).transpose(1, 2), *weights, **keywords).transpose(1, 2)
            for batch in rows.batches
        ]
        return _joined(outputs, rows).transpose(1, 2)

    def recurred(*tokens: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        rows, keywords = _split(keywords)
        if rows is None:
            return function(*tokens, **keywords)
        outputs = [
            function(
                *(_batch(token, batch) for token in tokens),
                **{
                    key: _batch(value, batch) if key in PER_TOKEN else value
                    for key, value in keywords.items()
                },
            )[0]
            for batch in rows.batches
        ]
        return _joined(outputs, rows), None

    return convolved if name == CONVOLUTION else recurred


def _split(keywords: dict[str, Any]) -> tuple[SegmentRows | None, dict[str, Any]]:
    """Return the rows, and the keywords without them and the borders, which padded rows do not have."""
    kept = {
        key: value for key, value in keywords.items() if key not in (SEGMENT_ROWS, "cu_seqlens", "seq_idx")
    }
    return keywords.get(SEGMENT_ROWS), kept


def _batch(tokens: Tensor, batch: Tensor) -> Tensor:
    """Return (rows, tokens, ...) of (1, T, ...)."""
    return tokens[0].index_select(0, batch.flatten()).unflatten(0, batch.shape)


def _joined(outputs: list[Tensor], rows: SegmentRows) -> Tensor:
    """Return (1, T, ...) of the batches' (rows, tokens, ...)."""
    return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, rows.places)[None]
