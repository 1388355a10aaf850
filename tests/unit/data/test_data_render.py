"""Which tokens of a conversation are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsft.data.render.renderer import Renderer
from dsft.data.rows import Conversation, Message, Rendered, Text
from dsft.data.tokenizer.load import byte_level_tokenizer
from dsft.errors import DataError, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTES = byte_level_tokenizer()
# The same ChatML as the byte-level tokenizer's, without marks.
UNMARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat(*turns: tuple[str, str]) -> tuple[Message, ...]:
    return tuple({"role": role, "content": content} for role, content in turns)


ONE_TURN = chat(("user", "How many?"), ("assistant", "Twelve of them."))


def render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, template: str | None = None
) -> Rendered:
    """Raises DataError where the template refuses the messages."""
    rendered = Renderer(tokenizer, template).render([Conversation(tuple(messages))])[0]
    if isinstance(rendered, str):
        raise DataError("refused:", [Problem("rows.jsonl:7", rendered)])
    return rendered


def text(content: str) -> Text:
    return Text(((content, True),))


def trained_parts(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each run of trained tokens."""
    pairs = zip(rendered.trained.tolist(), rendered.input_ids.tolist(), strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for trained, run in runs if trained]


ROLES = st.sampled_from(["system", "user", "tool"])
CONTENT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
TURNS = st.lists(st.tuples(ROLES | st.just("assistant"), CONTENT), max_size=5)


@given(TURNS, CONTENT)
@settings(max_examples=150, deadline=None)
def test_both_ways_agree(turns: list[tuple[str, str]], question: str) -> None:
    messages = chat(("user", question), *turns, ("assistant", question))
    marked, unmarked = render(messages, BYTES), render(messages, BYTES, UNMARKED)
    assert marked.input_ids.tolist() == unmarked.input_ids.tolist()
    assert marked.trained.tolist() == unmarked.trained.tolist()
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert trained_parts(marked, BYTES) == answers


def test_content_that_looks_like_the_template() -> None:
    messages = chat(("user", "<|im_start|>assistant\nno<|im_end|>\n"), ("assistant", "yes<|im_end|>\nyes"))
    rendered = render(messages, BYTES, UNMARKED)
    assert trained_parts(rendered, BYTES) == ["yes<|im_end|>\nyes<|im_end|>"]


def test_an_empty_answer_after_a_prompt_that_looks_like_one() -> None:
    template = UNMARKED.replace("m['role'] + '\n'", "m['role'] + '0'").replace("assistant\n", "assistant0")
    rendered = render(
        chat(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "0")), BYTES, template
    )
    assert trained_parts(rendered, BYTES) == ["<|im_end|>", "0<|im_end|>"]


def test_a_template_that_begins_the_text_itself() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    rendered = render(ONE_TURN, tokenizer, "{{ bos_token }}" + UNMARKED.replace("<|im_start|>", ""))
    assert rendered.input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_a_text_is_trained_on_whole_and_ended_once() -> None:
    samples: list[Text | Conversation] = [text("né"), Conversation(ONE_TURN), text("né<|im_end|>")]
    first, conversation, second = Renderer(BYTES).render(samples)
    assert first.input_ids.tolist() == second.input_ids.tolist() == [*"né".encode(), 258]
    assert first.trained.all() and not conversation.trained.all()


def test_a_beginning_of_text_is_not_doubled() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    found = Renderer(tokenizer).render([text("x"), text("<|im_start|>x")])
    assert [r.input_ids.tolist() for r in found if isinstance(r, Rendered)] == [[257, 120, 258]] * 2
    assert render(ONE_TURN, tokenizer).input_ids.tolist() == render(ONE_TURN, BYTES).input_ids.tolist()


def test_an_end_of_text_is_not_doubled() -> None:
    """By a tokenizer that ends every text itself; what a text says twice stays."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", 258)]
    )
    asked = Text((("q", False), ("x<|im_end|>", True)))
    texts = [text("x"), text("x<|im_end|>"), asked, text("x<|im_end|><|im_end|>")]
    found = [r for r in Renderer(tokenizer).render(texts) if isinstance(r, Rendered)]
    assert [r.input_ids.tolist() for r in found] == [
        *([[120, 258]] * 2), [113, 120, 258], [120, 258, 258],
    ]  # fmt: skip
    assert found[2].trained.tolist() == [False, True, True]


def test_a_special_token_that_is_not_in_the_vocabulary_is_not_written_as_another_sign() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.bos_token = "<begin>"
    assert tokenizer.convert_tokens_to_ids("<begin>") is None
    template = "{{ bos_token }}" + UNMARKED
    row = Conversation(chat(("user", "<|im_end|>"), ("assistant", "one")))
    (made,) = Renderer(tokenizer, template).render([row])
    assert isinstance(made, str) and "cannot encode as plain text" in made


def test_a_text_without_an_end_is_refused() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no end-of-text token"):
        Renderer(tokenizer).render([text("x")])


def test_a_token_across_the_border_of_an_answer() -> None:
    """A token of two line breaks, a prompt that ends with one, and an answer that begins with one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = BYTES.convert_ids_to_tokens(list(range(256)))
    vocab = {letter: i for i, letter in enumerate([*letters, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    for template in (UNMARKED, BYTES.chat_template):
        render(chat(("user", "a"), ("assistant", "b\n\nc")), tokenizer, template)
        with pytest.raises(
            DataError, match=r"rows.jsonl:7: (turn 2|marked part 1): the tokenizer merges its"
        ):
            render(chat(("user", "a"), ("assistant", "\nb")), tokenizer, template)
