"""JSON Lines and JSON files, read strictly.

Takes a path. Gives every object with the line it starts on, and every mistake with its line. Touches
nothing but the file. A row is not looked into here: `sources.py` knows the formats.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # U+FEFF in UTF-8, as some editors write at the start of a file
WHITE_SPACE = " \t\n\r"  # RFC 8259, section 2


@dataclass(frozen=True)
class JsonRows:
    """What a file holds. Lines count from 1; `mistakes` are (line, reason)."""

    objects: tuple[tuple[int, dict[str, Any]], ...]
    mistakes: tuple[tuple[int, str], ...]
    blank_lines: int
    has_byte_order_mark: bool


@dataclass(frozen=True)
class _Line:
    number: int
    value: object = None
    mistake: str | None = None


def read_json_rows(path: Path) -> JsonRows:
    """Read FILE.jsonl (one object a line) or FILE.json (a list of objects, or one object a line).

    UTF-8; a byte order mark is skipped and told of, blank lines are skipped and counted. Everything else
    that RFC 8259 does not allow is a mistake, as are NaN, Infinity, a repeated key and a row that is no
    object. After a mistake a JSON Lines file is read on; a list is read on where its syntax still holds.
    """
    content = path.read_bytes()
    has_mark = content.startswith(BYTE_ORDER_MARK)
    content = content[len(BYTE_ORDER_MARK) :] if has_mark else content
    is_list = path.suffix.lower() == ".json" and content.lstrip().startswith(b"[")
    blank_lines = 0 if is_list else sum(not line.strip() for line in _lines(content))
    values = list(_list(content) if is_list else _json_lines(content))
    mistakes = [(value.number, value.mistake) for value in values if value.mistake is not None]
    good = [value for value in values if value.mistake is None]
    mistakes += [
        (value.number, f"the row is {kind(value.value)}, not an object of columns and values")
        for value in good
        if not isinstance(value.value, dict)
    ]
    return JsonRows(
        objects=tuple((value.number, value.value) for value in good if isinstance(value.value, dict)),
        mistakes=tuple(sorted(mistakes)),
        blank_lines=blank_lines,
        has_byte_order_mark=has_mark,
    )


def kind(value: object) -> str:
    """The JSON type of a value, as a sentence names it."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


class _Decoder:
    """json.JSONDecoder that notes what Python's reader accepts and JSON does not have."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, strict=True
        )

    def decode(self, text: str, start: int) -> tuple[object, int, str | None]:
        """The value at `start`, the position after it, and what is wrong with it, if anything."""
        self.faults.clear()
        value, end = self._decoder.raw_decode(text, start)
        return value, end, self.faults[0] if self.faults else None

    def _constant(self, name: str) -> None:
        self.faults.append(f"{name} is not JSON; write null or leave the row out")

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            self.faults.append(f'the key "{repeated}" stands twice in one object')
        return result


def _lines(content: bytes) -> list[bytes]:
    lines = content.split(b"\n")
    return lines[:-1] if lines[-1] == b"" else lines


def _bytes_mistake(line: bytes) -> str | None:
    """Why a line is not text, before JSON is thought of."""
    if b"\0" in line:
        return f"a NUL byte at byte {line.index(0) + 1}; the file was torn, or is not text"
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        value = line[error.start]
        return f"not UTF-8: byte {error.start + 1} is 0x{value:02x}; save the file as UTF-8"
    return None


def _syntax(error: ValueError, text: str) -> str:
    """One sentence for what Python's reader says."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    if error.pos >= len(text.rstrip(WHITE_SPACE)) or error.msg.startswith("Unterminated string"):
        return "cut off: the JSON ends before it is complete"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {error.colno}"


def _json_lines(content: bytes) -> Iterator[_Line]:
    decoder = _Decoder()
    for number, raw in enumerate(_lines(content), start=1):
        if not raw.strip():
            continue
        mistake = _bytes_mistake(raw)
        yield _Line(number, mistake=mistake) if mistake else _json_line(decoder, number, raw.decode("utf-8"))


def _json_line(decoder: _Decoder, number: int, text: str) -> _Line:
    try:
        value, end, fault = decoder.decode(text, _skip(text, 0))
    except RecursionError:
        return _Line(number, mistake="nested too deeply to be read")
    except ValueError as error:
        return _Line(number, mistake=_syntax(error, text))
    if fault is None and _skip(text, end) < len(text):
        fault = f"more text after the object, at column {_skip(text, end) + 1}; a line holds one object"
    return _Line(number, value, fault)


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in WHITE_SPACE:
        position += 1
    return position


def _list(content: bytes) -> Iterator[_Line]:
    """The elements of one list, each with the line it starts on."""
    mistakes = [_Line(n, mistake=_bytes_mistake(line)) for n, line in enumerate(_lines(content), start=1)]
    mistakes = [line for line in mistakes if line.mistake is not None]
    yield from mistakes
    if not mistakes:
        yield from _elements(content.decode("utf-8"))


def _elements(text: str) -> Iterator[_Line]:
    decoder, number, counted = _Decoder(), 1, 0
    position = _skip(text, _skip(text, 0) + 1)
    while text[position : position + 1] != "]":
        number, counted = number + text.count("\n", counted, position), position
        try:
            value, position, fault = decoder.decode(text, position)
        except RecursionError:
            yield _Line(number, mistake="nested too deeply to be read; the file is not read further")
            return
        except ValueError as error:
            reason = _syntax(error, text)
            if isinstance(error, json.JSONDecodeError) and not reason.startswith("cut off"):
                number = error.lineno
            yield _Line(number, mistake=f"{reason}; the file is not read further")
            return
        yield _Line(number, value, fault)
        position = _skip(text, position)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
            if text[position : position + 1] != "]":
                continue
        elif text[position : position + 1] == "]":
            continue
        number += text.count("\n", counted, position)
        yield _Line(number, mistake=_between(text, position))
        return
    position = _skip(text, position + 1)
    if position < len(text):
        yield _Line(text.count("\n", 0, position) + 1, mistake="more text after the list")


def _between(text: str, position: int) -> str:
    """What is wrong between two elements of a list."""
    if position >= len(text):
        return "cut off: the list has no closing ]"
    if text[position] == "]":
        return "a comma before the closing ]; the file is not read further"
    return f'"," or "]" is expected, "{text[position]}" stands there; the file is not read further'
