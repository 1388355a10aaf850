"""What stands in a sentencepiece model file: takes its bytes, gives pieces and how text is prepared.

Read from the protocol buffer's wire format (https://protobuf.dev/programming-guides/encoding), since the
`protobuf` package does not load sentencepiece's own description where its version is another. Numbers of
fields are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ModelProto.SentencePiece.Type
Value = int | bytes


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SpmModel:
    """special: id of bos, eos, pad and unk, as far as there is one. charsmap: sentencepiece's compiled table
    of what is normalised, empty for none."""

    pieces: tuple[Piece, ...]
    kind: int
    byte_fallback: bool
    space_is_suffix: bool
    special: dict[str, int]
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    def texts(self, *kinds: int) -> list[str]:
        return [piece.text for piece in self.pieces if piece.kind in kinds]


def parse(data: bytes) -> SpmModel:
    """Raises ValueError for what is no such model."""
    pieces: list[Piece] = []
    trainer: dict[int, Value] = {}
    rules: dict[int, Value] = {}
    for number, value in _fields(data):
        if number in (1, 2, 3) and not isinstance(value, bytes):
            raise ValueError(f"field {number} is no message")
        if number == 1:
            pieces.append(_piece(dict(_fields(value))))  # type: ignore[arg-type]
        elif number == 2:
            trainer |= dict(_fields(value))  # type: ignore[arg-type]
        elif number == 3:
            rules |= dict(_fields(value))  # type: ignore[arg-type]
    if not pieces:
        raise ValueError("it has no pieces")
    ids = {
        "unk": trainer.get(40, 0),
        "bos": trainer.get(41, 1),
        "eos": trainer.get(42, 2),
        "pad": trainer.get(43, -1),
    }
    charsmap = rules.get(2, b"")
    return SpmModel(
        tuple(pieces),
        kind=int(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        space_is_suffix=bool(trainer.get(24, 0)),
        special={name: int(i) for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(pieces)},
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        add_dummy_prefix=bool(rules.get(3, 1)),
        remove_extra_whitespaces=bool(rules.get(4, 1)),
        escape_whitespaces=bool(rules.get(5, 1)),
    )


def _piece(fields: dict[int, Value]) -> Piece:
    text, score, kind = fields.get(1, b""), fields.get(2, b"\0\0\0\0"), fields.get(3, NORMAL)
    if not (isinstance(text, bytes) and isinstance(score, bytes) and isinstance(kind, int)):
        raise ValueError("a piece is none")
    return Piece(text.decode(), struct.unpack("<f", score)[0], kind)


def _fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each: a whole number, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(data):
            raise ValueError("it is cut off")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it is cut off")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a number has no end")
