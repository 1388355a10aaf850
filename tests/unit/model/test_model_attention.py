"""Attention per segment: against a dense mask, in transformers' models, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.errors import DsftError, SpecError
from dsft.model.attention import (
    SEGMENTS,
    attend_per_segment,
    lengths_of,
    own_attention,
    packed_keywords,
    segment_attention,
)
from dsft.model.policy import Policy

LENGTHS = (7, 13, 1, 9)
TOKENS, HEADS, SIZE = sum(LENGTHS), 4, 8


def dense(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """By the definition: one mask for the whole row, in float64."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    of = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
    seen = (of[:, None] == of[None]) & (back >= 0) & (back < (window or TOKENS))
    scores = query @ key.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_equals_a_dense_mask(window: int | None, softcap: float | None, key_heads: int) -> None:
    """The output and the gradients of query, key and value."""
    torch.manual_seed(3)
    row = [torch.randn(1, heads, TOKENS, SIZE) * 2 for heads in (HEADS, key_heads, key_heads)]
    ours, theirs = ([x.clone().requires_grad_() for x in row] for _ in range(2))
    asked = {"sliding_window": window, "softcap": softcap, "segment_lengths": LENGTHS}
    found, weights = segment_attention(nn.Module(), *ours, None, scaling=0.3, **asked)
    expected = dense(*theirs, 0.3, window, softcap)
    assert weights is None and found.shape == (1, TOKENS, HEADS, SIZE) and found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    pull = torch.randn_like(found)
    found.backward(pull)
    expected.backward(pull.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=5e-6)


def test_attention_dropout_drops() -> None:
    torch.manual_seed(3)
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    for softcap in (None, 3.0):
        whole, half = (
            segment_attention(nn.Module(), *row, None, p, segment_lengths=LENGTHS, softcap=softcap)[0]
            for p in (0.0, 0.5)
        )
        assert (whole - half).abs().max() > 0.1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "hands no lengths of segments down"),
        ({"segment_lengths": LENGTHS, "s_aux": torch.ones(4)}, "asks s_aux of its attention"),
        ({"segment_lengths": LENGTHS, "is_causal": False}, "looks ahead"),
        ({"segment_lengths": LENGTHS, "attention_mask": torch.ones(1)}, "makes a mask of its own"),
    ],
)
def test_what_is_unknown_is_refused(asked: dict[str, Any], said: str) -> None:
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    mask = asked.pop("attention_mask", None)
    with pytest.raises(DsftError, match=said):
        segment_attention(nn.Module(), *row, mask, **asked)


def test_a_model_that_keeps_its_window_to_itself_is_refused() -> None:
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    module = nn.Module()
    module.config = CONFIG_MAPPING["mistral"](sliding_window=4)  # type: ignore[assignment]
    with pytest.raises(DsftError, match="does not tell its attention which layers have a sliding window"):
        segment_attention(module, *row, None, segment_lengths=LENGTHS)


def test_lengths_from_positions() -> None:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    assert lengths_of(positions) == LENGTHS
    assert lengths_of(torch.arange(5)[None]) == (5,)


def test_what_flash_attention_is_given() -> None:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    for lengths in (LENGTHS, None):
        given = packed_keywords("flash_attention_2", positions, lengths)
        assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == [0, 7, 20, 21, 30]
        assert given["cu_seq_lens_q"].dtype == torch.int32
        assert given["max_length_q"] == given["max_length_k"] == 13
    assert packed_keywords("flash_attention_2", positions.expand(2, -1), None) == {}
    assert packed_keywords("sdpa", positions, None) == packed_keywords("eager", positions, LENGTHS) == {}


# --- in models ----------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5},
    "phi3": {"sliding_window": 5},
    "cohere": {},
    "cohere2": {"sliding_window": 5, "head_dim": 8},
    "granite": {},
    "olmo2": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "starcoder2": {"sliding_window": 5},
}


def small(kind: str, **keys: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    known = SMALL | MODELS.get(kind, {}) | keys
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**known))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [*((kind, False) for kind in MODELS), ("llama", True), ("gemma2", True)]
)
def test_packed_equals_alone(kind: str, checkpointing: bool) -> None:
    """Log-probabilities and gradients, against transformers' own attention and masks, row by row; segments
    longer than the window."""
    model = small(kind)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
    attend_per_segment(model, "auto", max_length=64)
    assert model.config._attn_implementation == SEGMENTS
    policy, parameters = Policy(model), list(model.parameters())
    rows = [torch.randint(3, 97, (1, length)) for length in LENGTHS]
    positions = [torch.arange(length)[None] for length in LENGTHS]
    targets = [row.roll(-1, 1) for row in rows]
    packed = policy(torch.cat(rows, 1), torch.cat(positions, 1), torch.cat(targets, 1), LENGTHS)
    found = torch.autograd.grad(packed.sum(), parameters, allow_unused=True)
    with own_attention(model):
        assert model.config._attn_implementation == ("eager" if kind == "gemma2" else "sdpa")
        alone = torch.cat([policy(*row) for row in zip(rows, positions, targets, strict=True)], 1)
        expected = torch.autograd.grad(alone.sum(), parameters, allow_unused=True)
    torch.testing.assert_close(packed, alone, rtol=0, atol=5e-6)
    for mine, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))
    ignored = policy(torch.cat(rows, 1), torch.cat(positions, 1), torch.cat(targets, 1), (TOKENS,))
    assert float((ignored - alone).detach().abs().max()) > 1e-2, (
        "this model would not show a border that is crossed"
    )


@pytest.mark.parametrize("kind", MODELS)
def test_other_neighbours_change_nothing(kind: str) -> None:
    """Row 28 of the fault matrix: all rows of a pack but one are replaced, token by token."""
    model = small(kind)
    attend_per_segment(model, "auto", max_length=64)
    policy = Policy(model)
    rows = [torch.randint(3, 97, (1, length)) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]

    def scored(rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        targets = torch.cat([row.roll(-1, 1) for row in rows], 1)
        return policy(torch.cat(rows, 1), positions, targets, LENGTHS).split(LENGTHS, 1)

    with torch.no_grad():
        before = scored(rows)
        for kept in range(len(rows)):
            others = [row if at == kept else (row - 2) % 94 + 3 for at, row in enumerate(rows)]
            assert torch.equal(scored(others)[kept], before[kept])


def test_eager_keeps_the_models_own_masks() -> None:
    model = small("gemma2", attn_implementation="eager")
    attend_per_segment(model, "eager", max_length=64)
    assert model.config._attn_implementation == "eager"
    policy = Policy(model)
    rows = [torch.randint(3, 97, (1, length)) for length in LENGTHS]
    positions = [torch.arange(length)[None] for length in LENGTHS]
    packed = policy(torch.cat(rows, 1), torch.cat(positions, 1), torch.cat(rows, 1), LENGTHS)
    alone = torch.cat([policy(row, at, row) for row, at in zip(rows, positions, strict=True)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=5e-6)


LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("mamba", {}, "recurrent layers"),
        ("bloom", {"n_head": 4}, "takes no positions"),
        ("gptj", {"rotary_dim": 4}, "an attention of its own"),
        (
            "lfm2",
            {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
            "layers of conv",
        ),
        ("phi3", {}, "turns all tokens of a row by its longest segment where one is over 32"),
    ],
)
def test_models_that_cannot_be_packed(kind: str, keys: dict[str, Any], said: str) -> None:
    keys |= LONGROPE if kind == "phi3" else {}
    with pytest.raises(SpecError, match=f"data.packing: a {kind} model cannot be packed: .*{said}"):
        attend_per_segment(small(kind, **keys), "auto", max_length=64)


def test_longrope_within_its_first_range_is_packed() -> None:
    attend_per_segment(small("phi3", **LONGROPE), "auto", max_length=32)
