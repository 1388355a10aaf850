"""Cuts of a text proved on its tokens: the short proof gives what whole prefixes give, for any tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.render.masks import MaskedText, TextSpan
from dsft.data.render.renderer import Renderer
from dsft.data.render.tokens import SampleEncoder
from dsft.data.rows import Conversation, Rendered, Text
from dsft.data.tokenizer.load import byte_level_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORDS = [
    "the cat", " sat", "  on\n\n", "a mat.", "é日本", "\n", " ", "cat the", "\t", "<", "|>", "’s", "1234",
]  # fmt: skip
SPECIALS = ["<s>", "<|a|>", "<|a|>b", "<b>", "<c>", "<d>", "<e>"]


def _added(name: str, **how: bool) -> Any:
    from tokenizers import AddedToken

    return AddedToken(name, **{"normalized": False, "special": True, **how})


def _wrapped(backend: Any) -> PreTrainedTokenizerBase:
    """With added tokens of every kind: one that begins as another does, and such as take white space."""
    from transformers import PreTrainedTokenizerFast

    how = {"<b>": {"rstrip": True}, "<c>": {"lstrip": True}, "<d>": {"normalized": True, "special": False}}
    backend.add_tokens([_added(name, **how.get(name, {})) for name in SPECIALS[:-1]])
    backend.add_tokens([_added("<e>", single_word=True)])
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=backend, bos_token="<s>", eos_token="<|a|>")  # type: ignore[no-any-return]


@cache
def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    corpus = ["".join(random.Random(i).choices(WORDS, k=20)) for i in range(200)]

    def trained(model: Any, trainer: Any, **parts: Any) -> Any:
        backend: Any = Tokenizer(model)
        for name, part in parts.items():
            setattr(backend, name, part)
        backend.train_from_iterator(corpus, trainer)
        return backend

    def bpe(**given: Any) -> Any:
        return trainers.BpeTrainer(vocab_size=400, show_progress=False, **given)

    letters = pre_tokenizers.ByteLevel.alphabet()
    spaces = {
        scheme: pre_tokenizers.Metaspace(prepend_scheme=scheme) for scheme in ("first", "always", "never")
    }
    legacy: Any = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backends = {
        "byte_level": trained(
            models.BPE(), bpe(initial_alphabet=letters),
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel(),
        ),
        "byte_level_with_space": trained(
            models.BPE(), bpe(initial_alphabet=letters),
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True),
        ),
        "bytes_joined_freely": trained(
            models.BPE(), bpe(initial_alphabet=letters),
            pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ),
        "legacy_sentencepiece": trained(
            models.BPE(unk_token="<unk>"), bpe(special_tokens=["<unk>"]), normalizer=legacy
        ),
        "unigram": trained(
            models.Unigram(),
            trainers.UnigramTrainer(
                vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
            ),
            pre_tokenizer=spaces["always"], normalizer=normalizers.NFKC(),
        ),
        **{
            f"metaspace_{scheme}": trained(
                models.BPE(unk_token="<unk>"), bpe(special_tokens=["<unk>"]), pre_tokenizer=spaces[scheme]
            )
            for scheme in ("first", "never")
        },
    }  # fmt: skip
    return {name: _wrapped(backend) for name, backend in backends.items()}


NAMES = ["byte_level", "byte_level_with_space", "bytes_joined_freely", "legacy_sentencepiece", "unigram",
         "metaspace_first", "metaspace_never"]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS + SPECIALS) | st.text(max_size=3), max_size=12)


def by_whole_prefixes(tokenizer: Any, text: str, start: int, stop: int) -> list[bool] | None:
    """The mask, or None where a prefix is none on the tokens."""
    ids, first, last = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, text[:start], text[:stop])
    )
    if ids[: len(first)] != first or ids[: len(last)] != last:
        return None
    return [len(first) <= i < len(last) for i in range(len(ids))]


@pytest.mark.parametrize("name", NAMES)
def test_the_short_proof_is_the_whole_one(name: str) -> None:
    tokenizer = tokenizers()[name]
    tokens = SampleEncoder(tokenizer)

    @given(TEXTS, st.randoms())
    @settings(max_examples=60, deadline=None)
    def of_any_text(parts: list[str], rng: random.Random) -> None:
        text = "".join(parts)
        start, stop = sorted([rng.randint(0, len(text)), rng.randint(0, len(text))])
        if rng.random() < 0.7:  # where the parts meet, as a template cuts
            borders = [len("".join(parts[:i])) for i in range(len(parts) + 1)]
            start, stop = sorted(rng.choices(borders, k=2))
        made = tokens.conversations([MaskedText(text, [TextSpan("it", start, stop)], True)])[0]
        truth = by_whole_prefixes(tokenizer, text, start, stop)
        if truth is None:
            assert isinstance(made, str) and made.startswith("it: the tokenizer merges its first")
        else:
            assert made.input_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
            assert made.trained.tolist() == truth

    of_any_text()
    inside = [MaskedText("<s>the cat", [TextSpan("it", 3, end)], True) for end in range(4, 10)]
    assert any(isinstance(made, str) for made in tokens.conversations(inside)), "a cut inside of a token"


# --- contents that spell a token of the template ----------------------------------------------------------

STAND_INS = {"<s>": "\U00100000", "<|a|>": "\U00100001"}


def as_text(tokenizer: PreTrainedTokenizerBase, pieces: Sequence[str | int]) -> Rendered | str:
    """Pieces of text, in which 0 and 1 are tokens of the template and ~0 and ~1 the same ones spelled."""
    names, stand_ins = list(STAND_INS), list(STAND_INS.values())
    text = "".join(
        piece if isinstance(piece, str) else names[piece] if piece >= 0 else stand_ins[~piece]
        for piece in pieces
    )
    first = len(names[0])
    return SampleEncoder(tokenizer).conversations(
        [MaskedText(text, [TextSpan("it", first, len(text))], True, STAND_INS)]
    )[0]


@pytest.mark.parametrize("name", [*NAMES, "bytes"])
def test_what_is_spelled_is_read_as_text(name: str) -> None:
    tokenizer: Any = byte_level_tokenizer() if name == "bytes" else tokenizers()[name]
    if name == "bytes":
        tokenizer.add_special_tokens({"additional_special_tokens": list(STAND_INS)})
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in STAND_INS)
    made = as_text(tokenizer, [0, "the cat", ~1, " sat", ~0, ~1, 1])
    assert isinstance(made, Rendered) and made.spelled and made.ended
    ids = made.input_ids.tolist()
    assert [token for token in ids if token in (begin, end)] == [begin, end]
    assert made.trained.tolist() == [False] + [True] * (len(ids) - 1)
    same = as_text(tokenizer, [0, "the cat sat", 1])
    own = tokenizer("<s>the cat sat<|a|>", add_special_tokens=False)["input_ids"]
    assert same.input_ids.tolist() == own, "nothing else changes"
    if name in ("bytes", "byte_level"):
        assert tokenizer.decode(ids) == "<s>the cat<|a|> sat<s><|a|><|a|>"


def test_a_token_that_merges_make_cannot_be_read_as_text() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "<|a|>": 5}
    backend: Any = Tokenizer(models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    backend.add_special_tokens(list(STAND_INS))
    made: Any = PreTrainedTokenizerFast
    said = as_text(made(tokenizer_object=backend), [0, ~0, 1])
    assert isinstance(said, str) and said.startswith(
        "its contents spell '<s>', which the chat template writes"
    )


# --- a slow tokenizer -------------------------------------------------------------------------------------


@dataclass
class Slow:
    """As a tokenizer written in Python has it: no offsets, no backend."""

    inner: Any
    is_fast: bool = False

    def __call__(self, texts: list[str], **given: Any) -> Any:
        return self.inner(texts, **given)

    def __getattr__(self, name: str) -> Any:
        if name == "backend_tokenizer":
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_a_slow_tokenizer_gives_the_same() -> None:
    inner = tokenizers()["byte_level"]
    slow: Any = Slow(inner)
    row = MaskedText("<s>the cat<|a|>the cat sat<|a|>\n", [TextSpan("it", 15, 31)], True)
    fast_made, slow_made = (SampleEncoder(one).conversations([row])[0] for one in (inner, slow))
    assert json.dumps(fast_made.trained.tolist()) == json.dumps(slow_made.trained.tolist())
    assert fast_made.input_ids.tolist() == slow_made.input_ids.tolist()
    assert fast_made.ended and slow_made.ended
    said = as_text(slow, [0, ~0, 1])
    assert isinstance(said, str) and "and this tokenizer cannot encode as plain text" in said


def test_a_text_on_which_the_tokenizer_panics_is_one_bad_row() -> None:
    """A pattern whose steps grow with each letter; the tokenizers library gives up with a panic of Rust's."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer: Any = byte_level_tokenizer()
    split: Any = pre_tokenizers.Split(Regex("(a|aa)+(?=!)"), "isolated")
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    texts = ["b", "a" * 5000, "c"]
    conversations = [
        Conversation(({"role": "user", "content": "0"}, {"role": "assistant", "content": text}))
        for text in texts
    ]
    for rows in ([Text(((text, True),)) for text in texts], conversations):
        made = Renderer(tokenizer).render(rows)
        assert [isinstance(one, Rendered) for one in made] == [True, False, True]
        assert isinstance(made[1], str) and made[1].startswith("the tokenizer fails on the row (")
