"""The proofs of packing and of the head: what is exact passes; what is not stops the run, or is not used."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from dsft.data.sets.dataset import Dataset, Example
from dsft.data.steps.batch import MicroBatch, Segments
from dsft.data.steps.collate import collate_packed
from dsft.data.steps.split import part_of
from dsft.dist import sequence
from dsft.engine import self_check
from dsft.engine.self_check import (
    answers_changed,
    check_head,
    check_kernels,
    check_packing,
    check_split,
    every_second_changed,
    real_rows,
    shared_pairs,
    whole_rows,
)
from dsft.errors import SpecError
from dsft.model import attention, kernels
from dsft.model.attention import attend_per_segment, own_attention, use
from dsft.model.attention_choice import VARLEN
from dsft.model.attention_loop import KEYWORD, SEGMENTS
from dsft.model.attention_varlen import KEY_INDEX
from dsft.model.build import build_model
from dsft.model.config import TokenFacts
from dsft.model.policy import Policy
from dsft.spec.schema import Model
from tests import varlen_on_cpu
from tests.examples import dataset_of
from tests.in_threads import Threads
from tests.make import ALONE, forward, logps_of
from tests.parity.cases import SHAPES
from tests.specs import llama

FACTS = TokenFacts(128, bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA = llama(16, 48, 2, 2, 1, max_position_embeddings=64)


class Scores:
    """An engine without one."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.given: list[MicroBatch] = []

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, ...]:
        self.given += micro_batches
        return tuple(forward(self.policy, b).logps for b in micro_batches)


def rows(*lengths: int, segments: bool = False) -> Dataset:
    draw = np.random.default_rng(5)
    ids = [draw.integers(3, 128, length).astype(np.int32) for length in lengths]
    examples = [Example(i, np.zeros(len(i), dtype=bool)) for i in ids]
    if segments:
        joined = np.concatenate(ids)
        examples = [Example(joined, np.zeros(len(joined), dtype=bool), lengths)]
    return dataset_of(examples)


def scores(precision: str = "fp32", attention: str = SEGMENTS, config: dict[str, Any] = LLAMA) -> Scores:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    policy = build_model(Model(from_config=config), FACTS, 3, dtype)
    policy.eval()
    attend_per_segment(policy.causal_lm, "auto", 64)
    use(policy.causal_lm, attention)
    return Scores(policy)


def prove(engine: Scores, data: Dataset, precision: Any = "fp32") -> None:
    check_packing(engine, engine.policy, data, ALONE, precision, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [(20, 30, 17, 25, 60), (3, 40), (2,), (1, 9, 9)])
def test_exact_packing_passes(lengths: tuple[int, ...], precision: str) -> None:
    engine = scores(precision)
    prove(engine, rows(*lengths), precision)
    assert any(batch.segments and len(batch.segments.lengths) > 1 for batch in engine.given)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_over_a_border_is_found(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """The mutation: the row is attended as if it were one segment."""
    of = attention.packed_keywords
    monkeypatch.setattr(
        attention,
        "packed_keywords",
        lambda kind, at, *_: of(kind, at, Segments((at.shape[1],)) if len(at) == 1 else None),
    )
    with pytest.raises(
        SpecError, match="data.packing: the loss of a packed row changes with another row .* set it to false$"
    ):
        prove(scores(precision), rows(20, 30, 17, 25, 60), precision)


def test_state_crossing_a_border_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention has the segments, the recurrent layers do not."""
    config = SHAPES["qwen3_5"] | {"initializer_range": 0.3}
    prove(scores(config=config), rows(20, 30, 17, 25, 60))
    monkeypatch.setattr(attention, "segment_rows", lambda *_: None)
    with pytest.raises(SpecError, match="changes with another row of its pack"):
        prove(scores(config=config), rows(20, 30, 17, 25, 60))


def test_one_row_attending_to_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last two segments are one."""
    of = attention.packed_keywords

    def joined(kind: str, at: Tensor, segments: Segments | None, *_: Any) -> Any:
        lengths = segments.lengths if segments else ()
        return of(kind, at, Segments((*lengths[:-2], sum(lengths[-2:]))) if len(lengths) > 2 else segments)

    monkeypatch.setattr(attention, "packed_keywords", joined)
    with pytest.raises(SpecError, match="changes with another row of its pack"):
        prove(scores(), rows(20, 30, 17, 25, 60))


def test_row_that_differs_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other row changes anything, but the packed rows are not what they are alone."""
    monkeypatch.setattr(
        self_check,
        "collate_padded",
        lambda examples, pad: collate_packed([shifted(e) for e in examples], pad),
    )
    with pytest.raises(SpecError, match="nats per token from what it is when alone"):
        prove(scores(), rows(20, 30, 17, 25, 60))


def shifted(example: Example) -> Example:
    return Example(np.roll(example.input_ids, 1), example.trained)


def test_the_rows_are_real_and_short() -> None:
    data = rows(200, 20, 5, 18, 1500, 30)
    chosen = real_rows(data)
    assert [len(row.input_ids) for row in chosen] == [18, 1024, 20, 30]
    assert all(row.trained[1:].all() and not row.trained[0] for row in chosen)
    assert np.array_equal(chosen[2].input_ids, data[1].input_ids)


def test_pieces_of_full_rows_are_separated() -> None:
    assert [len(row.input_ids) for row in real_rows(rows(20, 30, 1, 17, 60, segments=True))] == [
        17, 60, 20, 30,
    ]  # fmt: skip


def test_every_token_of_a_changed_row_differs() -> None:
    before = real_rows(rows(20, 30, 17, 25, 60))
    after = every_second_changed(before)
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        same = old.input_ids == new.input_ids
        assert same.all() if number % 2 else not same.any()
    assert set(np.concatenate([row.input_ids for row in after])) <= set(
        np.concatenate([row.input_ids for row in before])
    )


# --- answers that share a prompt --------------------------------------------------------------------------


def pairs(*tokens: tuple[int, int, int]) -> Dataset:
    """Lengths are of the prompt, which is there once, and of the chosen and the rejected answer."""
    draw = np.random.default_rng(5)
    examples = []
    for prompt, chosen, rejected in tokens:
        ids = draw.integers(3, 128, prompt + chosen + rejected).astype(np.int32)
        border = prompt + chosen
        ids = np.insert(ids, border, ids[prompt - 1])
        trained = (np.arange(len(ids)) >= prompt) & (np.arange(len(ids)) != border)
        lengths, starts = (border, 1 + rejected), (0, prompt - 1)
        examples.append(Example(ids, trained, lengths, starts))
    return dataset_of(examples, pairs=True)


REAL = ((9, 5, 8), (20, 7, 12), (6, 9, 3), (1, 4, 4), (30, 20, 10))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [REAL, REAL[:1], ((1, 4, 4), (1, 5, 6))])
def test_shared_prompts_pass(tokens: Any, precision: str) -> None:
    engine, data = scores(precision), pairs(*tokens)
    line = check_packing(engine, engine.policy, data, ALONE, precision, 0)  # type: ignore[arg-type]
    is_shared = any(prompt > 1 for prompt, *_ in tokens)
    assert ("of answers that share their prompt" in line) is is_shared
    assert any(batch.segments and batch.segments.starts for batch in engine.given) is is_shared


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("mutation", "message"), [
    (lambda n, start: (n, 0), "from what it is when alone"),  # the second answer without its prompt
    (lambda n, start: (n, start and start + 2), "changes with the other answer"),  # its first token
    (lambda n, start: (n, start and start - 1), "from what it is when alone"),  # one token less
])  # fmt: skip
def test_wrong_prompt_is_found(
    monkeypatch: pytest.MonkeyPatch, mutation: Any, message: str, precision: str
) -> None:
    monkeypatch.setitem(LLAMA, "initializer_range", 0.5)  # a fresh model's answers hardly depend on anything
    of = attention.packed_keywords

    def mutated(*given: Any) -> Any:
        return {
            name: tuple(mutation(*one) for one in segments) if name == KEYWORD else segments
            for name, segments in of(*given).items()
        }

    monkeypatch.setattr(attention, "packed_keywords", mutated)
    with pytest.raises(SpecError, match=f"share_prompts: .*{message}.*; set it to false"):
        prove(scores(precision), pairs(*REAL), precision)


def test_the_pairs_are_real_and_one_answer_at_a_time_is_changed() -> None:
    chosen = shared_pairs(pairs(*REAL))
    assert [pair.segments for pair in chosen] == [(15, 4), (50, 11), (14, 9)]
    (whole, _), (other, again) = whole_rows(chosen[0]), whole_rows(answers_changed(chosen, 0)[0])
    assert len(whole.input_ids) == 15 and whole.target_count == 9
    assert np.array_equal(whole.input_ids[:6], other.input_ids[:6])
    assert not (whole.input_ids[6:] == other.input_ids[6:]).any()
    assert np.array_equal(again.input_ids, whole_rows(chosen[0])[1].input_ids) and len(again.input_ids) == 9
    left, right = answers_changed(chosen, 1)[0].input_ids, chosen[0].input_ids
    assert np.array_equal(left[:16], right[:16]) and not (left[16:] == right[16:]).any()


# --- the head ---------------------------------------------------------------------------------------------


def prove_the_head(engine: Scores) -> str:
    return check_head(engine, engine.policy, rows(20, 30, 17), ALONE, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_head_equal_to_the_models_is_used(precision: str) -> None:
    engine = scores(precision)
    assert prove_the_head(engine).startswith(
        "self-check passed: dsft's loss and that of the model's own logits"
    )
    assert not engine.policy.full_logits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scale", [0.9, 1.2, 16.0])
def test_unknown_scale_falls_back_to_the_models_logits(
    monkeypatch: pytest.MonkeyPatch, precision: str, scale: float
) -> None:
    engine = scores(precision)
    forward = engine.policy.causal_lm.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * scale
        return output

    monkeypatch.setattr(engine.policy.causal_lm, "forward", scaled)
    assert "so the logits are computed whole" in prove_the_head(engine)
    assert engine.policy.full_logits
    ids = torch.arange(3, 12)[None]
    with own_attention(engine.policy.causal_lm):
        logits = scaled(input_ids=ids, use_cache=False).logits.float()
    with own_attention(engine.policy.causal_lm):
        found = logps_of(engine.policy, ids, torch.arange(9)[None], ids)
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1))


def test_head_with_nan_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scores()
    head = engine.policy.causal_lm.lm_head
    monkeypatch.setattr(type(head), "_logps", lambda self, hidden, targets: hidden.sum(1) * float("nan"))
    assert "so the logits are computed whole" in prove_the_head(engine)


def test_other_output_layer_is_left_to_the_model() -> None:
    engine = scores()
    causal_lm = engine.policy.causal_lm
    causal_lm.lm_head = torch.nn.Sequential(torch.nn.Linear(16, 128, bias=False))
    other = Scores(Policy(causal_lm).eval())
    assert "its logits are computed whole" in prove_the_head(other)
    assert other.policy.full_logits


def with_norms(monkeypatch: pytest.MonkeyPatch, precision: str, forward: Any) -> Scores:
    """Return an engine whose norms compute by `forward`, as if it were a kernel."""

    def fused(module: Any) -> kernels.Fused | None:
        return kernels.Fused("norms", lambda: forward) if isinstance(module, LlamaRMSNorm) else None

    monkeypatch.setattr(kernels, "fused", fused)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: "found")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = scores(precision)
    kernels.use_liger(engine.policy.causal_lm)
    return engine


def proven_kernels(engine: Any, data: Any, *, may_fall_back: bool = False) -> str:
    world: Any = ALONE
    return check_kernels(engine, engine.policy, data, world, 0, may_fall_back=may_fall_back)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernels_with_other_rounding_pass(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    def in_float64(self: Any, x: Tensor) -> Tensor:
        wide = x.double()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.double() * wide).to(x.dtype)

    engine = with_norms(monkeypatch, precision, in_float64)
    data = rows(20, 30, 17, 60)
    line = proven_kernels(engine, data)
    assert line.startswith("self-check passed: liger's kernels (5 norms) and the model's own modules agree")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_kernel_of_a_wrong_norm_is_found(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """The mutation: Gemma's norm, whose weight is 1 + w."""

    def offset(self: Any, x: Tensor) -> Tensor:
        return LlamaRMSNorm.forward(self, x) * 2  # the weights are 1

    engine = with_norms(monkeypatch, precision, offset)
    data = rows(20, 30, 17, 60)
    with pytest.raises(SpecError) as error:
        proven_kernels(engine, data)
    (problem,) = error.value.problems
    assert problem.where == "model.kernels" and problem.message.endswith("set it to torch")
    line = proven_kernels(engine, data, may_fall_back=True)
    assert line.startswith("kernels: the model's own modules, since with Liger's a token's loss is ")
    assert not kernels.fused_modules(engine.policy.causal_lm)


# --- attention in one call ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_varlen_attention_passes(precision: str) -> None:
    before = len(varlen_on_cpu.calls)
    prove(scores(precision, VARLEN), rows(20, 30, 17, 25, 60), precision)
    prove(scores(precision, VARLEN), pairs(*REAL), precision)
    assert {4, 6} <= set(varlen_on_cpu.calls[before:])  # rows; answers that share their prompt


@pytest.mark.parametrize(("key", "mutation", "shared", "message"), [
    ("cu_seq_lens", lambda ends: ends[[*range(len(ends) - 2), -1]], False,
     "changes with another row of its pack"),
    ("cu_seq_lens", lambda ends: ends + (ends == ends[1]).int(), False,
     "changes with another row of its pack"),
    (KEY_INDEX, lambda index: (index - 1).clamp(min=0), True, "alone|changes with the other answer"),
    (KEY_INDEX, lambda index: index.flip(0), True, "alone|changes with the other answer"),
])  # fmt: skip
def test_wrong_border_of_varlen_attention_is_found(
    monkeypatch: pytest.MonkeyPatch, key: str, mutation: Any, shared: bool, message: str
) -> None:
    monkeypatch.setitem(LLAMA, "initializer_range", 0.5)
    of = attention.packed_keywords

    def mutated(*given: Any) -> Any:
        return {n: mutation(tensor) if n.startswith(key) else tensor for n, tensor in of(*given).items()}

    monkeypatch.setattr(attention, "packed_keywords", mutated)
    with pytest.raises(SpecError, match=f"({message}).*set it to false, or model.attention to sdpa"):
        prove(scores(attention=VARLEN), pairs(*REAL) if shared else rows(20, 30, 17, 25, 60))


class SplitScores(Scores):
    """Of one of two ranks that split rows."""

    def __init__(self, ranks: Threads, precision: str) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        super().__init__(build_model(Model(from_config=LLAMA), FACTS, 3, dtype).eval())
        attend_per_segment(self.policy.causal_lm, "auto", 64, exchange=ranks)
        self.ranks = ranks

    @torch.no_grad()
    def score(self, micro_batches: Sequence[MicroBatch]) -> tuple[Tensor, ...]:
        self.given += micro_batches
        return tuple(self.ranks.scored(self.policy, batch) for batch in micro_batches)


def prove_split(monkeypatch: pytest.MonkeyPatch, precision: Any = "fp32") -> list[str]:
    ranks, data = Threads(2, monkeypatch), rows(20, 31, 17, 25, 60)
    engines = [SplitScores(ranks, precision) for _ in range(2)]

    def check(number: int) -> str:
        engine, world = engines[number], ALONE
        line = check_split(engine, engine.policy, data, world, precision, 0)  # type: ignore[arg-type]
        check_packing(engine, engine.policy, data, world, precision, 0)  # type: ignore[arg-type]
        return line

    return ranks.run(check)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_split_rows_pass_padded_and_packed(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    one, other = prove_split(monkeypatch, precision)
    assert one == other and one.startswith("self-check passed: split and whole rows agree to ")


def test_layer_mixing_tokens_is_found_with_split_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation: each token gets something of the one before it, where its rank has that."""
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: F.pad(hidden, (0, 0, 1, -1)))
    with pytest.raises(
        SpecError, match="parallel.sequence_parallel: the loss of a split row is .* whole one"
    ):
        prove_split(monkeypatch)


def test_lost_positions_are_found_with_split_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> MicroBatch:
        part = part_of(*arguments)
        return replace(part, tokens=part.tokens._replace(position_ids=part.tokens.position_ids * 0))

    monkeypatch.setattr(sequence, "part_of", wrong)
    monkeypatch.setitem(LLAMA, "initializer_range", 0.5)
    with pytest.raises(SpecError, match="parallel.sequence_parallel: "):
        prove_split(monkeypatch)
