"""Attention of packed rows as dsft chooses it here, against eager attention in float64 on the CPU."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.runs import SEED, device
from benchmarks.sft_loops import attend_packed
from dsft.data.steps.batch import Segments
from dsft.model.attention import packed_keywords

# (query heads, key heads, head size, sliding window or None)
SHAPES = ((16, 16, 64, None), (16, 4, 128, None), (16, 4, 80, None), (8, 2, 64, 100))
LENGTHS = ((1024,), (1, 2, 1, 300, 17, 64, 1, 638), (205,) * 5)


def compare(dtype: str, is_rehearsal: bool) -> dict[str, Any]:
    """gradient_error and output_error: the largest over shapes and sets of lengths, relative to the
    reference's 2-norm; other_segment_bits: elements of other segments' outputs that change with one segment;
    chosen: what dsft chose."""
    found: dict[str, Any] = {"gradient_error": 0.0, "output_error": 0.0, "other_segment_bits": 0}
    chosen = set()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run (dsft.dist.world.join_group)
    for shape in SHAPES:
        for lengths in LENGTHS:
            if is_rehearsal:
                lengths = tuple(-(-n // 16) for n in lengths)
            for name, value in of_shape(shape, lengths, getattr(torch, dtype), chosen).items():
                found[name] = max(found[name], value)
    return found | {"chosen": sorted(chosen)}


def of_shape(
    shape: tuple[int, int, int, int | None], lengths: tuple[int, ...], dtype: torch.dtype, chosen: set[str]
) -> dict[str, float]:
    model = model_of(shape, dtype)
    reference = model_of(shape, torch.float64)
    reference.load_state_dict({k: v.double().cpu() for k, v in model.state_dict().items()})
    attend_packed(model, max(lengths), torch.device(device()))
    chosen.add(str(model.config._attn_implementation))

    draw = random.Random(SEED)
    rows = [[draw.randrange(256) for _ in range(n)] for n in lengths]
    weights = torch.randn(sum(lengths), shape[0] * shape[2], generator=torch.Generator().manual_seed(SEED))
    ours = through(model, rows, weights)
    theirs = [
        through(reference, [row], part) for row, part in zip(rows, weights.split(list(lengths)), strict=True)
    ]
    expected = torch.cat([output for output, _ in theirs]), sum(gradient for _, gradient in theirs)
    changed = [[255 - i for i in row] if at == 0 else row for at, row in enumerate(rows)]
    other = through(model, changed, weights)[0][lengths[0] :]
    return {
        "output_error": error(ours[0], expected[0]),
        "gradient_error": error(ours[1], expected[1]),
        "other_segment_bits": int((other != ours[0][lengths[0] :]).sum()),
    }


def model_of(shape: tuple[int, int, int, int | None], dtype: torch.dtype) -> Any:
    """One layer; in float64 eager and on the CPU."""
    from transformers import AutoModel, MistralConfig

    heads, groups, size, window = shape
    config = MistralConfig(
        hidden_size=heads * size, intermediate_size=256, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=groups, head_dim=size, vocab_size=256, sliding_window=window,
    )  # fmt: skip
    torch.manual_seed(SEED)
    is_reference = dtype == torch.float64
    model = AutoModel.from_config(
        config, attn_implementation="eager" if is_reference else "sdpa", dtype=dtype
    )
    return model.to("cpu" if is_reference else device())


def through(model: Any, rows: list[list[int]], weights: Tensor) -> tuple[Tensor, Tensor]:
    """(T, width) output, and the gradient of the queries' weights of Σ output × weights; in float64."""
    place = next(model.parameters()).device
    ids = torch.tensor([i for row in rows for i in row], device=place)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None].to(place)
    lengths = tuple(len(row) for row in rows)
    keywords = packed_keywords(model.config._attn_implementation, positions, Segments(lengths))
    model.zero_grad()
    output = model(input_ids=ids, position_ids=positions, use_cache=False, **keywords).last_hidden_state[0]
    (output * weights.to(place, output.dtype)).sum().backward()
    gradient = model.layers[0].self_attn.q_proj.weight.grad
    return output.detach().double().cpu(), gradient.double().cpu()


def error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())
