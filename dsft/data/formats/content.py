"""Hash the content of a row, to find duplicates and to divide rows into sets."""

from __future__ import annotations

import json
from hashlib import blake2b

from dsft.data.rows import Conversation, Message, Row

_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True).encode


def content_hash(row: Row) -> int:
    """Return a 64-bit hash, 0 to 2^64 - 1, of the texts or messages, the tools and the label. It does not
    depend on what is trained on, so that the same content is never on both sides of a held-out split.

    It is the same on every machine and for any order of the keys of messages, tools and arguments.
    """
    pieces = [f"label {row.label}"]
    for sample in row.samples:
        if isinstance(sample, Conversation):
            pieces.append(f"{len(sample.messages)} messages")
            pieces.append(_encode(sample.tools) if sample.tools else "")
            pieces += [_piece(message) for message in sample.messages]
        else:
            pieces.append("".join([text for text, _ in sample.parts]))
    lengths = ",".join([str(len(piece)) for piece in pieces])
    said = f"{lengths}:{''.join(pieces)}".encode()
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "little")


def _piece(message: Message) -> str:
    content = message["content"]
    if len(message) == 2 and content is not None:
        return f"{message['role']}:{content}"
    return _encode(message)  # begins with {, unlike any role
