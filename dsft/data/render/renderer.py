"""Tokenize samples: return token ids and a mask of the same length, or the reason why a sample is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from dsft.data.render.masks import MaskBuilder, MaskedText, TrainOn
from dsft.data.render.template import template_error, template_of
from dsft.data.render.thoughts import Thinking
from dsft.data.render.tokens import SampleEncoder, encode_or_explain
from dsft.data.rows import BadRowError, Conversation, EndlessTemplateError, Rendered, Sample, Text
from dsft.errors import DataError, Problem
from dsft.spec.document import quote

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1000  # samples tokenized in one call
_ENDLESS = 2
"""Number of rows, each of which may take 10 seconds, after which a template that exceeds its limits is given
up."""
_PROMPT_MERGED = (
    "the tokenizer merges the last characters of the prompt and the first of the completion into one token, "
    "which the model never gets at inference; move the white space between them to the completion"
)


@dataclass(frozen=True)
class Renderer:
    """Tokenizes samples with a tokenizer and a chat template. Can be pickled.

    template  replaces the tokenizer's chat template; None: the tokenizer's own
    name      the template's name in errors; None: the tokenizer's own
    digest    identifies everything that determines the tokens of a row
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    train_on: TrainOn = "assistant"
    name: str | None = None
    thinking: Thinking = "empty"

    @cached_property
    def digest(self) -> str:
        import jinja2
        import tokenizers
        import transformers

        tokenizer: Any = self.tokenizer
        inputs = [
            tokenizer_text(tokenizer),
            type(tokenizer).__name__,
            tokenizer.special_tokens_map,
            self.template if self.template is not None else tokenizer.chat_template,
            [self.train_on, self.thinking],
            tokenizers.__version__,
            transformers.__version__,
            jinja2.__version__,
        ]
        return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()

    def render(self, samples: Sequence[Sample]) -> list[Rendered | str]:
        """Return for each sample its tokens, or the reason why it is refused.

        Raises DataError if the tokenizer has no usable template or no end-of-text token, or the template
        exceeds its limits of time, memory or text for several rows.
        """
        rendered: list[Rendered | str] = []
        for start in range(0, len(samples), _BATCH):
            rendered += self._batch(samples[start : start + _BATCH])
        return rendered

    def turn_end(self) -> int | None:
        """Return the id of the special token that ends an answer in the chat template and is trained on; None
        if there is no such template or token."""
        talk = Conversation(({"role": "user", "content": "0"}, {"role": "assistant", "content": "1"}))
        try:
            rendered = self.render([talk])[0]
        except DataError:  # no template, or none usable for training
            return None
        if isinstance(rendered, str):
            return None
        special = {self.tokenizer.convert_tokens_to_ids(name) for name in self._encoder.special}
        trained = rendered.input_ids[rendered.trained].tolist()
        while trained and trained[-1] not in special:  # white space after the token
            trained.pop()
        behind = list(takewhile(special.__contains__, reversed(trained)))
        return behind[-1] if behind and behind[-1] != trained[0] else None

    def _batch(self, samples: Sequence[Sample]) -> list[Rendered | str]:
        rendered: list[Rendered | str] = [""] * len(samples)
        texts = [i for i, sample in enumerate(samples) if isinstance(sample, Text)]
        masked: dict[int, MaskedText] = {}
        for i, sample in enumerate(samples):
            if isinstance(sample, Conversation):
                try:
                    masked[i] = self._mask_builder(bool(sample.tools)).mask(sample)
                except BadRowError as error:
                    rendered[i] = str(error)
                    if isinstance(error, EndlessTemplateError):
                        self._endless.append(sample.messages[0].get("content"))
                    if len(self._endless) == _ENDLESS:
                        rows = " and ".join(quote(content, 40) for content in self._endless)
                        raise template_error(str(error), f"these are rows that begin with {rows}") from error
        outcomes = encode_or_explain(
            lambda some: _texts(some, self._encoder, self.train_on), [cast(Text, samples[i]) for i in texts]
        )
        outcomes += self._encoder.conversations(list(masked.values()))
        for i, outcome in zip([*texts, *masked], outcomes, strict=True):
            rendered[i] = outcome
        return rendered

    def _mask_builder(self, tools: bool) -> MaskBuilder:
        if tools not in self._mask_builders:
            template = template_of(self.tokenizer, self.template, tools=tools, name=self.name)
            builder = MaskBuilder(template, self.train_on, self._encoder.special, self.thinking)
            builder.check_marks()
            self._mask_builders[tools] = builder
        return self._mask_builders[tools]

    @cached_property
    def _mask_builders(self) -> dict[bool, MaskBuilder]:
        return {}  # for rows with tools and without

    @cached_property
    def _endless(self) -> list[Any]:
        return []  # the first contents of rows for which the template exceeded a limit

    @cached_property
    def _encoder(self) -> SampleEncoder:
        return SampleEncoder(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out cached values, since compiled templates and patterns cannot be pickled."""
        return {
            name: getattr(self, name) for name in ("tokenizer", "template", "train_on", "name", "thinking")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def tokenizer_text(tokenizer: Any) -> Any:
    """Return everything that defines a tokenizer, as JSON values, except the paths of its files, which differ
    between hosts, and truncation and padding, which `SampleEncoder` turns off when it first encodes."""
    if tokenizer.is_fast:
        settings = json.loads(tokenizer.backend_tokenizer.to_str())
        return {key: value for key, value in settings.items() if key not in ("truncation", "padding")}
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    of_place = ("_file", "_path", "is_local", "local_files_only")
    settings = {key: value for key, value in tokenizer.init_kwargs.items() if not key.endswith(of_place)}
    return [tokenizer.get_vocab(), added, settings]


# --- texts ------------------------------------------------------------------------------------------------


def _texts(samples: Sequence[Text], encoder: SampleEncoder, train_on: TrainOn) -> list[Rendered | str]:
    """Tokenize texts, each followed by the end-of-text token. With train_on "all", prompts are trained on,
    too. The first token is never a target, whatever its mask."""
    if samples and encoder.tokenizer.eos_token_id is None:
        problem = Problem("tokenizer", "has no end-of-text token (eos_token), with which every text must end")
        raise DataError("text rows cannot be tokenized:", [problem])
    whole = encoder.of_texts(["".join(part for part, _ in sample.parts) for sample in samples])
    if train_on == "all":
        samples = [Text(tuple((part, True) for part, _ in sample.parts)) for sample in samples]
    return [_text(sample, ids, encoder) for sample, ids in zip(samples, whole, strict=True)]


def _text(sample: Text, ids: list[int], encoder: SampleEncoder) -> Rendered | str:
    tokenizer = encoder.tokenizer
    text = "".join(part for part, _ in sample.parts)
    trained = np.ones(len(ids) + 1, dtype=np.bool_)
    start = position = 0
    for i, (part, is_trained) in enumerate(sample.parts):
        start, position = position, position + len(part)
        if not is_trained:
            first, stop = (_count(text[:end], ids, encoder) for end in (start, position))
            if first is None or stop is None:
                return _PROMPT_MERGED
            trained[first if i else 0 : stop] = False
    bos, eos = tokenizer.bos_token_id, cast(int, tokenizer.eos_token_id)
    # If the text already has the token that the tokenizer adds, it would be there twice.
    if bos is not None and encoder.around[:1] == [bos] and ids[:2] == [bos] * 2:
        ids, trained = ids[1:], trained[1:]
    if encoder.around != [bos] and encoder.around[-1:] == [eos] and ids[-2:] == [eos] * 2:
        ids = ids[:-1]
    if ids[-1:] != [eos]:
        ids = [*ids, eos]
    return Rendered(np.array(ids, dtype=np.int32), trained[: len(ids)])


def _count(prefix: str, ids: list[int], encoder: SampleEncoder) -> int | None:
    """Return how many of a row's tokens are those of its prefix; None if the row does not begin with them."""
    (alone,), closed = encoder.of_texts([prefix]), encoder.around
    eos = encoder.tokenizer.eos_token_id
    while alone and closed and alone[-1] == closed[-1] == eos:  # the tokenizer adds it to every text
        alone, closed = alone[:-1], closed[:-1]
    return len(alone) if ids[: len(alone)] == alone else None


# --- pairs ------------------------------------------------------------------------------------------------


def pair_mistake(chosen: Rendered, rejected: Rendered) -> str | None:
    """Return why the two answers of a preference pair cannot be compared; None if they can, or if one has no
    target, since such a pair is left out. A prompt is all tokens before the first that is trained on."""
    if not (chosen.trained[1:].any() and rejected.trained[1:].any()):
        return None
    ours, theirs = (one.input_ids[: int(np.argmax(one.trained))] for one in (chosen, rejected))
    if not len(ours) or not len(theirs):
        return (
            "the prompt is empty and the tokenizer adds no token at the start of a text, so nothing predicts "
            "the first token of either answer; give the pair a prompt"
        )
    if np.array_equal(ours, theirs):
        is_same = np.array_equal(chosen.input_ids, rejected.input_ids)
        return "the chosen and the rejected answer have the same tokens" if is_same else None
    shorter = min(len(ours), len(theirs))
    same = int(np.argmax(np.append(ours[:shorter] != theirs[:shorter], True)))
    return (
        f"the prompts of the two answers differ: {len(ours):,} tokens before the chosen one and "
        f"{len(theirs):,} before the rejected one, of which the first {same:,} are the same; set "
        "data.chat_template to a template that writes the same prompt for both, or leave the row out"
    )
