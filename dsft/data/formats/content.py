"""A hash of what a row says. Takes a Row, gives a number. Touches nothing."""

from __future__ import annotations

import json
from hashlib import blake2b

from dsft.data.rows import Conversation, Row, Sample

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True).encode


def content_hash(row: Row) -> int:
    """64 bits, 0 to 2^64 - 1, of the texts or messages, tools, what is trained on, and the label.

    The same on every machine, for any order of the keys of messages, tools and arguments.
    """
    said = _encode([row.label, [_said(sample) for sample in row.samples]])
    return int.from_bytes(blake2b(said.encode(), digest_size=8).digest(), "little")


def _said(sample: Sample) -> list[object]:
    if isinstance(sample, Conversation):
        return ["conversation", sample.messages, sample.tools, sample.trained]
    return ["text", sample.parts]
