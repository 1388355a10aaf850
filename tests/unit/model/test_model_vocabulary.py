"""Embeddings that get new rows: the old rows as they were, the new ones their mean, on any rank and stage."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from dsft.data.tokenizer.load import add_tokens, byte_level_tokenizer, num_ids
from dsft.errors import MissingInputError
from dsft.model.build import Part, build_model
from dsft.model.config import TokenFacts, new_rows, resolve_config
from dsft.model.policy import Policy
from dsft.model.weights import Sharding
from dsft.plan.cut import Cut
from dsft.spec.schema import Model
from tests.unit.model.test_model_read import FACTS, change, save

LARGER = replace(FACTS, vocab_size=101)  # the folders have 96


def built(
    folder: Path, facts: TokenFacts, dtype: torch.dtype = torch.float32, keep: Sharding | None = None
) -> Policy:
    return build_model(Model(name_or_path=str(folder)), facts, 7, dtype, Part(sharding=keep or Sharding()))


def resized(held: Tensor, first: int, stop: int) -> Tensor:
    """The plain computation."""
    mean = held[:first].double().mean(0).float().to(held.dtype)
    rows = torch.cat([held, held.new_zeros(max(stop - len(held), 0), *held.shape[1:])])
    rows[first:stop] = mean
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "names"), [
    ("llama", ["model.embed_tokens.weight", "lm_head.weight"]),
    ("gpt2", ["transformer.wte.weight"]),
    ("phi", ["model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"]),
    ("gpt_neox", ["gpt_neox.embed_in.weight", "lm_head.weight"]),
])  # fmt: skip
def test_vocabulary_larger_than_the_embedding(
    kind: str, names: Sequence[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    before = save(tmp_path, kind, dtype).eval()
    found = built(tmp_path, LARGER, dtype).causal_lm.eval()
    assert found.config.vocab_size == 101
    for name, value in before.named_parameters():
        expected = resized(value, 96, 101) if name in names else value
        assert torch.equal(found.get_parameter(name), expected), name
    ids = torch.arange(24).view(2, 12)
    near = 0.1 if dtype == torch.bfloat16 else 1e-5  # a product of another shape is rounded otherwise
    torch.testing.assert_close(found(ids).logits[..., :96], before(ids).logits, rtol=0, atol=near)


@pytest.mark.parametrize(("vocab_size", "first_new", "rows", "message"), [
    (96, None, None, ""),
    (80, None, None, ""),
    (88, 86, (86, 88), "embeddings stay at 96 rows, of which some were spare: 2 new rows start from"),
    (97, 94, (94, 97), "resized from 96 to 97 tokens: 3 new rows start from the mean of the first 94"),
    (99, 98, (96, 99), "resized from 96 to 99 tokens: 3 new rows start from the mean of the first 96"),
    (97, None, (96, 97), "resized from 96 to 97 tokens: 1 new row starts from the mean of the first 96"),
])  # fmt: skip
def test_new_rows_are_found(
    vocab_size: int, first_new: int | None, rows: tuple[int, int] | None, message: str, tmp_path: Path
) -> None:
    before = save(tmp_path, tie_word_embeddings=True).get_input_embeddings().weight.detach()
    facts = replace(FACTS, vocab_size=vocab_size, first_new=first_new)
    found = new_rows(Model(name_or_path=str(tmp_path)), facts)
    assert (None if found is None else (found.first, found.stop)) == rows
    assert message in str(found or "")
    embedding = built(tmp_path, facts).causal_lm.get_input_embeddings()
    assert torch.equal(embedding.weight, resized(before, *rows) if rows else before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "first_new"), [(101, None), (95, 93), (99, 90)])
def test_ranges_together_equal_the_whole(
    dtype: torch.dtype, vocab_size: int, first_new: int | None, tmp_path: Path
) -> None:
    """To the last bit, whatever range a rank keeps."""
    save(tmp_path, "phi", torch.bfloat16)
    facts = replace(FACTS, vocab_size=vocab_size, first_new=first_new)
    whole = {name: p.flatten() for name, p in built(tmp_path, facts, dtype).causal_lm.named_parameters()}
    for ranks in (2, 3, 7):
        parts = [shares(tmp_path, facts, dtype, rank, ranks) for rank in range(ranks)]
        for name, expected in whole.items():
            assert torch.equal(torch.cat([part[name] for part in parts]), expected), name


def shares(folder: Path, facts: TokenFacts, dtype: torch.dtype, rank: int, ranks: int) -> dict[str, Tensor]:
    taken: dict[int, Tensor] = {}

    def span(numel: int) -> tuple[int, int]:
        return numel * rank // ranks, numel * (rank + 1) // ranks

    def take(parameter: nn.Parameter, part: Tensor | None) -> None:
        assert part is not None and parameter.untyped_storage().nbytes() <= 4
        taken[id(parameter)] = part

    policy = built(folder, facts, dtype, Sharding(span, take))
    return {name: taken[id(p)] for name, p in policy.causal_lm.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stages_hold_the_same_new_rows(tmp_path: Path, tied: bool) -> None:
    save(tmp_path, tie_word_embeddings=tied)
    whole = built(tmp_path, LARGER).named_trained()
    model = Model(name_or_path=str(tmp_path))
    for stage in (0, 1):
        part = build_model(model, LARGER, 7, torch.float32, Part(stage, Cut((1, 1))))
        assert ("model.embed_tokens.weight" in part.named_trained()) is (tied or stage == 0)
        for name, p in part.named_trained().items():
            assert torch.equal(p, whole[name]), name


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    before = save(tmp_path, tie_word_embeddings=True)
    for file in tmp_path.glob("model*"):
        file.unlink()
    torch.save(before.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.warns(UserWarning, match="every rank reads the whole model"):
        found = built(tmp_path, LARGER).causal_lm
    expected = resized(before.get_input_embeddings().weight, 96, 101)
    assert torch.equal(found.get_input_embeddings().weight, expected)


def test_embedding_size_must_match_the_config(tmp_path: Path) -> None:
    save(tmp_path, tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    change(tmp_path, lambda held: held | {name: held[name][:95]})
    with pytest.raises(MissingInputError, match=r"shape \[95, 32\] instead of \[101, 32\]"):
        built(tmp_path, LARGER)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_head_stored_in_the_file(equal: bool, tmp_path: Path) -> None:
    embedding = save(tmp_path, tie_word_embeddings=True).get_input_embeddings().weight.detach()
    head = embedding.clone() if equal else embedding + 1
    change(tmp_path, lambda held: held | {"lm_head.weight": head})
    if equal:
        found = built(tmp_path, LARGER).causal_lm
        assert torch.equal(found.get_output_embeddings().weight, resized(embedding, 96, 101))
    else:
        with pytest.raises(MissingInputError, match="differ, but config.json says that they are tied"):
            built(tmp_path, LARGER)


def test_resized_model_equals_transformers(tmp_path: Path) -> None:
    save(tmp_path / "before")
    found = built(tmp_path / "before", LARGER).causal_lm
    config = resolve_config(Model(name_or_path=str(tmp_path / "before")), LARGER)
    assert config.vocab_size == 101
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(found.state_dict())
    plain.save_pretrained(tmp_path / "after")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert torch.equal(again.get_output_embeddings().weight, found.get_output_embeddings().weight)


def test_tokens_are_added_once() -> None:
    tokenizer = byte_level_tokenizer()
    added = add_tokens(tokenizer, ("<a>", "<|im_end|>", "<b>", "<a>"))
    assert (added.new, added.present, added.first_id) == (("<a>", "<b>"), ("<|im_end|>",), 259)
    assert str(added) == "added <a>, <b>; <|im_end|> is already in the tokenizer"
    assert num_ids(tokenizer) == len(tokenizer) == 261
    assert tokenizer("x<a>y<b>")["input_ids"] == [120, 259, 121, 260]
    assert tokenizer.decode([120, 259], skip_special_tokens=True) == "x"
    again = add_tokens(tokenizer, ("<a>",))
    assert (again.new, again.first_id, num_ids(tokenizer)) == ((), None, 261)


def test_a_tokenizer_with_added_tokens_is_saved_and_read(tmp_path: Path) -> None:
    from dsft.data.tokenizer.load import load_tokenizer

    tokenizer = byte_level_tokenizer()
    add_tokens(tokenizer, ("<a>", "<b>"))
    tokenizer.save_pretrained(tmp_path)
    read = load_tokenizer(tmp_path)
    assert len(read) == 261 and read("x<b>")["input_ids"] == [120, 260]
    assert read.decode([260, 120], skip_special_tokens=True) == "x"
