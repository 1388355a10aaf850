"""Convert a JSON-like row to a Row, by the format of its file, and hash the content of a Row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from typing import Any

from dsft.data.formats.answers import classify, completed, kto, preference
from dsft.data.formats.detect import Format, check_row, choose
from dsft.data.formats.message import SHAREGPT, alpaca, messages
from dsft.data.formats.values import Fields, is_empty, number, quoted
from dsft.data.read.files import DataFile, file_lines
from dsft.data.rows import FIELDS, BadRowError, Conversation, Row, Text
from dsft.spec.schema import Source
from dsft.spec.task import TASKS

_MEDIA = ("images", "videos", "audios")
"""Columns with media that messages refer to, as LLaMA-Factory, ms-swift and TRL name them."""


def convert(row: Mapping[str, Any], found: Format) -> Row:
    """Convert a row. Raises BadRowError if the row does not fit its file's format.

    A preference pair becomes both samples for task dpo, and only the chosen one for sft.
    """
    fields = Fields(row, found.columns)
    check_row(fields, found)
    if found.name != "text":
        _check_media(row)
    converted = CONVERT[found.name](fields, found)
    given = [
        name for name in TASKS[found.task].fields if FIELDS[name].needed or not is_empty(fields.get(name))
    ]
    if not given:
        return converted
    if absent := [fields.name(name) for name in given if not fields.has(name)]:
        raise BadRowError(f"{quoted(absent)} is missing; it must be a number")
    own = {name: (number(fields.get(name), fields.name(name)),) * len(converted.samples) for name in given}
    return replace(converted, values={**converted.values, **own})


def file_rows(
    file: DataFile,
    source: Source,
    tasks: Sequence[str],
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda row: row,
) -> Iterator[tuple[str, Row | None, str]]:
    """Yield ("file:line", row, mistake) of each line of a file that is not blank; a line with a mistake has
    no row. tasks: the first that takes the format of the first rows decides; if none does, there is one
    mistake for the file. complete: applied to each row before it is converted."""
    rows = (replace(line, row=complete(line.row)) for line in file_lines(file) if line.row is not None)
    head, found, refused = list(islice(rows, HEAD_ROWS)), None, ""
    for task in tasks if head else ():
        try:
            found = choose(source, head, task)
            break
        except BadRowError as error:
            refused = str(error)
    if head and found is None:
        yield f"{file.name}:{head[0].number}", None, refused
        return
    for line in file_lines(file):
        row, mistake = None, line.mistake or ""
        if line.row is not None and found is not None:
            try:
                row = convert(complete(line.row), found)
            except BadRowError as error:
                mistake = str(error)
        if row is not None or mistake:
            yield f"{file.name}:{line.number}", row, mistake


HEAD_ROWS = 100
"""First rows of a file, from which its format is detected."""


def with_answer(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row that is a prompt alone with an empty answer, as its format has it; other rows, and what
    `dsft answer` has written with a reference, with the answer that they have."""
    if not ANSWER_KEYS.isdisjoint(row):
        return row
    for key in ("messages", "conversations"):
        talk = row.get(key)
        if isinstance(talk, list) and talk:
            last = talk[-1] if isinstance(talk[-1], dict) else {}
            is_answered = last.get("role", last.get("from")) in ("assistant", "gpt", "model")
            return row if is_answered else {**row, key: [*talk, _NOTHING]}
    if row.get("prompt") is not None:
        return {**row, "completion": {**_NOTHING, "content": row.get("reference") or ""}}
    return {**row, "output": ""} if row.get("instruction") is not None else row


ANSWER_KEYS = frozenset(
    "completion output response chosen rejected rejected_response rejected_messages".split()
)
_NOTHING = {"role": "assistant", "content": ""}


def _check_media(row: Mapping[str, Any]) -> None:
    if row.keys().isdisjoint(_MEDIA):
        return
    for key in _MEDIA:
        if not is_empty(row.get(key)):
            raise BadRowError(
                f'the row has "{key}", which dsft does not train on; remove them and what refers to them'
            )


CONVERT: dict[str, Callable[[Fields, Format], Row]] = {
    "text": lambda fields, found: Row((Text(((fields.string("text"), True),)),)),
    "messages": lambda fields, found: messages(fields),
    "sharegpt": lambda fields, found: messages(fields, "conversations", SHAREGPT),
    "alpaca": lambda fields, found: alpaca(fields),
    "prompt_completion": lambda fields, found: Row((completed(fields),)),
    "preference": lambda fields, found: preference(fields, found.task),
    "kto": lambda fields, found: kto(fields),
    "classify": lambda fields, found: classify(fields, found.labels),
}
"""What converts rows of each format of `dsft.spec.formats`."""

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True).encode


def content_hash(row: Row) -> int:
    """Return a 64-bit hash, 0 to 2^64 - 1, of the texts or messages, the tools and the label, to find
    duplicates and to divide rows into sets. It does not depend on what is trained on, so that the same
    content is never on both sides of a held-out split.

    It is the same on every machine and for any order of the keys of messages, tools and arguments.
    """
    pieces = [f"label {row.values['label'][0] if 'label' in row.values else None}"]
    for sample in row.samples:
        if not isinstance(sample, Conversation):
            pieces.append("".join([text for text, _ in sample.parts]))
            continue
        pieces.append(f"{len(sample.messages)} messages")
        pieces.append(_encode(sample.tools) if sample.tools else "")
        for message in sample.messages:
            is_short = len(message) == 2 and message["content"] is not None
            # the JSON begins with {, unlike any role
            pieces.append(f"{message['role']}:{message['content']}" if is_short else _encode(message))
    lengths = ",".join([str(len(piece)) for piece in pieces])
    content = f"{lengths}:{''.join(pieces)}".encode()
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")
