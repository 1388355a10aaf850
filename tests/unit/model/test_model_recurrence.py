"""Recurrent layers over packed rows: against transformers' own unpacked model, neighbor by neighbor, and what
is refused."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from dsft.data.steps.batch import NO_TARGET, Segments
from dsft.errors import SpecError
from dsft.model import recurrence
from dsft.model.attention import (
    attend_per_segment,
    check_can_compile,
    check_can_pack,
    keywords_of,
    use,
)
from dsft.model.attention_choice import VARLEN
from dsft.model.census import take_census
from dsft.model.config import TokenFacts
from dsft.model.older import checkpoint_activations
from dsft.model.policy import Policy, target_logps
from dsft.model.recurrence import CHUNK, SEGMENT_ROWS, recurrent_layers, segment_rows
from dsft.plan.census import census_from
from dsft.plan.memory.layer import activations
from dsft.spec.schema import Model
from tests import varlen_on_cpu
from tests.make import logps_of
from tests.selected import tiered
from tests.specs import minimal_spec

LENGTHS = (7, 70, CHUNK, 1, 13)  # one of them of two chunks
TOKENS = sum(LENGTHS)
SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"num_key_value_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "qwen3_next": {},
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "kimi_linear": LATENT,
    "bailing_hybrid": LATENT,
}
USUAL = ("qwen3_5_text", "qwen3_next", "kimi_linear", "lfm2")
"""The others have the layers of one of these."""


def small(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    keys = {name: value for name, value in (SMALL | KINDS.get(kind, {})).items() if name in known}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_class(**keys))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


def drawn(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [torch.randint(3, 97, (1, length)) for length in lengths]


def positions(lengths: tuple[int, ...] = LENGTHS) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def score(policy: Policy, rows: list[Tensor], lengths: tuple[int, ...] | None = LENGTHS) -> Tensor:
    """(1, T): every token is a target of the one before it, a segment's first of its last."""
    targets = torch.cat([row.roll(-1, 1) for row in rows], 1)
    logps: Tensor = logps_of(policy, torch.cat(rows, 1), positions(), targets, lengths)
    return logps


def score_alone(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    """By transformers alone: no packing, no padding, no head of dsft's."""
    return torch.cat([target_logps(model(row).logits, row.roll(-1, 1)) for row in rows], 1)


def assert_equal_gradients(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """To 3e-5 of the largest: terms of the decay's gradients cancel, and transformers' own padded rows differ
    as much from single ones (1.9e-5)."""
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=3e-5 * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize(("kind", "attention", "checkpointing"), [
    *((kind, "auto", False) for kind in USUAL),
    *(pytest.param(kind, "auto", False, marks=pytest.mark.long) for kind in KINDS if kind not in USUAL),
    ("qwen3_5_text", "eager", False),
    ("qwen3_5_text", "auto", True),
    ("kimi_linear", "auto", True),
])  # fmt: skip
def test_packed_equals_alone(kind: str, attention: str, checkpointing: bool) -> None:
    """Log-probabilities and the gradients of all parameters."""
    model = small(kind)
    own = copy.deepcopy(model)
    if attention == "eager":
        model.set_attn_implementation("eager")
    if checkpointing:
        checkpoint_activations(model)
        model.train()
    attend_per_segment(model, attention, max_length=256)
    rows, weights = drawn(), torch.randn(1, TOKENS)
    found = score(Policy(model), rows)
    gradients = torch.autograd.grad((found * weights).sum(), list(model.parameters()), allow_unused=True)
    expected = score_alone(own, rows)
    alone = torch.autograd.grad((expected * weights).sum(), list(own.parameters()), allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=5e-6)
    assert_equal_gradients(gradients, alone)


@pytest.mark.parametrize("kind", tiered(KINDS, USUAL))
def test_other_segments_change_nothing(kind: str) -> None:
    """All rows of a pack but one are replaced, token by token: its log-probabilities do not move at all. And
    their embeddings get no gradient from it, not the smallest."""
    model = small(kind)
    attend_per_segment(model, "auto", max_length=256)
    policy, rows = Policy(model), drawn()
    with torch.no_grad():
        before = score(policy, rows).split(LENGTHS, 1)
        for kept in range(len(rows)):
            others = [row if at == kept else (row - 2) % 94 + 3 for at, row in enumerate(rows)]
            assert torch.equal(score(policy, others).split(LENGTHS, 1)[kept], before[kept])
    embedded: list[Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda *given: embedded.append(given[-1]))
    scored = score(policy, rows).split(LENGTHS, 1)
    for kept, logps in enumerate(scored):
        (gradient,) = torch.autograd.grad(logps.sum(), embedded[0], retain_graph=True)
        found = [bool(part.any()) for part in gradient.split(LENGTHS, 1)]
        assert found == [at == kept for at in range(len(rows))]


PAIRS = ((6, 5, 3), (1, 4, 7), (60, 10, 70), (90, 9, 1))  # tokens of a prompt and of its two answers


@pytest.mark.parametrize("kind", tiered(KINDS, USUAL))
def test_a_shared_prompt_equals_two_rows(kind: str) -> None:
    """Two answers continue one state: log-probabilities and gradients are those of the two whole rows."""
    model = small(kind)
    own = copy.deepcopy(model)
    attend_per_segment(model, "auto", max_length=256)
    ids, targets, whole, segments = list[Tensor](), list[Tensor](), list[Tensor](), list[tuple[int, int]]()
    for prompt, *answers in PAIRS:
        asked = torch.randint(3, 97, (1, prompt))
        both = [torch.cat((asked, torch.randint(3, 97, (1, answer))), 1) for answer in answers]
        whole += both
        for start, row in zip((0, prompt - 1), both, strict=True):
            aimed = row.roll(-1, 1)
            aimed[:, : prompt - 1] = aimed[:, -1] = NO_TARGET
            ids.append(row[:, start:])
            targets.append(aimed[:, start:])
            segments.append((row.shape[1] - start, start))
    lengths, starts = zip(*segments, strict=True)
    at = torch.cat([torch.arange(start, start + length) for length, start in segments])[None]
    packed = logps_of(Policy(model), torch.cat(ids, 1), at, torch.cat(targets, 1), lengths, starts=starts)
    found = torch.stack([part.sum() for part in packed.split(lengths, 1)])
    prompts = [prompt for prompt, *_ in PAIRS for _ in range(2)]
    expected = torch.stack(
        [
            target_logps(own(row).logits, row.roll(-1, 1))[:, prompt - 1 : -1].sum()
            for row, prompt in zip(whole, prompts, strict=True)
        ]
    )
    weights = torch.randn(len(whole))
    gradients = torch.autograd.grad(found @ weights, list(model.parameters()), allow_unused=True)
    alone = torch.autograd.grad(expected @ weights, list(own.parameters()), allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5)
    assert_equal_gradients(gradients, alone)


@pytest.mark.parametrize("kind", tiered(KINDS, USUAL))
def test_padded_rows_equal_single_ones(kind: str) -> None:
    """transformers' layers without an attention mask: what comes after a row changes nothing in it."""
    model = small(kind)
    rows, longest = drawn(), max(LENGTHS)
    padded = [torch.nn.functional.pad(row, (0, longest - row.shape[1]), value=5) for row in rows]
    at = torch.arange(longest).repeat(len(rows), 1)
    logits = model(torch.cat(padded), position_ids=at).logits
    together = torch.cat(
        [target_logps(logits[n : n + 1, : row.shape[1]], row.roll(-1, 1)) for n, row in enumerate(rows)],
        1,
    )
    alone, weights = score_alone(model, rows), torch.randn(1, TOKENS)
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=5e-6)
    gradients, expected = (
        torch.autograd.grad((logps * weights).sum(), list(model.parameters()), allow_unused=True)
        for logps in (together, alone)
    )
    assert_equal_gradients(gradients, expected)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear"])
def test_bf16_packed_is_as_accurate_as_single_rows(kind: str) -> None:
    """Packed rows in bf16 are no farther from float32 than the same rows alone in bf16."""
    rows, model = drawn(), small(kind).bfloat16()
    with torch.no_grad():
        exact, alone = (score_alone(one, rows) for one in (small(kind), model))
        attend_per_segment(model, "auto", max_length=256)
        packed = score(Policy(model), rows)
    assert float((packed - exact).norm()) <= 1.2 * float((alone - exact).norm())


@pytest.mark.parametrize("attention", ["auto", VARLEN])
def test_segments_are_read_from_the_positions_too(attention: str) -> None:
    """With attention in one call as well, whose borders do not reach the recurrent layers."""
    model = small("qwen3_5_text")
    attend_per_segment(model, "auto", max_length=256)
    policy, rows, before = Policy(model), drawn(), len(varlen_on_cpu.calls)
    expected = score(policy, rows)
    if attention == VARLEN:
        use(model, VARLEN)
    torch.testing.assert_close(score(policy, rows, None), expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(score(policy, rows), expected, rtol=0, atol=5e-6)
    assert len(varlen_on_cpu.calls) - before == (2 if attention == VARLEN else 0)


def test_arguments_of_recurrent_layers() -> None:
    """Rows of one number of chunks are in one batch; padding repeats the row's last token."""
    found = segment_rows(Segments((2, 70, 3)), torch.device("cpu"))
    short, long = found.batches
    assert short.tolist() == [[0, 1, 1], [72, 73, 74]]
    assert long.tolist() == [list(range(2, 72))]
    assert found.places.tolist() == [0, 1, *range(6, 76), 3, 4, 5]
    shared = segment_rows(Segments((4, 2, 3), (0, 3, 1)), torch.device("cpu"))
    assert shared.batches[0].tolist() == [[0, 1, 2, 3, 3], [0, 1, 2, 4, 5], [0, 6, 7, 8, 8]]
    assert shared.places.tolist() == [0, 1, 2, 3, 8, 9, 11, 12, 13]
    assert segment_rows(Segments((9,)), torch.device("cpu")) is None
    model = small("qwen3_5_text")
    assert SEGMENT_ROWS not in keywords_of(model, positions(), Segments(LENGTHS)), (
        "before it is made packable"
    )
    attend_per_segment(model, "auto", max_length=256)
    assert keywords_of(model, positions().expand(2, -1), None) == {}, "padded rows"


def test_transformers_classes_are_unchanged() -> None:
    """Another model of the class, not made packable, computes by transformers' own functions."""
    changed, own = small("qwen3_5_text"), small("qwen3_5_text")
    attend_per_segment(changed, "auto", max_length=256)
    kinds = {type(module) for module in own.modules()}
    assert {type(module) for module in changed.modules()} - kinds
    assert all(kind.__module__.startswith(("torch.", "transformers.")) for kind in kinds)
    assert changed.state_dict().keys() == own.state_dict().keys()


def test_the_borders_reach_no_kernel() -> None:
    """fla and causal_conv1d would take cu_seqlens and seq_idx for those of the packed row."""
    given = list[dict[str, Any]]()

    def kernel(*tokens: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        given.append(keywords)
        return tokens[0], None

    borders = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = segment_rows(Segments((2, 3)), torch.device("cpu"))
    for name in recurrence.RECURRENCES:
        mixed = recurrence._per_segment(name, kernel)
        for at in (rows, None):
            keywords = {"cu_seqlens": borders, "seq_idx": borders, "segment_rows": at, "chunk_size": 64}
            output, _ = mixed(torch.arange(5.0).view(1, 5, 1), g=torch.ones(1, 5, 1), **keywords)
            assert output.flatten().tolist() == [0, 1, 2, 3, 4]
            assert given[-1].keys() == {"g", "chunk_size"}
            assert given[-1]["g"].shape == ((2, 3, 1) if at else (1, 5, 1))


def test_packed_rows_are_not_compiled() -> None:
    model = small("qwen3_5_text")
    line = attend_per_segment(model, "auto", max_length=256)
    use(model, VARLEN)  # as on a GPU
    with pytest.raises(SpecError, match="model.compile: true, but .* would be compiled again for each row"):
        check_can_compile(model, line)


@pytest.mark.parametrize(
    "kind", ["bamba", "falcon_mamba", "jamba", "mamba2", "recurrent_gemma", "rwkv", "zamba2"]
)
def test_other_recurrences_are_refused(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    assert "linear_attention" not in recurrent_layers(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    with pytest.raises(SpecError, match=f"data.packing: a {kind} model cannot be packed: .*recurrent layers"):
        check_can_pack(config, 64)


@pytest.mark.parametrize(
    ("kind", "message"), [("minimax", "linear_attention"), ("qwen4_exp_text", "indexed_attention")]
)
def test_other_layers_are_refused(kind: str, message: str) -> None:
    """Another linear attention, and another layer beside a gated delta rule."""
    with pytest.raises(SpecError, match=f"has layers of type {message}, which see"):
        check_can_pack(CONFIG_MAPPING[kind](), 64)


def test_recurrent_models_are_recognized() -> None:
    assert recurrence.mix_per_segment(small("qwen3_5_text"))
    assert not recurrence.mix_per_segment(AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**SMALL)))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_next", "bailing_hybrid"])
def test_plan_counts_backward_memory_of_recurrent_layers(kind: str, tmp_path: Path) -> None:
    """Compared with the storages that autograd really saves in a layer on the CPU, without its parameters."""
    keys = SMALL | {"hidden_size": 128, "intermediate_size": 256, "layer_types": ["linear_attention"] * 3}
    keys |= {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_head_dim": 64}
    config = CONFIG_MAPPING[kind](**keys | KINDS[kind])
    config.save_pretrained(tmp_path)
    model = Model(name_or_path=str(tmp_path), kernels="torch")
    counted = census_from(take_census(model, TokenFacts(100, 1, 2, 0), cuts=False))
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        spec = minimal_spec(
            "sft", model=model, data={"train": [{"path": "rows.jsonl"}]}, train={"precision": precision}
        )
        layer = AutoModelForCausalLM.from_config(config, dtype=dtype).model.layers[0]
        hidden = torch.randn(1, 4 * CHUNK, 128, dtype=dtype, requires_grad=True)
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(hidden, position_embeddings=None)
        for parameter in layer.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        own = [parameter for parameter in counted.parameters if parameter.layer == 0]
        assert activations(own, 128, spec, 4 * CHUNK, 1).total == pytest.approx(saved, rel=0.1)
