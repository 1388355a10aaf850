"""Make attention over packed rows exact, without a mask of the whole row: each segment sees itself alone.

The attention of a transformers model gets the segments as keywords, which Policy passes through the model's
forward. transformers' own masks for packed rows are dense, T × T for a row of T tokens; here the cost is the
sum of the squares of the segments' lengths. `choose` selects the function that computes it.

A segment that begins at position p > 0 continues the first p tokens of the last one that began at 0: it sees
them and itself, as if it were one row with them. Two answers that share their prompt are packed this way,
with the prompt once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dsft.data.steps.batch import Segments
from dsft.errors import DsftError, Problem, SpecError
from dsft.model.attention_choice import FUNCTIONS, AttentionChoice, choose, try_cudnn
from dsft.model.attention_loop import KEYWORD, SEGMENTS
from dsft.model.attention_shapes import SegmentShapes
from dsft.model.attention_split import SPLIT, Exchange, split_attention
from dsft.model.attention_varlen import BY_PRIORITY, IS_ROWS, KEY_INDEX
from dsft.model.older import can_use_sdpa
from dsft.model.recurrence import SEGMENT_ROWS, mix_per_segment, recurrent_layers, segment_rows
from dsft.spec.schema import Data, Model

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})  # layer types that can be packed
PADDED_PRIORITY = [*BY_PRIORITY, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # all that torch has
CPU = torch.device("cpu")
SHAPES = "segment_shapes"
"""Attribute of a model, and of its modules where padded rows may go through cuDNN: its SegmentShapes."""
RECURRENT = "has_recurrent_layers"
"""Attribute of a model: whether it has recurrent layers, which need the segments too."""


def attend(
    causal_lm: PreTrainedModel,
    model: Model,
    data: Data,
    device: torch.device = CPU,
    exchange: Exchange | None = None,
) -> str:
    """Let a model attend to the rows that the spec's sections `model` and `data` decide, padded, packed or
    split. Return a line that names what computes the attention; empty for transformers' own. The other
    arguments and errors are those of `attend_per_segment`."""
    if data.packing or exchange is not None:
        line = attend_per_segment(causal_lm, model.attention, data.max_length, device, exchange)
        if model.compile:
            check_can_compile(causal_lm, line)
        return line
    if model.attention == "auto" and not model.compile:
        return attend_padded(causal_lm, data.max_length, device)
    return ""


def attend_per_segment(
    causal_lm: PreTrainedModel,
    attention: str,
    max_length: int,
    device: torch.device = CPU,
    exchange: Exchange | None = None,
) -> str:
    """Make packed rows exact, and return a line that names what computes the attention.

    `attention` is the spec's model.attention: auto uses what `choose` selects for `device`, sdpa the loop;
    eager and flash keep transformers' own attention, which gets or finds the segments. `max_length`: tokens
    of the longest segment. exchange: with the ranks over which rows are split; None: they are not.

    Raises SpecError for an architecture that cannot be packed.
    """
    if exchange is None:  # else `check_can_split` has asked for more
        check_can_pack(causal_lm.config, max_length)
    setattr(causal_lm, RECURRENT, mix_per_segment(causal_lm))
    if attention == "auto":
        choice = choose(causal_lm, device)
    elif attention == "sdpa":
        choice = AttentionChoice(SEGMENTS, "segment by segment, as model.attention is sdpa")
    else:
        choice = AttentionChoice("", f"{attention}, as model.attention says")
    setattr(causal_lm, SHAPES, SegmentShapes(max_length, choice.with_cudnn))
    if choice.name:
        use(causal_lm, choice.name, exchange)
    return f"attention of packed rows: {choice.description}"


def use(causal_lm: PreTrainedModel, name: str, exchange: Exchange | None = None) -> None:
    """Set the model's attention to one of FUNCTIONS, or to it over rows that are split. transformers builds
    no mask for an attention without a mask function, and does not look for segments in the positions, which
    would wait for the device."""
    attend = FUNCTIONS[name]
    if exchange is not None:
        name, attend = name + SPLIT, split_attention(attend, exchange)
    AttentionInterface.register(name, attend)
    causal_lm.set_attn_implementation(name)


def attend_padded(causal_lm: PreTrainedModel, max_length: int, device: torch.device) -> str:
    """Let padded rows of lengths that SegmentShapes names go through cuDNN where it works and is faster, in
    layers without a mask, inside transformers' own attention. Return a line for the log; empty where nothing
    changes."""
    if causal_lm.config._attn_implementation != "sdpa":
        return ""
    works, clause = try_cudnn(causal_lm, device)
    if works:
        shapes = SegmentShapes(max_length, with_cudnn=True)
        for module in causal_lm.modules():  # an attention function gets its own module alone
            setattr(module, SHAPES, shapes)
        AttentionInterface.register("sdpa", padded_attention)
    return clause and f"attention of padded rows: torch's{clause}"


def padded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' sdpa attention, with cuDNN first for shapes that the module's SHAPES plans."""
    rows, _, length, _ = query.shape
    shapes: SegmentShapes | None = getattr(module, SHAPES, None)
    is_planned = attention_mask is None and shapes is not None and shapes.planned(rows, length)
    with sdpa_kernel(PADDED_PRIORITY, set_priority=True) if is_planned else nullcontext():
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)


def check_can_compile(causal_lm: PreTrainedModel, choice: str) -> None:
    """Raise SpecError where attention or recurrences are computed segment by segment. choice: the line of
    `attend_per_segment`."""
    recurrent = getattr(causal_lm, RECURRENT, False)
    if recurrent or causal_lm.config._attn_implementation == SEGMENTS:
        what = "recurrent layers" if recurrent else "attention per segment"
        message = (
            f"true, but {what} would be compiled again for each row ({choice}); set "
            "data.packing or model.compile to false"
        )
        raise SpecError("Packed rows cannot be compiled here.", [Problem("model.compile", message)])


def check_can_pack(config: PreTrainedConfig, max_length: int) -> None:
    """Raise SpecError for an architecture whose tokens would see the segment before their own."""
    reason = packing_obstacle(config, max_length)
    if reason is not None:
        message = f"a {config.model_type} model cannot be packed: it {reason}; set it to false"
        raise SpecError("The model cannot be trained on packed rows.", [Problem("data.packing", message)])


def packing_obstacle(config: PreTrainedConfig, max_length: int) -> str | None:
    """Return what an architecture does that lets tokens see the segment before their own; None where it does
    nothing of that kind. max_length: tokens of the longest segment."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.get_text_config()
    recurrent = recurrent_layers(kind)
    layers = set(getattr(text, "layer_types", None) or ()) - PACKABLE_LAYERS - recurrent
    one_rope = _one_rope_up_to(text)
    if kind._is_stateful and "linear_attention" not in recurrent:
        return "has recurrent layers, whose state would pass from one packed row to the next"
    if layers:
        kinds = " and ".join(sorted(layers))
        return f"has layers of type {kinds}, which see the packed row before their own"
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        return "takes no position_ids, which have to begin again with each packed row"
    if not kind._can_set_attn_implementation():
        return "computes its attention itself, across the borders of packed rows"
    if max_length > one_rope:
        return f"would rotate all packed rows as the longest one where that has over {one_rope} tokens"
    return None


def _one_rope_up_to(config: PreTrainedConfig) -> float:
    """Return the number of tokens up to which rotary positions do not depend on the row's length: longrope
    has two sets of them, and chooses by the longest segment (modeling_rope_utils.py of transformers)."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, Mapping))]
    limits = [
        kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min(limits, default=math.inf)


def packed_keywords(
    implementation: str,
    position_ids: Tensor,
    segments: Segments | None = None,
    shapes: SegmentShapes | None = None,
) -> Mapping[str, Any]:
    """Return the keywords that give the model's attention the segments of its one row; none for padded rows.
    segments: None: they are read from position_ids, (B, T); shapes: the model's, from `attend_per_segment`.

    Raises DsftError where segments share a prompt and the attention is none of FUNCTIONS.
    """
    implementation = implementation.removesuffix(SPLIT)
    is_flash = implementation.startswith("flash")
    if len(position_ids) > 1 or not (is_flash or implementation in FUNCTIONS):
        _refuse_shared(implementation, segments)
        return {}
    segments = segments or segments_of(position_ids)
    starts = segments.starts or (0,) * len(segments.lengths)
    if implementation == SEGMENTS:
        return {KEYWORD: tuple(zip(segments.lengths, starts, strict=True))}
    if is_flash:
        _refuse_shared(implementation, segments)
    borders = segments.borders or segments.to(position_ids.device).borders
    assert borders is not None, "set by Segments.to"
    queries, keys, *index = borders if len(borders) > 1 else borders * 2
    longest = max(map(sum, zip(segments.lengths, starts, strict=True)))
    if shapes is not None:
        longest = shapes.bound(longest)
    return {
        "cu_seq_lens_q": queries,
        "cu_seq_lens_k": keys,
        "max_length_q": longest,
        "max_length_k": longest,
        **({KEY_INDEX: index[0]} if index else {}),
        **({IS_ROWS: True} if shapes is not None and shapes.is_rows(segments) else {}),
    }


def keywords_of(
    causal_lm: PreTrainedModel, position_ids: Tensor, segments: Segments | None
) -> Mapping[str, Any]:
    """Return the keywords that give a model the segments of its one row: `packed_keywords`, and that of the
    recurrent layers that `attend_per_segment` has made packable; none for padded rows."""
    kind, shapes = causal_lm.config._attn_implementation, getattr(causal_lm, SHAPES, None)
    given = packed_keywords(kind, position_ids, segments, shapes)
    if len(position_ids) > 1 or not getattr(causal_lm, RECURRENT, False):
        return given
    rows = segment_rows(segments or segments_of(position_ids), position_ids.device)
    return {**given, SEGMENT_ROWS: rows}


def _refuse_shared(implementation: str, segments: Segments | None) -> None:
    if segments is not None and any(segments.starts or ()):
        raise DsftError(
            f"Answers that share their prompt need model.attention auto or sdpa, and this model's is "
            f"{implementation}; set share_prompts to false."
        )


def segments_of(position_ids: Tensor) -> Segments:
    """Return the segments of position_ids (1, T): one begins where a position is not the previous one plus 1.
    Waits for the device."""
    positions = position_ids[0]
    begins = F.pad(positions.diff() != 1, (1, 0), value=True).nonzero().flatten()
    at, starts = torch.stack((begins, positions[begins])).tolist()
    ends = (*at[1:], len(positions))
    lengths = tuple(end - begin for begin, end in zip(at, ends, strict=True))
    return Segments(lengths, tuple(starts) if any(starts) else None)


@contextmanager
def own_attention(causal_lm: PreTrainedModel) -> Iterator[None]:
    """Use the architecture's own attention and masks inside the block, for comparison."""
    kept = causal_lm.config._attn_implementation
    if kept.removesuffix(SPLIT) in FUNCTIONS:
        causal_lm.set_attn_implementation("sdpa" if can_use_sdpa(causal_lm, causal_lm.config) else "eager")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(kept)
