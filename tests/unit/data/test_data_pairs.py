"""Preference pairs from their lines to micro-batches: formats, prompt check, truncation, ledger; each pair
occurs exactly once per step across ranks, packed or padded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsft.data.read.builtin import QUICKSTART, builtin_rows
from dsft.data.render.renderer import Renderer, pair_mistake
from dsft.data.render.template import choose_template
from dsft.data.rows import Rendered, Text
from dsft.data.sets.cut import CutOptions, CutRows, OnTooLong
from dsft.data.sets.dataset import Dataset, Example, Examples
from dsft.data.sets.load import RunData, load_data
from dsft.data.steps.batch import NO_TARGET, MicroBatch, Segments
from dsft.data.steps.steps import TrainSteps, evaluation, longest_micro_batch
from dsft.data.tokenizer.load import byte_level_tokenizer, load_tokenizer
from dsft.errors import DataError
from dsft.spec.batch import BatchSizes, batch_sizes
from dsft.spec.files import CHAT_TEMPLATES
from dsft.spec.schema import Data, Dpo, Model, Source, Train
from tests.unit.data.token_rows import FakeRows, cut_all_pairs, spec_of

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token
SHARED = Path(__file__).parents[4] / "shared" / "data"


def load(tmp_path: Path, *rows: object, tokenizer: Any = TOKENIZER, **keys: Any) -> RunData:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = Source(path=str(path), **{key: keys.pop(key) for key in ("max_rows",) if key in keys})
    data = Data(train=(source,), **{"max_length": 1024, **keys})
    return load_data(spec_of("dpo", data), tokenizer)


def shown(example: Example, tokenizer: Any = TOKENIZER) -> list[tuple[str, str]]:
    """Of each answer: what is before the first trained token, and what is trained on."""
    borders = np.cumsum(example.segment_lengths)[:-1]
    answers = zip(np.split(example.input_ids, borders), np.split(example.trained, borders), strict=True)
    return [
        (tokenizer.decode(ids[: int(np.argmax(trained))]), tokenizer.decode(ids[trained]))
        for ids, trained in answers
    ]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def chatml(*turns: dict[str, str]) -> str:
    talk = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    return f"{talk}<|im_start|>assistant\n"


# --- formats ----------------------------------------------------------------------------------------------

TALK = (system("Be brief."), user("1+1?"), assistant("2"), user("2+2?"))
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "2"},
    {"from": "human", "value": "2+2?"},
]
FORMATS = {
    "strings": (
        {"prompt": "2+2=", "chosen": "4", "rejected": "five"},
        ("2+2=", f"4{END}", f"five{END}"),
    ),
    "strings that begin alike": (
        {"chosen": "Human: 2+2?\n\nAssistant: four", "rejected": "Human: 2+2?\n\nAssistant: five"},
        ("Human: 2+2?\n\nAssistant:", f" four{END}", f" five{END}"),
    ),
    "a string that begins with the other": (
        {"chosen": "2 + 2 = 4", "rejected": "2 + 2 ="},
        ("2 + 2", f" = 4{END}", f" ={END}"),
    ),
    "messages": (
        {"prompt": TALK, "chosen": [assistant("4")], "rejected": [assistant("five")]},
        (chatml(*TALK), f"4{END}", f"five{END}"),
    ),
    "an implicit prompt": (
        {"chosen": [*TALK, assistant("4")], "rejected": [*TALK, assistant("five")]},
        (chatml(*TALK), f"4{END}", f"five{END}"),
    ),
    "sharegpt": (
        {
            "conversations": SHAREGPT,
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "five"},
        },
        (chatml(*TALK), f"4{END}", f"five{END}"),
    ),
    "a column of the system message": (
        {"system": "Be brief.", "prompt": [user("2+2?")], "chosen": "4", "rejected": "five"},
        (chatml(TALK[0], user("2+2?")), f"4{END}", f"five{END}"),
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_gives_one_prompt_and_two_answers(tmp_path: Path, name: str) -> None:
    row, (prompt, chosen, rejected) = FORMATS[name]
    train = load(tmp_path, row).train
    (example,) = train
    assert shown(example) == [(prompt, chosen), (prompt, rejected)]
    assert train.source(0).endswith("a.jsonl:1")


def test_strings_that_begin_alike_are_no_prompt_and_answer_for_sft(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(FORMATS["strings that begin alike"][0]) + "\n", encoding="utf-8")
    data = Data(train=(Source(path=str(path), format="preference"),))
    with pytest.raises(DataError, match='are strings without a "prompt"'):
        load_data(spec_of("sft", data), TOKENIZER)


@pytest.mark.parametrize("template", sorted(CHAT_TEMPLATES))
def test_each_template_of_ours_writes_one_prompt(tmp_path: Path, template: str) -> None:
    tokenizer = byte_level_tokenizer()
    ends = ["</s>", "<end_of_turn>", "<|eot_id|>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|end|>"]
    more = ["<｜end▁of▁sentence｜>", "[gMASK]", "<sop>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": [*ends, *more]})
    choose_template(tokenizer, template)
    row = {"prompt": TALK[1:], "chosen": [assistant("four")], "rejected": [assistant("five")]}
    (example,) = load(tmp_path, row, tokenizer=tokenizer).train
    (prompt, chosen), (same, rejected) = shown(example, tokenizer)
    assert prompt == same and chosen.replace("four", "five") == rejected != chosen


def test_answers_of_several_turns_are_trained_on_but_for_what_is_asked(tmp_path: Path) -> None:
    talk = [user("a?"), assistant("b"), user("c?"), assistant("d")]
    row = {"chosen": talk, "rejected": [user("a?"), assistant("x"), user("c?"), assistant("y")]}
    (example,) = load(tmp_path, row).train
    (prompt, chosen), (same, rejected) = shown(example)
    assert prompt == same == chatml(user("a?"))
    assert (chosen, rejected) == (f"b{END}d{END}", f"x{END}y{END}")
    (example,) = load(tmp_path, {**row, "rejected": [*talk[:3], assistant("y")]}, train_on="last").train
    assert shown(example) == [(chatml(*talk[:3]), f"d{END}"), (chatml(*talk[:3]), f"y{END}")]


def test_the_part_of_an_answer_that_is_not_trained_on_may_not_differ(tmp_path: Path) -> None:
    chosen, rejected = ([user("a?"), assistant(one), user("c?"), assistant("d")] for one in ("b", "x"))
    with pytest.raises(DataError, match=r"a.jsonl:1: the prompts of the two answers differ: \d+"):
        load(tmp_path, {"chosen": chosen, "rejected": rejected}, train_on="last")


def test_tools_are_in_both_answers(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    row = {"prompt": [user("2+2?")], "chosen": "4", "rejected": "five", "tools": [tool]}
    tokenizer = byte_level_tokenizer()
    choose_template(tokenizer, "qwen2_5")
    (example,) = load(tmp_path, row, tokenizer=tokenizer).train
    (prompt, _), (same, _) = shown(example)
    assert prompt == same and '"add"' in prompt


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Tokenizers that write a space before the first word, and join it to words."""
    folder = tmp_path_factory.mktemp("models")
    lines = [message["content"] for row in builtin_rows(QUICKSTART) for message in row["messages"]][:600]
    made = {}
    for kind in ("bpe", "unigram"):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_prefix=str(folder / kind), model_type=kind, vocab_size=300,
            hard_vocab_limit=False, minloglevel=2, num_threads=1,
        )  # fmt: skip
        made[kind] = load_tokenizer(folder / f"{kind}.model")
    return made


WORDS = st.lists(
    st.sampled_from(["What", " is", "the", " capital", " ", "  ", "\n", "of", "4", " 4", "?"]),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@settings(max_examples=40, deadline=None)
@given(prompt=WORDS, answers=st.tuples(WORDS, WORDS))
def test_strings_of_pieces_that_join_words(
    pieces: dict[str, Any], kind: str, prompt: list[str], answers: tuple[list[str], list[str]]
) -> None:
    tokenizer, asked = pieces[kind], "".join(["Name", *prompt])
    texts = ["".join([asked, *answer]) for answer in answers]
    samples = [Text(((asked, False), ("".join(answer), True))) for answer in answers]
    rows = Renderer(tokenizer).render(samples)
    whole = [row for row in rows if isinstance(row, Rendered)]
    if len(whole) < 2:
        assert any(
            "the last characters of the prompt and the first of the completion into one token" in str(row)
            for row in rows
        )
        return
    size = len(tokenizer(asked, add_special_tokens=True)["input_ids"])
    for row, text in zip(whole, texts, strict=True):
        assert row.input_ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        assert row.trained.tolist() == [False] * size + [True] * (len(row.input_ids) - size)
    mistake = pair_mistake(*whole)
    assert (mistake is None) == (whole[0].input_ids.tolist() != whole[1].input_ids.tolist())


@pytest.mark.skipif(not SHARED.exists(), reason="../shared/data is not beside this checkout")
@pytest.mark.parametrize("max_length", [1 << 16, 256])
def test_the_demo(max_length: int) -> None:
    given = json.loads((SHARED / "dpo_en_demo.json").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(SHARED / "tokenizer")
    source = Source(path=str(SHARED / "dpo_en_demo.json"), max_rows=40)
    data = Data(train=(source,), max_length=max_length, on_too_long="truncate")
    loaded = load_data(spec_of("dpo", data), tokenizer)
    total = loaded.account["train"]["total"]
    assert total["rows"] == 40 and total["used"] == len(loaded.train)
    for example in loaded.train:
        assert max(example.segment_lengths) <= max_length
        (prompt, chosen), (same, rejected) = shown(example, tokenizer)
        assert prompt == same and chosen != rejected
    if max_length > 256:
        answers = [shown(example, tokenizer) for example in loaded.train]
        ends = [[pair[answer]["value"] + END for answer in ("chosen", "rejected")] for pair in given[:40]]
        assert [[chosen, rejected] for (_, chosen), (_, rejected) in answers] == ends
    else:
        assert total["truncated"] > 10 and total["used"] + total["identical"] == 40


# --- the proof of the prompt ------------------------------------------------------------------------------


def rendered(ids: Sequence[int], prompt: int) -> Rendered:
    return Rendered(np.array(ids, np.int32), np.arange(len(ids)) >= prompt)


def test_a_pair_follows_the_same_tokens() -> None:
    chosen = rendered([1, 2, 3, 4], 2)
    assert pair_mistake(chosen, rendered([1, 2, 9], 2)) is None
    differs = pair_mistake(chosen, rendered([1, 7, 9], 2))
    assert "2 tokens before the chosen one and 2 before the rejected one, of which the first 1" in str(
        differs
    )
    longer = pair_mistake(chosen, rendered([1, 2, 9], 1))
    assert "2 tokens before the chosen one and 1 before the rejected one, of which the first 1" in str(longer)
    assert "the prompt is empty" in str(pair_mistake(rendered([1, 2], 0), rendered([1, 3], 0)))
    for one, other in ((0, 1), (1, 0)):
        assert "the prompt is empty" in str(pair_mistake(rendered([1, 2], one), rendered([1, 2], other)))
    assert pair_mistake(rendered([1, 2], 2), rendered([3, 4], 1)) is None  # nothing to train on: left out


def test_answers_that_are_the_same_are_refused_with_their_place(tmp_path: Path) -> None:
    assert "the same tokens" in str(pair_mistake(rendered([1, 2], 1), rendered([1, 2], 1)))
    with pytest.raises(DataError, match="a.jsonl:2: the chosen and the rejected answer are the same"):
        load(tmp_path, FORMATS["strings"][0], strings("a?", "b", "b"))


# --- truncation -------------------------------------------------------------------------------------------

BOS = 1


def row_of(
    ids: Sequence[int], prompt: int, skipped: frozenset[int] = frozenset()
) -> tuple[list[int], list[bool]]:
    return list(ids), [t >= prompt and t not in skipped for t in range(len(ids))]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], frozenset[int]]:
    """Prompt, chosen, rejected, and positions of the rows that are not trained on behind the first target."""
    token = st.integers(2, 5)
    head = [BOS] if draw(st.booleans()) else []
    prompt = [*head, *draw(st.lists(token, min_size=1 - len(head), max_size=12))]
    answers = [draw(st.lists(token, min_size=1, max_size=12)) for _ in range(2)]
    skipped = draw(st.frozensets(st.integers(len(prompt) + 1, 24), max_size=3))
    return prompt, *answers, skipped


def part_of(rows: FakeRows, max_length: int, how: OnTooLong, share: bool = False) -> tuple[CutRows, Examples]:
    made = cut_all_pairs(rows, CutOptions(max_length, how, BOS, share))
    return made, made.examples


def prompts_of(part: Examples) -> list[int]:
    """Tokens of the prompt of each pair: those before the first target."""
    return [int(np.argmax(part.read(index).trained)) for index in range(len(part))]


@settings(max_examples=100, deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=4), st.integers(2, 20))
def test_truncated_answers_stay_comparable(given_pairs: list[Any], max_length: int) -> None:
    rows = [
        row_of([*prompt, *answer], len(prompt), skipped)
        for prompt, chosen, rejected, skipped in given_pairs
        for answer in (chosen, rejected)
    ]
    made, part = part_of(FakeRows(rows), max_length, "truncate")
    kept = dict(zip((part.row_ids // 2).tolist(), range(len(part)), strict=True))
    prompts = prompts_of(part)
    for number, (prompt, *answers, skipped) in enumerate(given_pairs):
        whole = [row_of([*prompt, *answer], len(prompt), skipped) for answer in answers]
        fits = all(len(ids) <= max_length for ids, _ in whole)
        assert (number in made.noted["truncated"]) == (not fits)
        if number not in kept:
            assert number in made.left_out["identical"] and not fits
            continue
        example = part.read(kept[number])
        border = example.segment_lengths[0]
        ids = example.input_ids[:border].tolist(), example.input_ids[border:].tolist()
        trained = example.trained[:border].tolist(), example.trained[border:].tolist()
        size = prompts[kept[number]]
        assert ids[0][:size] == ids[1][:size] and max(map(len, ids)) <= max_length
        assert ids[0] != ids[1] or answers[0] == answers[1]
        begins = [BOS, *prompt[len(prompt) - size + 1 :]] if prompt[0] == BOS and size > 1 else prompt[-size:]
        assert ids[0][:size] == begins
        assert size == len(prompt) or size >= max(1, max_length // 4)
        limit = max_length - size
        for one, mask, answer, (_, mask_of_all) in zip(ids, trained, answers, whole, strict=True):
            assert one[size:] == answer[: len(one) - size] and len(one) - size == min(len(answer), limit)
            assert mask == [False] * size + mask_of_all[len(prompt) :][: len(one) - size]
        assert fits or max(map(len, ids)) == max_length
        assert (
            fits or size == len(prompt) or limit >= max(map(len, answers)) or size == max(1, max_length // 4)
        )
        targets = [sum(mask[1:]) for mask in trained]
        assert part.targets[kept[number]].tolist() == targets
    unended = set(made.noted["without_end"].tolist())
    for number, at in kept.items():
        prompt, *answers, _ = given_pairs[number]
        is_cut = (part.sizes[at] - prompts[at]).tolist() != list(map(len, answers))
        assert (number in unended) == is_cut
    lost = sum(
        2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected, _ in given_pairs
    ) - int(part.lengths.sum())
    identical = [given_pairs[number] for number in made.left_out["identical"]]
    equal = sum(2 * len(prompt) + len(one) + len(other) for prompt, one, other, _ in identical)
    assert made.truncated_tokens <= lost <= made.truncated_tokens + equal


@settings(max_examples=60, deadline=None)
@given(st.lists(pairs(), min_size=1, max_size=4), st.integers(2, 20), st.booleans())
def test_a_shared_prompt_occurs_once(given_pairs: list[Any], max_length: int, truncates: bool) -> None:
    rows = [
        row_of([*prompt, *answer], len(prompt), skipped)
        for prompt, chosen, rejected, skipped in given_pairs
        for answer in (chosen, rejected)
    ]
    how: OnTooLong = "truncate" if truncates else "error"
    max_length = max_length if truncates else 10**6  # no pair is dropped
    source = FakeRows(rows)
    _, whole = part_of(source, max_length, how)
    _, shared = part_of(source, max_length, how, share=True)
    assert whole.digest == shared.digest and whole.target_counts.tolist() == shared.target_counts.tolist()
    for index, size in enumerate(prompts_of(whole)):
        one, other = whole.read(index), shared.read(index)
        border = one.segment_lengths[0]
        assert other.starts == (0, size - 1)
        assert other.segment_lengths == (border, one.segment_lengths[1] - size + 1)
        assert other.input_ids[:border].tolist() == one.input_ids[:border].tolist()
        assert other.input_ids[border:].tolist() == one.input_ids[border + size - 1 :].tolist()
        assert other.trained[border:].tolist() == one.trained[border + size - 1 :].tolist()
        for part, example in ((whole, one), (shared, other)):
            assert part.lengths[index] == len(example.input_ids)
            assert part.target_counts[index] == example.target_count
            segments = zip(example.segment_lengths, example.segment_starts, strict=True)
            assert part.squares[index] == sum(n * (n + start) for n, start in segments)
        assert whole.widths[index] == max(one.segment_lengths)


@pytest.mark.parametrize("share", [False, True])
def test_a_digest_is_that_which_checkpoints_and_stored_references_have(share: bool) -> None:
    rows = [row_of([BOS, *range(2, 9), answer], 8) for answer in (10, 11)]
    rows += [row_of([5, *range(2, 5 + n)], 2) for n in (1, 3)]
    _, part = part_of(FakeRows(rows), 5, "truncate", share)
    assert part.digest == "562ed52f5798d2967896aa51e590a77c0a9db6a91d5f1532da0bec55b0076377"
    assert part.extent(0) == "10 of 18 tokens kept, token 0 and those from token 5 on"
    assert part.extent(1) == "9 of 12 tokens kept, from token 1 on" and part.lost.tolist() == [8, 3]


def test_a_pair_is_dropped_whole(tmp_path: Path) -> None:
    rows = FakeRows([row_of(range(2, n), 2) for n in (6, 9, 6, 7, 12, 6)])
    made, part = part_of(rows, 5, "drop")
    assert made.left_out["dropped"].tolist() == [0, 2]
    assert part.lengths.tolist() == [4 + 5]


# --- the account ------------------------------------------------------------------------------------------


def strings(prompt: str, chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_the_account_counts_pairs(tmp_path: Path) -> None:
    rows = [
        strings("a?", "b", "c"),
        strings("a?", "same", "same"),
        strings("a?", "b", "c"),
        strings("a?", "", "c"),
        strings("long? " * 9, "x" * 40 + "1", "x" * 40 + "2"),
        strings("long? " * 9, "y", "z"),
    ]
    loaded = load(tmp_path, *rows, on_bad_row="drop", on_too_long="truncate", max_length=32)
    total = loaded.account["train"]["total"]
    kept = (
        "rows", "used", "bad", "identical", "duplicate", "truncated", "examples", "dropped", "without_end",
    )  # fmt: skip
    assert [total[name] for name in kept] == [6, 3, 2, 1, 1, 2, 3, 0, 0]
    assert total["example_tokens"] == int(loaded.train.lengths.sum())
    assert total["trained_tokens"] == int(loaded.train.target_counts.sum()) == 3 * 4
    (source,) = loaded.account["train"]["sources"].values()
    assert [place.rpartition("/")[2] for place in source["identical_pairs"]] == ["a.jsonl:5"]
    lines = [line.replace(f"{tmp_path}/", "") for line in loaded.lines]
    assert "data.train: left out a.jsonl:5: both answers are truncated to the same tokens" in lines
    assert lines[-1].startswith(
        f"data.train: 6 pairs gave 3 examples of {total['example_tokens']:,} tokens, 12 of them trained on. "
    )
    for what in (
        "2 pairs were bad and dropped.",
        "2 pairs were truncated.",
        "1 pair was left out, with both answers truncated to the same tokens.",
        "1 pair repeats an earlier pair.",
    ):
        assert what in lines[-1]


def test_what_is_left_out_counts_against_the_limit(tmp_path: Path) -> None:
    rows = [strings("a?", "b", "c"), strings("a?", "x" * 40, "x" * 41)]
    short: dict[str, Any] = {"max_length": 16, "on_too_long": "truncate"}
    with pytest.raises(
        DataError, match=r"1 of 2 pairs \(0.5\) are left out, the limit is 0.1; the first: .*:2"
    ):
        load(tmp_path, *rows, max_dropped_fraction=0.1, **short)
    with pytest.raises(
        DataError,
        match="1 pair was truncated. 1 pair was left out, with both answers truncated to the same",
    ):
        load(tmp_path, rows[1], **short)


def test_max_rows_and_held_out_are_pairs(tmp_path: Path) -> None:
    rows = [strings(f"{number}?", "b", "c") for number in range(40)]
    loaded = load(tmp_path, *rows, max_rows=31, eval_count=7)
    assert (len(loaded.train), len(loaded.held_out[0].data)) == (24, 7)
    both = [*loaded.train, *loaded.held_out[0].data]
    prompts = [shown(example)[0][0] for example in both]
    assert sorted(prompts) == sorted(f"{number}?" for number in range(31))
    assert all(len(example.segment_lengths) == 2 for example in both)


def test_a_shared_prompt_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(strings("a?", "b", "c")) + "\n", encoding="utf-8")
    data = Data(train=(Source(path=str(path)),), packing=True)
    for share in (False, True):
        keys = {"dpo": Dpo.model_construct(share_prompts=share), "model": Model.model_construct()}
        loaded = load_data(spec_of("dpo", data).model_copy(update=keys), TOKENIZER)
        assert ("computed once for both answers" in loaded.lines[-1]) == share
        assert loaded.account["settings"]["share_prompts"] == share
        assert loaded.account["train"]["total"]["example_tokens"] == (7 if share else 8)


def test_a_mixture_counts_pairs(tmp_path: Path) -> None:
    sources = []
    for name, count in (("a", 3), ("b", 9)):
        path = tmp_path / f"{name}.jsonl"
        rows = [json.dumps(strings(f"{name}{number}?", "b", "c")) + "\n" for number in range(count)]
        path.write_text("".join(rows), encoding="utf-8")
        sources.append(Source(path=str(path), weight=0.5))
    data = load_data(spec_of("dpo", Data(train=tuple(sources))), TOKENIZER).train
    step = TrainSteps(data, BatchSizes(12, 12, 1, 1, None), 0, 0, 0).step(0)
    assert {name: of.examples for name, of in step.sources.items()} == {"a": 6, "b": 6}
    assert (
        step.counts == {"examples": 12, "tokens": 48, "chosen_tokens": 24, "sequences": 24}
        and step.squared_lengths == 2 * 12 * 25
    )


def test_pairs_are_indexed_and_read_when_they_are_laid() -> None:
    source = FakeRows([row_of(range(2, n), 2) for n in (6, 9, 6, 7, 12, 6)])
    _, part = part_of(source, 99, "error")
    data = Dataset((part,), whole=True)
    assert data.fingerprint and data.counts["examples"].tolist() == [1, 1, 1] and source.reads == []
    assert len(data[1].input_ids) and data.source(1) == "a:2" and source.reads == [2, 3]


# --- laid -------------------------------------------------------------------------------------------------


def dataset(sizes: Sequence[tuple[int, int, int]], share: bool = False) -> Dataset:
    """Of (prompt, chosen, rejected) in tokens; no two pairs have a token in common."""
    rows = []
    for number, (prompt, *answers) in enumerate(sizes):
        for which, answer in enumerate(answers):
            first = 1000 * (number + 1)
            ids = [
                *range(first, first + prompt),
                *range(first + 400 * (which + 1), first + 400 * (which + 1) + answer),
            ]
            rows.append(row_of(ids, prompt))
    return Dataset((part_of(FakeRows(rows), 10**6, "error", share)[1],), whole=True)


SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


def answers_in(batch: MicroBatch) -> list[tuple[int, NDArray[Any], list[list[int]]]]:
    """Of each pair: its number, its counts, and the targets of both answers."""
    if batch.segments is None:
        rows = [row[row != NO_TARGET].tolist() for row in batch.tokens.targets]
    else:
        borders = np.cumsum(batch.segments.lengths)[:-1]
        rows = [row[row != NO_TARGET].tolist() for row in np.split(batch.tokens.targets[0].numpy(), borders)]
    ids, counts = batch.answers.ids.tolist(), batch.answers.num_targets.numpy()
    return [(ids[i], counts[i], rows[2 * i : 2 * i + 2]) for i in range(len(ids))]


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(["padded", "packed", "shared"]), st.integers(1, 3), st.integers(1, 3))
def test_every_pair_of_a_step_occurs_once_over_all_ranks(
    sizes: list[tuple[int, int, int]], way: str, ranks: int, micro: int
) -> None:
    data = dataset(sizes, way == "shared")
    budget = None if way == "padded" else max(int(data.lengths.max()), 40)
    batch = BatchSizes(micro * ranks * 2, micro, 2, ranks, budget)
    steps = [TrainSteps(data, batch, rank, seed=3, pad_id=0) for rank in range(ranks)]
    for index in range(steps[0].steps_per_epoch):
        assigned = [one.step(index) for one in steps]
        found = [
            pair
            for step in assigned
            for micro_batch in step.micro_batches
            for pair in answers_in(micro_batch)
        ]
        assert Counter(number for number, *_ in found) == Counter(assigned[0].example_ids)
        assert len({len(step.micro_batches) for step in assigned}) == 1
        for number, counts, (chosen, rejected) in found:
            first = 1000 * (number + 1)
            _, c, r = sizes[number]
            assert chosen == list(range(first + 400, first + 400 + c)) and counts.tolist() == [c, r]
            assert rejected == list(range(first + 800, first + 800 + r))
        assert assigned[0].counts == {
            "examples": len(found),
            "tokens": sum(map(len, (answer for *_, answers in found for answer in answers))),
            "chosen_tokens": sum(len(answers[0]) for *_, answers in found),
            "sequences": 2 * len(found),
        }
        for micro_batch in (one for step in assigned for one in step.micro_batches):
            assert budget is None or micro_batch.shape[1] <= budget
            assert micro_batch.answers is not None and micro_batch.answers.reference is None
            if budget is None and len(micro_batch.answers.ids):
                assert micro_batch.shape[0] == 2 * len(micro_batch.answers.ids) <= 2 * micro
    batches, counts = evaluation(data, batch, 0, 0)
    assert counts["examples"] == len(data) and len(batches)


def test_a_shared_prompt_is_looked_back_at() -> None:
    data = dataset([(3, 2, 4), (2, 1, 1)], share=True)
    (micro_batch,) = TrainSteps(data, BatchSizes(2, 2, 1, 1, 40), 0, 0, 0).step(0).micro_batches
    assert micro_batch.segments == Segments((5, 5, 3, 2), (0, 2, 0, 1))
    assert micro_batch.tokens.position_ids[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0, 1, 2, 1, 2]
    assert micro_batch.tokens.input_ids[0, 5:10].tolist() == [1002, 1800, 1801, 1802, 1803]
    assert micro_batch.tokens.targets[0, 4:10].tolist() == [NO_TARGET, 1800, 1801, 1802, 1803, NO_TARGET]


def test_a_rank_without_pairs_has_one_row_and_no_pair() -> None:
    data = dataset([(3, 2, 4)])
    for budget in (None, 40):
        batches = TrainSteps(data, BatchSizes(2, 1, 1, 2, budget), 1, 0, 0).step(0).micro_batches
        assert [batch.shape for batch in batches] == [(1, 2)]
        (pairs,) = (batch.answers for batch in batches)
        assert pairs is not None and pairs.ids.shape == (0,) and pairs.num_targets.shape == (0, 2)


@pytest.mark.parametrize("way", ["padded", "packed", "shared"])
def test_the_longest_micro_batch(way: str) -> None:
    sizes = [(9, 1, 9), (9, 9, 2), (1, 2, 8), (2, 2, 2), (5, 5, 5)]
    data = dataset(sizes, way == "shared")
    batch = BatchSizes(4, 2, 1, 2, None if way == "padded" else 64)
    longest = longest_micro_batch(data, batch, 0, 0, 20)
    steps = [TrainSteps(data, batch, rank, 0, 0).step(index) for rank in range(2) for index in range(20)]
    shapes = [one.shape for step in steps for one in step.micro_batches]
    size = longest.shape.numel()
    assert longest.shape == ((4, 18) if way == "padded" else (1, max(n for _, n in shapes)))
    assert all(shape.numel() <= size for shape in shapes)
    assert longest.answers is not None and longest.answers.ids.shape == longest.answers.num_targets.shape[:1]


@pytest.mark.parametrize("share", [False, True])
def test_the_longest_micro_batch_of_very_many_pairs(share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset([(9, 1, 9), (9, 9, 2), (1, 2, 8), (2, 2, 2), (5, 5, 5)], share)
    batch = BatchSizes(4, 2, 1, 2, 64)
    exact = longest_micro_batch(data, batch, 0, 0, 20)
    monkeypatch.setattr("dsft.data.steps.steps.SEARCH_LIMIT", 0)
    at_most = longest_micro_batch(data, batch, 0, 0, 20)
    assert at_most.shape.numel() >= exact.shape.numel()
    assert len(at_most.answers.ids) == len(at_most.answers.num_targets) == len(at_most.segments.lengths) // 2


@pytest.mark.parametrize("length", range(1, 16))
def test_the_first_part_has_the_pairs_of_which_both_answers_are_there(length: int) -> None:
    data = dataset([(3, 2, 4), (2, 1, 1)], share=True)
    (whole,) = TrainSteps(data, BatchSizes(2, 2, 1, 1, 40), 0, 0, 0).step(0).micro_batches
    part = whole.first(length)
    lengths, starts = part.segments.lengths, part.segments.starts
    assert starts is not None and sum(lengths) == part.shape[1] == length
    assert len(starts) == len(lengths) and len(part.answers.ids) == len(lengths) // 2
    positions = [start + i for start, n in zip(starts, lengths, strict=True) for i in range(n)]
    assert part.tokens.position_ids[0].tolist() == positions


def test_a_budget_holds_two_rows_of_each_pair() -> None:
    train, data = (
        Train(micro_batch_size=3, accumulation_steps=1),
        Data(train=(Source(path="a"),), max_length=50, packing=True),
    )
    assert batch_sizes(train, 1, data, "dpo").tokens_per_micro_batch == 300
    assert batch_sizes(train, 1, data, "sft").tokens_per_micro_batch == 150
