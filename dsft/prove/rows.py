"""Find the tokens and targets of rows with transformers' `apply_chat_template` alone, by rendering the
messages before each answer, to compare them with those of a run. Formats are read by dsft itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from jinja2 import TemplateError

from dsft.data.formats.convert import file_rows
from dsft.data.read.files import data_files
from dsft.data.rows import Conversation, Sample, Text
from dsft.data.sets.dataset import Dataset, Example
from dsft.prove.plain import Row
from dsft.spec.schema import Data, Spec


def masks(spec: Spec, data: Dataset, tokenizer: Any) -> dict[str, Any]:
    """Compare the rows. Return how many were compared, the places of those that differ, and reason -> how
    many were left out. tokenizer: with the run's template."""
    different, left, given, compared = list[str](), dict[str, int](), dict(_samples(spec)), 0
    for id in range(len(data)):
        place, own = data.source(id), rows_of(data[id])
        samples = given.get(place, ())
        alone = len(own) == 1 < len(samples)  # an answer of a pair, without the other
        reason = "parts of rows" if data.extent(id) or not (alone or len(own) == len(samples)) else ""
        reason = "a model with scores has no masks" if spec.task_kind.head == "score" else reason
        expected = [] if reason else [expected_row(sample, tokenizer, spec.data) for sample in samples]
        reason = reason or next((one for one in expected if isinstance(one, str)), "")
        if reason:
            left[reason] = left.get(reason, 0) + 1
        else:
            compared += 1
            ways = [[one] for one in expected] if alone else [expected]
            is_same = any(all(map(_is_same, way, own)) for way in ways)
            different += [] if is_same else [place]
    return {"compared": compared, "different": different, "left": left}


def _is_same(expected: Row | str, own: Row) -> bool:
    return expected[0] == own[0] and expected[1][1:] == own[1][1:]


def rows_of(example: Example) -> list[Row]:
    """Return the segments of an example, each as a row of its own; one that continues the prompt of the first
    with it."""
    ids, trained = example.input_ids.tolist(), example.trained.tolist()
    rows, begin = list[Row](), 0
    for length, start in zip(example.segment_lengths, example.segment_starts, strict=True):
        end = begin + length
        rows.append((ids[:start] + ids[begin:end], [False] * start + trained[begin:end]))
        begin = end
    return rows


def _samples(spec: Spec) -> Iterator[tuple[str, Sequence[Sample]]]:
    """Yield the place and the samples of each row of the training files."""
    for source in spec.data.train:
        for file in data_files(source.path):
            for place, row, _ in islice(file_rows(file, source, (spec.task,)), source.max_rows):
                if row is not None:  # otherwise the run leaves it out, or stops
                    yield place, row.samples


def expected_row(sample: Sample, tokenizer: Any, data: Data) -> Row | str:
    """Return the tokens of a sample and which are targets, or why this is not known here."""
    texts = sample.parts if isinstance(sample, Text) else [(one.get("content"),) for one in sample.messages]
    special = (*tokenizer.all_special_tokens, "<think>")
    if any(token in (one[0] or "") for one in texts for token in special):
        return "words that spell special tokens"
    if isinstance(sample, Text):
        return _text(sample, tokenizer, data.train_on)
    return _conversation(sample, tokenizer, data)


def _text(sample: Text, tokenizer: Any, train_on: str) -> Row | str:
    """A text has its tokens and the end-of-text token; a prompt before it is no target."""
    ids = list(tokenizer("".join(part for part, _ in sample.parts)).input_ids)
    ids += [tokenizer.eos_token_id] if ids[-1:] != [tokenizer.eos_token_id] else []
    trained = [True] * len(ids)
    if len(sample.parts) > 1 and train_on != "all":
        prompt = list(tokenizer(sample.parts[0][0]).input_ids)
        if [part for _, part in sample.parts] != [False, True] or ids[: len(prompt)] != prompt:
            return "texts in parts"
        trained[: len(prompt)] = [False] * len(prompt)
    return ids, trained


def _conversation(sample: Conversation, tokenizer: Any, data: Data) -> Row | str:
    """An answer's targets begin after the generation prompt and end with the first special token after its
    words."""
    messages: list[Any] = list(sample.messages)
    flags = sample.trained or (None,) * len(messages)
    answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    if any(one.keys() != {"role", "content"} or one["content"] is None for one in messages):
        return "calls, thoughts and other keys of messages"
    if data.train_on == "all" or any(flags) or not tokenizer.is_fast:
        return "flags of messages, train_on: all, or a slow tokenizer"
    if data.thinking == "keep" and "<think>" in str(tokenizer.chat_template):
        return "thoughts that are added"
    render = partial(tokenizer.apply_chat_template, tools=list(sample.tools) or None, tokenize=False)
    chosen = answers[-1:] if data.train_on == "last" else answers
    try:
        text = render(messages)
        prompts = {number: render(messages[:number], add_generation_prompt=True) for number in chosen}
    except (ValueError, TemplateError):
        return "no prompt, or one that the template does not render alone"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    added, trained = set(tokenizer.added_tokens_decoder), [False] * len(encoded.input_ids)
    for number, prompt in prompts.items():
        words = messages[number]["content"].strip()
        start = text.find(words, len(prompt))
        if not text.startswith(prompt) or start < 0 or prompt.rstrip().endswith("<think>"):
            return "a template that writes answers otherwise than it prompts for them"
        for at, (id, (begin, _)) in enumerate(zip(encoded.input_ids, encoded.offset_mapping, strict=True)):
            if begin >= len(prompt) and flags[number] is None:
                trained[at] = True
                if begin >= start + len(words) and id in added:
                    break
    return list(encoded.input_ids), trained
