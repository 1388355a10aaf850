"""Attention per segment: against a dense mask, in transformers' models, and what is refused."""

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, masking_utils

from dsft.data.steps.batch import NO_TARGET, Answers, Segments, borders_of
from dsft.errors import DsftError, SpecError
from dsft.model import attention, attention_choice, attention_loop
from dsft.model.attention import (
    SHAPES,
    attend_padded,
    attend_per_segment,
    own_attention,
    packed_keywords,
    padded_attention,
    segments_of,
    use,
)
from dsft.model.attention_choice import (
    FUNCTIONS,
    PACKAGE,
    PACKAGE_3,
    VARLEN,
    AttentionChoice,
    AttentionRequirements,
    _try,
    choose,
    requirements_of,
)
from dsft.model.attention_loop import KEYWORD, SEGMENTS, Spans, segment_attention
from dsft.model.attention_shapes import SegmentShapes
from dsft.model.attention_varlen import (
    IS_ROWS,
    KEY_INDEX,
    AttentionArguments,
    Kernel,
    rows_kernel,
    torch_kernel,
    varlen_attention,
)
from dsft.model.older import checkpoint_activations
from dsft.model.policy import Policy
from dsft.objective.preference import preference
from dsft.spec.schema import Dpo
from tests import varlen_on_cpu
from tests.make import forward, logps_of, make_micro_batch
from tests.specs import dims

LENGTHS = (7, 13, 1, 9)
TOKENS, HEADS, SIZE = sum(LENGTHS), 4, 8
ALONE = tuple((length, 0) for length in LENGTHS)
SHARED = ((9, 0), (4, 5), (2, 0), (3, 1), (10, 0), (5, 9), (8, 2))  # the last two continue the same one


def dense(
    row: Sequence[Tensor], segments: Spans, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """By the definition: one mask for the whole row (query, key, value), in float64."""
    query, key, value = row
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    of = torch.cat([torch.full((length,), number) for number, (length, _) in enumerate(segments)])
    at = positions_of(segments)[0]
    seen = of[:, None] == of[None]
    for number, (_, start) in enumerate(segments):
        prompt = max(n for n, (_, begin) in enumerate(segments[: number + 1]) if begin == 0)
        seen |= (of == number)[:, None] & ((of == prompt) & (at < start))[None]
    back = at[:, None] - at[None]
    seen &= (back >= 0) & (back < (window or TOKENS))
    scores = query @ key.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def assert_near(found: Tensor, expected: Tensor, ours: list[Tensor], theirs: list[Tensor], atol: Any) -> None:
    """Compare outputs and, of one upstream gradient, the gradients of their inputs. atol: of both."""
    of_output, of_gradients = atol
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=0, atol=of_output)
    pull = torch.randn_like(found)
    found.backward(pull)
    expected.backward(pull.to(expected.dtype))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=of_gradients)


def assert_equal_gradients(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """To 1e-5 of the largest of each parameter, or of 1."""
    for mine, other in zip(found, expected, strict=True):
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5 * max(1.0, float(other.abs().max())))


def positions_of(segments: Spans) -> Tensor:
    return torch.cat([torch.arange(start, start + length) for length, start in segments])[None]


@pytest.mark.parametrize("segments", [ALONE, SHARED], ids=["alone", "shared"])
@pytest.mark.parametrize(("key_heads", "at_once"), [(4, 128), (2, 3), (1, 128), (1, 1)])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_equals_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    softcap: float | None,
    key_heads: int,
    at_once: int,
    segments: Spans,
) -> None:
    """The output and the gradients of query, key and value, however many queries a kernel gets at once."""
    monkeypatch.setattr(attention_loop, "QUERY_BLOCK", at_once)
    torch.manual_seed(3)
    tokens = sum(length for length, _ in segments)
    row = [torch.randn(1, heads, tokens, SIZE) * 2 for heads in (HEADS, key_heads, key_heads)]
    ours, theirs = ([x.clone().requires_grad_() for x in row] for _ in range(2))
    asked = {"sliding_window": window, "softcap": softcap, KEYWORD: segments}
    found, weights = segment_attention(nn.Module(), *ours, None, scaling=0.3, **asked)
    expected = dense(theirs, segments, 0.3, window, softcap)
    assert weights is None and found.shape == (1, tokens, HEADS, SIZE) and found.is_contiguous()
    bound = 5e-6 if segments == ALONE else 1e-5  # a shared prompt's keys are seen by up to three segments
    assert_near(found, expected, ours, theirs, (2e-6, bound))


def test_attention_dropout_drops() -> None:
    torch.manual_seed(3)
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    for softcap in (None, 3.0):
        whole, half = (
            segment_attention(nn.Module(), *row, None, p, segments=ALONE, softcap=softcap)[0]
            for p in (0.0, 0.5)
        )
        assert (whole - half).abs().max() > 0.1


@pytest.mark.parametrize(("asked", "message"), [
    ({}, "does not pass the segments"),
    ({KEYWORD: ALONE, "s_aux": torch.ones(4)}, "passes s_aux to its attention, which"),
    ({KEYWORD: ALONE, "is_causal": False}, "not causal"),
    ({KEYWORD: ALONE, "attention_mask": torch.ones(1)}, "passes its own mask"),
])  # fmt: skip
def test_unknown_arguments_are_refused(asked: dict[str, Any], message: str) -> None:
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    mask = asked.pop("attention_mask", None)
    with pytest.raises(DsftError, match=message):
        segment_attention(nn.Module(), *row, mask, **asked)


def test_unannounced_sliding_window_is_refused() -> None:
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    module = nn.Module()
    module.config = CONFIG_MAPPING["mistral"](sliding_window=4)  # type: ignore[assignment]
    with pytest.raises(DsftError, match="does not pass sliding_window to its attention"):
        segment_attention(module, *row, None, segments=ALONE)


def test_missing_prompt_is_an_error() -> None:
    row = [torch.randn(1, HEADS, 8, SIZE) for _ in range(3)]
    for segments in (((8, 2),), ((3, 0), (5, 4))):
        with pytest.raises(DsftError, match="its prompt has fewer tokens than that"):
            segment_attention(nn.Module(), *row, None, segments=segments)


@pytest.mark.parametrize("segments", [ALONE, SHARED, ((5, 0),), ((2, 0), (1, 1), (2, 0))])
def test_segments_from_positions(segments: Spans) -> None:
    lengths, starts = (tuple(numbers) for numbers in zip(*segments, strict=True))
    assert segments_of(positions_of(segments)) == Segments(lengths, starts if any(starts) else None)
    given = packed_keywords(SEGMENTS, positions_of(segments))
    same = packed_keywords(SEGMENTS, positions_of(segments), Segments(lengths, starts))
    assert given == same == {KEYWORD: segments}


@pytest.mark.parametrize("implementation", ["flash_attention_2", "eager", "sdpa"])
def test_other_attention_functions_refuse_shared_prompts(implementation: str) -> None:
    lengths, starts = zip(*SHARED, strict=True)
    with pytest.raises(DsftError, match=f"is {implementation}; set share_prompts to false"):
        packed_keywords(implementation, positions_of(SHARED), Segments(lengths, starts))
    if implementation.startswith("flash"):
        with pytest.raises(DsftError, match="share_prompts"):
            packed_keywords(implementation, positions_of(SHARED))


def test_arguments_of_flash_attention() -> None:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    for segments in (Segments(LENGTHS), None):
        given = packed_keywords("flash_attention_2", positions, segments)
        assert given["cu_seq_lens_q"].tolist() == given["cu_seq_lens_k"].tolist() == [0, 7, 20, 21, 30]
        assert given["cu_seq_lens_q"].dtype == torch.int32
        assert given["max_length_q"] == given["max_length_k"] == 13
    assert packed_keywords("flash_attention_2", positions.expand(2, -1)) == {}
    assert packed_keywords("sdpa", positions) == packed_keywords("eager", positions, Segments(LENGTHS)) == {}


# --- in models ----------------------------------------------------------------------------------------------

SMALL = dims(32, 48, 4, 4, 2, vocab_size=97, max_position_embeddings=128)
SMALL |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
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
LEARNED: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
LEARNED |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


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
        checkpoint_activations(model)
        model.train()
    attend_per_segment(model, "auto", max_length=64)
    assert model.config._attn_implementation == SEGMENTS
    policy, parameters = Policy(model), list(model.parameters())
    rows = [draw_tokens(length) for length in LENGTHS]
    positions = [torch.arange(length)[None] for length in LENGTHS]
    targets = [row.roll(-1, 1) for row in rows]
    packed = logps_of(policy, torch.cat(rows, 1), torch.cat(positions, 1), torch.cat(targets, 1), LENGTHS)
    found = torch.autograd.grad(packed.sum(), parameters, allow_unused=True)
    with own_attention(model):
        assert model.config._attn_implementation == ("eager" if kind == "gemma2" else "sdpa")
        alone = torch.cat([logps_of(policy, *row) for row in zip(rows, positions, targets, strict=True)], 1)
        expected = torch.autograd.grad(alone.sum(), parameters, allow_unused=True)
    torch.testing.assert_close(packed, alone, rtol=0, atol=5e-6)
    assert_equal_gradients(found, expected)
    ignored = logps_of(policy, torch.cat(rows, 1), torch.cat(positions, 1), torch.cat(targets, 1), (TOKENS,))
    assert float((ignored - alone).detach().abs().max()) > 1e-2, (
        "this model would not show a border that is crossed"
    )


@pytest.mark.parametrize("kind", MODELS)
def test_other_rows_of_a_pack_change_nothing(kind: str) -> None:
    """Row 28 of the fault matrix: all rows of a pack but one are replaced, token by token."""
    model = small(kind)
    attend_per_segment(model, "auto", max_length=64)
    policy = Policy(model)
    rows = [torch.randint(3, 97, (1, length)) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]

    def scored(rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        targets = torch.cat([row.roll(-1, 1) for row in rows], 1)
        return logps_of(policy, torch.cat(rows, 1), positions, targets, LENGTHS).split(LENGTHS, 1)

    with torch.no_grad():
        before = scored(rows)
        for kept in range(len(rows)):
            others = [row if at == kept else (row - 2) % 94 + 3 for at, row in enumerate(rows)]
            assert torch.equal(scored(others)[kept], before[kept])


PAIRS = ((6, 5, 3), (1, 4, 7), (12, 1, 6), (3, 9, 1))  # tokens of a prompt and of its two answers


def pairs(draw: Callable[[int], Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor, Spans]:
    """Both rows of each pair, (1, T) each; and all of them in one row with each prompt once: its tokens, the
    targets, and its segments. Only answers have targets."""
    rows, ids, targets = [], [], []
    segments: list[tuple[int, int]] = []
    for prompt, *answers in PAIRS:
        asked = draw(prompt)
        chosen, rejected = (torch.cat((asked, draw(answer)), 1) for answer in answers)
        rows.append((chosen, rejected))
        ids += [chosen, rejected[:, prompt - 1 :]]
        segments += [(chosen.shape[1], 0), (1 + answers[1], prompt - 1)]
        targets += [aimed(chosen, prompt), aimed(rejected, prompt)[:, prompt - 1 :]]
    return rows, torch.cat(ids, 1), torch.cat(targets, 1), tuple(segments)


def aimed(row: Tensor, prompt: int) -> Tensor:
    targets = row.roll(-1, 1)
    targets[:, -1] = NO_TARGET
    targets[:, : prompt - 1] = NO_TARGET
    return targets


def shared_model(kind: str) -> PreTrainedModel:
    return small(kind, **(LEARNED if kind == "gpt2" else {}))


def draw_tokens(tokens: int) -> Tensor:
    return torch.randint(3, 97, (1, tokens))


@pytest.mark.parametrize(
    ("kind", "in_pipeline", "checkpointing"),
    [*((kind, False, False) for kind in (*MODELS, "gpt2")), ("llama", True, False), ("gemma2", False, True)],
)
def test_a_shared_prompt_equals_two_rows(kind: str, in_pipeline: bool, checkpointing: bool) -> None:
    """Log-probabilities of each answer and all gradients, against transformers' own attention on each row by
    itself, to the bound of packing; also where the segments are read from the positions."""
    model = shared_model(kind)
    if checkpointing:
        checkpoint_activations(model)
        model.train()
    attend_per_segment(model, "auto", max_length=64)
    policy, parameters = Policy(model), list(model.parameters())
    rows, ids, targets, segments = pairs(draw_tokens)
    lengths, starts = (None, None) if in_pipeline else zip(*segments, strict=True)
    found = logps_of(policy, ids, positions_of(segments), targets, lengths, starts=starts)
    weights = torch.randn(len(segments))  # a weight for each answer, as an objective of pairs has
    answers = torch.stack([part.sum() for part in found.split([n for n, _ in segments], 1)])
    gradients = torch.autograd.grad(answers @ weights, parameters, allow_unused=True)
    with own_attention(model):
        alone = torch.stack(
            [
                logps_of(policy, row, torch.arange(row.shape[1])[None], aimed(row, prompt)).sum()
                for both, (prompt, *_) in zip(rows, PAIRS, strict=True)
                for row in both
            ]
        )
        expected = torch.autograd.grad(alone @ weights, parameters, allow_unused=True)
    torch.testing.assert_close(answers, alone, rtol=1e-6, atol=5e-6)
    assert_equal_gradients(gradients, expected)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2"])
def test_no_answer_attends_to_another(kind: str) -> None:
    """All answers but one are replaced, token by token: its log-probabilities do not move at all."""
    model = shared_model(kind)
    attend_per_segment(model, "auto", max_length=64)
    policy = Policy(model)
    _, ids, targets, segments = pairs(draw_tokens)
    lengths, starts = zip(*segments, strict=True)
    prompts = {2 * n: prompt for n, (prompt, *_) in enumerate(PAIRS)}

    def scored(ids: Tensor) -> tuple[Tensor, ...]:
        return logps_of(policy, ids, positions_of(segments), targets, lengths, starts=starts).split(
            lengths, 1
        )

    with torch.no_grad():
        before = scored(ids)
        for kept in range(len(segments)):
            changed = ids.split(lengths, 1)
            others = [
                part if at == kept else torch.cat((part[:, :n], (part[:, n:] - 2) % 94 + 3), 1)
                for at, part in enumerate(changed)
                for n in (prompts.get(at, 1),)
            ]
            assert torch.equal(scored(torch.cat(others, 1))[kept], before[kept])


def test_eager_keeps_the_masks_of_the_model() -> None:
    model = small("gemma2", attn_implementation="eager")
    attend_per_segment(model, "eager", max_length=64)
    assert model.config._attn_implementation == "eager"
    policy = Policy(model)
    rows = [torch.randint(3, 97, (1, length)) for length in LENGTHS]
    positions = [torch.arange(length)[None] for length in LENGTHS]
    packed = logps_of(policy, torch.cat(rows, 1), torch.cat(positions, 1), torch.cat(rows, 1), LENGTHS)
    alone = torch.cat([logps_of(policy, row, at, row) for row, at in zip(rows, positions, strict=True)], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=5e-6)


LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "keys", "message"), [
    ("mamba", {}, "recurrent layers"),
    ("bloom", {"n_head": 4}, "takes no position_ids"),
    ("gptj", {"rotary_dim": 4}, "computes its attention itself"),
    ("llama4_text", {}, "layers of type chunked_attention"),
    ("phi3", {}, "would rotate all packed rows as the longest one where that has over 32 tokens"),
])  # fmt: skip
def test_models_that_cannot_be_packed_are_refused(kind: str, keys: dict[str, Any], message: str) -> None:
    keys |= LONGROPE if kind == "phi3" else {}
    with pytest.raises(SpecError, match=f"data.packing: a {kind} model cannot be packed: .*{message}"):
        attend_per_segment(small(kind, **keys), "auto", max_length=64)


def test_longrope_within_its_first_range_is_packed() -> None:
    attend_per_segment(small("phi3", **LONGROPE), "auto", max_length=32)


# --- in one call --------------------------------------------------------------------------------------------

ATTENTION = varlen_attention(torch_kernel())
whole_varlen = pytest.mark.skipif(
    "window_size" not in inspect.signature(varlen_attn).parameters,
    reason="this torch's varlen_attn has neither windows nor scales",
)


def segment_arguments(segments: Spans, longest: int = 0) -> dict[str, Any]:
    """Return the keyword arguments that give attention the segments of a row in one call."""
    shapes = SegmentShapes(longest) if longest else None
    return dict(packed_keywords(VARLEN, positions_of(segments), shapes=shapes))


@whole_varlen
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("segments", [ALONE, SHARED, ((30, 0),)], ids=["alone", "shared", "one"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_varlen_equals_the_loop(
    window: int | None, key_heads: int, segments: Spans, dtype: torch.dtype
) -> None:
    """The output and the gradients of query, key and value."""
    torch.manual_seed(3)
    tokens = sum(length for length, _ in segments)
    row = [
        torch.randn(1, tokens, n, SIZE, dtype=dtype).transpose(1, 2) for n in (HEADS, key_heads, key_heads)
    ]
    ours, theirs = ([x.clone().requires_grad_() for x in row] for _ in range(2))
    asked = {"sliding_window": window, "scaling": 0.3}
    before = len(varlen_on_cpu.calls)
    found, weights = ATTENTION(nn.Module(), *ours, None, **asked, **segment_arguments(segments, 64))
    assert varlen_on_cpu.calls[before:] == [len(segments)]
    expected, _ = segment_attention(nn.Module(), *theirs, None, segments=segments, **asked)
    assert weights is None and found.shape == (1, tokens, HEADS, SIZE)
    bound = 1e-12 if dtype is torch.float64 else 1e-5
    assert_near(found, expected, ours, theirs, (bound, bound))


@whole_varlen
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 100, 300, 512])
@pytest.mark.parametrize("rows", [1, 3])
def test_equal_rows_equal_the_loop(rows: int, window: int | None, key_heads: int) -> None:
    """The output and the gradients of query, key and value; with a window shorter than the rows by the kernel
    for segments."""
    torch.manual_seed(3)
    segments = ((256, 0),) * rows
    row = [
        torch.randn(1, 256 * rows, n, SIZE, dtype=torch.float64).transpose(1, 2)
        for n in (HEADS, key_heads, key_heads)
    ]
    ours, theirs = ([x.clone().requires_grad_() for x in row] for _ in range(2))
    asked = {"sliding_window": window, "scaling": 0.3}
    given = packed_keywords(VARLEN, positions_of(segments), None, shapes=SegmentShapes(1024, with_cudnn=True))
    assert given[IS_ROWS] is True
    before = len(varlen_on_cpu.calls)
    found, _ = ATTENTION(nn.Module(), *ours, None, **asked, **given)
    assert varlen_on_cpu.calls[before:] == ([rows] if window == 100 else [])
    expected, _ = segment_attention(nn.Module(), *theirs, None, segments=segments, **asked)
    assert_near(found, expected, ours, theirs, (1e-12, 1e-12))


@pytest.mark.parametrize(("segments", "expected"), [
    (((256, 0), (256, 0)), True),
    (((1000, 0), (1000, 0)), True),  # data.max_length
    (((1001, 0), (1001, 0)), False),
    (((256, 0), (512, 0)), False),
    (((512, 0), (256, 256)), False),  # answers that share their prompt
    (((512, 0), (512, 256)), False),
])  # fmt: skip
def test_rows_that_use_cudnn(segments: Segments, expected: bool) -> None:
    for shapes, is_rows in (
        (SegmentShapes(1000, with_cudnn=True), expected),
        (SegmentShapes(1000), False),
        (None, False),
    ):
        assert (
            IS_ROWS in packed_keywords(VARLEN, positions_of(segments), None, shapes=shapes),
            IS_ROWS in packed_keywords(SEGMENTS, positions_of(segments), None, shapes=shapes),
        ) == (is_rows, False)


def test_shapes_without_a_plan_do_not_use_cudnn() -> None:
    shapes = SegmentShapes(8192, with_cudnn=True)
    lengths = range(256, 8193, 256)
    for _ in range(2):
        assert [n for n in lengths if shapes.planned(2, n)] == list(lengths)[:16]


@pytest.mark.parametrize(("max_length", "bounds"), [
    (100, [100]),
    (1000, [128, 256, 512, 1000]),
    (4096, [128, 256, 512, 1024, 2048, 4096]),
    (5000, [256, 512, 1024, 2048, 4096, 5000]),
    (131072, [4096, 8192, 16384, 32768, 65536, 131072]),
])  # fmt: skip
def test_bounds_of_the_longest_segment(max_length: int, bounds: list[int]) -> None:
    shapes = SegmentShapes(max_length)
    found = {length: shapes.bound(length) for length in range(1, max_length + 1)}
    assert sorted(set(found.values())) == bounds
    for length, bound in found.items():
        assert length <= bound == min(x for x in bounds if x >= length)


def test_padded_rows_of_planned_shapes_may_use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers' own attention, where there is no mask; elsewhere it is off again."""
    seen: list[bool] = []

    def own(module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return query, None

    monkeypatch.setattr(attention, "sdpa_attention_forward", own)
    module, other = nn.Module(), nn.Module()
    setattr(module, SHAPES, SegmentShapes(1000, with_cudnn=True))
    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        for length, mask in ((512, None), (512, torch.ones(1)), (1000, None), (999, None)):
            for each in (module, other):
                padded_attention(each, *[torch.zeros(2, 1, length, 8)] * 3, mask)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(kept)
    assert seen == [True, False, False, False, True, False, False, False]


def test_padded_rows_on_a_cpu_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.AttentionInterface, "register", pytest.fail)
    assert attend_padded(small("llama").bfloat16(), 64, torch.device("cpu")) == ""
    assert attend_padded(small("gemma2").bfloat16(), 64, torch.device("cuda")) == ""  # eager


def test_keywords_of_the_varlen_call() -> None:
    """Borders are int32, and the keys of a shared prompt come before the segment's own."""
    alone, shared = segment_arguments(ALONE, 64), segment_arguments(SHARED, 64)
    assert alone["cu_seq_lens_q"].tolist() == alone["cu_seq_lens_k"].tolist() == [0, 7, 20, 21, 30]
    assert KEY_INDEX not in alone
    assert shared["cu_seq_lens_q"].tolist() == [0, 9, 13, 15, 18, 28, 33, 41]
    assert shared["cu_seq_lens_k"].tolist() == [0, 9, 18, 20, 24, 34, 48, 58]
    index = shared[KEY_INDEX].tolist()
    assert index[9:18] == [0, 1, 2, 3, 4, 9, 10, 11, 12]
    assert index[48:] == [18, 19, *range(33, 41)]
    for given in (alone, shared):
        assert given["max_length_q"] == given["max_length_k"] == 64
        assert {given[key].dtype for key in ("cu_seq_lens_q", "cu_seq_lens_k")} == {torch.int32}
    assert segment_arguments(ALONE)["max_length_q"] == 13  # never less than there is
    with pytest.raises(DsftError, match="position 4 after a prompt of only 3 tokens"):
        borders_of((3, 5), (0, 4))


def test_micro_batch_moves_segment_borders_to_the_device() -> None:
    tokens = torch.arange(41)[None]
    lengths, starts = (tuple(numbers) for numbers in zip(*SHARED, strict=True))
    made = make_micro_batch(tokens, positions_of(SHARED), tokens, lengths, starts=starts).to(
        torch.device("cpu")
    )
    given = packed_keywords(VARLEN, made.tokens.position_ids, made.segments)
    assert given["cu_seq_lens_k"] is made.segments.borders[1] and given[KEY_INDEX] is made.segments.borders[2]
    assert make_micro_batch(tokens, tokens, tokens).to(torch.device("cpu")).segments is None
    again = made.to(torch.device("cpu")).segments
    assert again is not None and again.borders is not None
    assert all(a is b for a, b in zip(again.borders, made.segments.borders, strict=True))


@pytest.mark.parametrize("implementation", [VARLEN, PACKAGE, PACKAGE_3])
@pytest.mark.parametrize(("asked", "message"), [
    ({"with_segments": False}, "does not pass the segments"),
    ({"s_aux": torch.ones(4)}, "passes s_aux to its attention, which"),
    ({"is_causal": False}, "not causal"),
    ({"attention_mask": torch.ones(1)}, "passes its own mask"),
])  # fmt: skip
def test_varlen_refuses_what_the_loop_refuses(
    asked: dict[str, Any], message: str, implementation: str
) -> None:
    row = [torch.randn(1, HEADS, TOKENS, SIZE) for _ in range(3)]
    mask, with_segments = asked.get("attention_mask"), asked.get("with_segments", True)
    asked = {key: value for key, value in asked.items() if key not in ("attention_mask", "with_segments")}
    with pytest.raises(DsftError, match=message):
        FUNCTIONS[implementation](
            nn.Module(), *row, mask, **asked, **(segment_arguments(ALONE) if with_segments else {})
        )


def old_varlen_attn(  # noqa: PLR0913, PLR0917  torch's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Tensor:
    """As torch 2.10 has it."""
    heads = torch.ops.torch_attn._varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, None, [-1, -1]
    )
    output: Tensor = heads[0]
    return output


@whole_varlen
def test_older_varlen_attn_gives_the_same_or_is_refused() -> None:
    torch.manual_seed(3)
    row = [torch.randn(1, heads, TOKENS, SIZE) for heads in (HEADS, 2, 2)]
    older = varlen_attention(torch_kernel(old_varlen_attn))
    given = {"sliding_window": None, "scaling": SIZE**-0.5, **segment_arguments(ALONE)}
    found, expected = (attend(nn.Module(), *row, None, **given)[0] for attend in (older, ATTENTION))
    torch.testing.assert_close(found, expected)
    for key, value, message in (
        ("sliding_window", 4, "does not support windows"),
        ("scaling", 0.3, "does not support scales other"),
        ("softcap", 3.0, "does not support soft-caps"),
        ("dropout", 0.5, "does not support dropout"),
    ):
        with pytest.raises(DsftError, match=message):
            older(nn.Module(), *row, None, **given | {key: value})


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, of_keys: Tensor, longest: int, _: int, **keywords: Any
) -> Tensor:
    """Return the package flash-attn's function, by torch's."""
    given.append(keywords)
    assert keywords.pop("causal") and not keywords.pop("dropout_p")
    keywords.pop("softcap")
    window, scale = keywords.pop("window_size"), keywords.pop("softmax_scale")
    assert not keywords
    return torch_kernel()(q, k, v, (borders, of_keys), AttentionArguments(longest, scale, window, None, 0.0))


given: list[dict[str, Any]] = []


@whole_varlen
def test_flash_attn_is_called_with_its_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", sys.modules[__name__])
    row = [torch.randn(1, heads, 41, SIZE) for heads in (HEADS, 2, 2)]
    asked = {"scaling": 0.3, "sliding_window": 4}
    found, _ = FUNCTIONS[PACKAGE](nn.Module(), *row, None, **asked, **segment_arguments(SHARED))
    expected, _ = segment_attention(nn.Module(), *row, None, segments=SHARED, **asked)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@whole_varlen
def test_flash_attention_3_is_called_with_its_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own kernels stay for all other attention of the process. Its first releases return a tuple."""

    def called(*values: Tensor, max_seqlen_q: int, max_seqlen_k: int, **keywords: Any) -> Any:
        return flash_attn_varlen_func(*values, max_seqlen_q, max_seqlen_k, dropout_p=0.0, **keywords), None

    package = SimpleNamespace(flash_attn_varlen_func=called)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    row = [torch.randn(1, heads, 41, SIZE) for heads in (HEADS, 2, 2)]
    asked = {"scaling": 0.3, "sliding_window": 4}
    found, _ = FUNCTIONS[PACKAGE_3](nn.Module(), *row, None, **asked, **segment_arguments(SHARED))
    expected, _ = segment_attention(nn.Module(), *row, None, segments=SHARED, **asked)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    with pytest.raises(DsftError, match="does not support dropout"):
        FUNCTIONS[PACKAGE_3](nn.Module(), *row, None, 0.5, **asked, **segment_arguments(SHARED))
    trials = attention_choice._try
    monkeypatch.setattr(attention_choice, "_try", lambda *given: trials(*given[:3], torch.device("cpu")))
    choice = choose(small("llama").bfloat16(), torch.device("cuda"))
    assert choice == AttentionChoice(PACKAGE_3, "the package of FlashAttention 3", with_cudnn=False)
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)  # not in torch 2.10
    assert current() is None


@whole_varlen
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gemma2"])
@pytest.mark.parametrize("layout", ["alone", "pairs"])
def test_models_with_varlen_equal_the_loop(kind: str, layout: str) -> None:
    """Log-probabilities and all gradients, in float64; checkpointed too."""
    model = small(kind).double()
    checkpoint_activations(model)
    model.train()
    policy, parameters = Policy(model), list(model.parameters())
    rows, ids, targets, segments = pairs(draw_tokens)
    if layout == "alone":
        segments, ids = ALONE, draw_tokens(TOKENS)
        targets = ids.roll(-1, 1)
    lengths, starts = (tuple(numbers) for numbers in zip(*segments, strict=True))
    batch = make_micro_batch(ids, positions_of(segments), targets, lengths, starts=starts).to(
        torch.device("cpu")
    )
    found = []
    for kind_of in ("sdpa", "auto"):
        attend_per_segment(model, kind_of, 64)
        if kind_of == "auto":
            use(model, VARLEN)
        before = len(varlen_on_cpu.calls)
        logps = forward(policy, batch).logps
        assert varlen_on_cpu.calls[before:] == ([len(segments)] * 4 if kind_of == "auto" else [])
        pull = torch.linspace(0.5, 1.5, logps.numel()).view_as(logps)
        found.append((logps, torch.autograd.grad((logps * pull).sum(), parameters, allow_unused=True)))
    (loop, of_loop), (one, of_one) = found
    torch.testing.assert_close(one, loop, rtol=0, atol=1e-5)  # float32 log-probabilities
    for mine, other in zip(of_one, of_loop, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_arguments_that_models_pass_to_attention() -> None:
    plain = requirements_of(small("llama"))
    assert (plain.heads, plain.key_heads, plain.head_sizes, plain.scales) == (4, 2, (8,), (8**-0.5,))
    assert (plain.windows, plain.softcap, plain.dropout, plain.is_uneven) == ((None,), None, 0.0, False)
    assert set(requirements_of(small("mistral")).windows) == {None, 5}
    assert requirements_of(small("gemma2")).softcap == 50.0
    assert requirements_of(small("granite", attention_multiplier=0.5)).scales == (0.5,)
    assert requirements_of(small("gpt2", **LEARNED | {"attn_pdrop": 0.1})).dropout == 0.1
    assert requirements_of(small("gpt_neox")).head_sizes == (8,)


def test_choice_of_attention_is_reported() -> None:
    model = small("llama")
    on_cpu = "attention of packed rows: segment by segment, as FlashAttention needs a GPU"
    assert attend_per_segment(model, "auto", 64) == on_cpu
    assert attend_per_segment(model, "sdpa", 64).endswith("segment by segment, as model.attention is sdpa")
    assert attend_per_segment(model, "eager", 64).endswith("eager, as model.attention says")
    of_fp32 = choose(model, torch.device("cuda"))
    assert of_fp32 == AttentionChoice(
        SEGMENTS, "segment by segment, as FlashAttention does not compute in float32"
    )


def test_failing_kernel_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's own assertion, or a library that does not load, ends no run."""

    def broken(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(attention_choice, "_try", broken)
    choice = choose(small("llama").bfloat16(), torch.device("cuda"))
    assert choice.name == SEGMENTS
    assert choice.description.endswith(
        "not the package of FlashAttention 3: AssertionError; not varlen_attn of torch: AssertionError; "
        "not the package flash-attn: AssertionError"
    )


WRONG: dict[str, Callable[[Kernel], Kernel]] = {
    "right": lambda kernel: kernel,
    "scale": lambda kernel: (
        lambda q, k, v, b, form: kernel(q, k, v, b, form._replace(scale=form.scale * 1.5))
    ),
    "window": lambda kernel: lambda q, k, v, b, form: kernel(q, k, v, b, form._replace(window=(2, 0))),
    "borders": lambda kernel: lambda q, k, v, b, form: kernel(q, k[:-1], v[:-1], (b[0], b[0]), form),
    "heads": lambda kernel: lambda q, k, v, b, form: kernel(q, k.flip(1), v, b, form),
    "gradient": lambda kernel: lambda q, k, v, b, form: kernel(q, (k + k.detach()) / 2, v, b, form),
    "not finite": lambda kernel: lambda q, k, v, b, form: kernel(q, k, v * math.nan, b, form),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_with_wrong_numbers_is_not_chosen(wrong: str, dtype: torch.dtype) -> None:
    asked = AttentionRequirements(4, 2, (16,), (None, 0.2), (None, 64), None, 0.0, is_uneven=False)
    kernel = WRONG[wrong](torch_kernel())
    with (
        nullcontext()
        if wrong == "right"
        else pytest.raises(DsftError, match="differ from those of attention by its definition")
    ):
        _try(kernel, asked, dtype, torch.device("cpu"))


@pytest.mark.parametrize("wrong", ["right", "scale", "heads", "gradient", "not finite"])
def test_row_kernel_with_wrong_numbers_is_not_chosen(wrong: str) -> None:
    asked = AttentionRequirements(4, 2, (16,), (None, 0.2), (None,), None, 0.0, is_uneven=False)
    expected = nullcontext() if wrong == "right" else pytest.raises(DsftError, match="by its definition")
    with expected:
        _try(WRONG[wrong](rows_kernel()), asked, torch.bfloat16, torch.device("cpu"), True)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("name", [SEGMENTS, VARLEN])
def test_transformers_builds_no_mask_and_searches_no_segments(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    """It would wait for the device in each forward pass."""
    found = list[bool]()
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: found.append(True))
    model = small(kind)
    use(model, name)
    ids = draw_tokens(TOKENS)
    if (kind, name) == ("gemma2", VARLEN):
        with pytest.raises(DsftError, match="does not support soft-caps"):
            logps_of(Policy(model), ids, positions_of(ALONE), ids, LENGTHS)
    else:
        logps_of(Policy(model), ids, positions_of(ALONE), ids, LENGTHS)
    assert not found
    with own_attention(model):
        logps_of(Policy(model), ids, positions_of(ALONE), ids, LENGTHS)
    assert found


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
def test_preference_pairs_with_varlen_equal_the_loop(loss_type: Any) -> None:
    """Of pairs that share their prompt."""
    model = small("llama").double()
    policy, parameters = Policy(model), list(model.parameters())
    _, ids, targets, segments = pairs(draw_tokens)
    lengths, starts = (tuple(numbers) for numbers in zip(*segments, strict=True))
    num_tokens = torch.tensor([[chosen, rejected] for _, chosen, rejected in PAIRS])
    answers = Answers(
        torch.arange(len(PAIRS)), num_tokens, torch.randn(len(PAIRS), 2, dtype=torch.float64) - 30
    )
    batch = make_micro_batch(ids, positions_of(segments), targets, lengths, starts=starts, answers=answers)
    batch = batch.to(torch.device("cpu"))
    objective = preference(Dpo(loss_type=loss_type, beta=0.5))
    found = []
    for name in (SEGMENTS, VARLEN):
        use(model, name)
        sums = objective.sums(forward(policy, batch).logps, batch)
        found.append((torch.stack(sums), torch.autograd.grad(sums[0], parameters)))
    (loop, of_loop), (one, of_one) = found
    torch.testing.assert_close(one, loop, rtol=1e-6, atol=1e-6)
    assert max(float(gradient.abs().max()) for gradient in of_loop) > 1e-3
    for mine, other in zip(of_one, of_loop, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
