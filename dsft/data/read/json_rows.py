"""Read JSON Lines, and lists of JSON objects, strictly.

Each object has the line it starts on, and so has each mistake; the objects of a list that is a single line
have their number in it. The encoding is UTF-8; a byte order mark and blank lines are skipped. Everything else
that RFC 8259 does not allow is a mistake, as are NaN, Infinity, a repeated key and a row that is not an
object. After a mistake, reading of JSON Lines continues with the next line; reading of a list continues if
its syntax is still intact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsft.data.read.lines import (
    BYTE_ORDER_MARK,
    DAMAGED,
    MAX_LINE,
    STOPS,
    TOO_LONG,
    damaged,
    decode_line,
    first_bytes,
    is_blank,
    open_bytes,
)
from dsft.data.rows import Line

WHITE_SPACE = " \t\n\r"  # RFC 8259, section 2
_WHITE_SPACE = re.compile(f"[{WHITE_SPACE}]*")
_BEGIN = re.compile(f"[{WHITE_SPACE}]*\\[[{WHITE_SPACE}]*(\\]?)[{WHITE_SPACE}]*")
_SEPARATOR = re.compile(f"[{WHITE_SPACE}]*([],])[{WHITE_SPACE}]*")
_OPENED = {
    "{": f"an object over several lines; write one object per line, or a list in a .json file{STOPS}",
    "[": f"a list over several lines; rename the file to .json{STOPS}",
}


def json_lines(texts: Iterable[tuple[str, str | None]]) -> Iterator[Line]:
    """Yield the rows of a JSON Lines file, given what `lines` yields. If the first line is only a bracket or
    brace, the file is one JSON value over several lines: yield one mistake for it, not one for each line."""
    decoder, is_first = _Decoder(), True
    for number, (text, mistake) in enumerate(texts, start=1):
        if mistake is not None or is_blank(text):
            yield Line(number, mistake=mistake)
        elif is_first and text.strip(WHITE_SPACE) in _OPENED:
            yield Line(number, mistake=_OPENED[text.strip(WHITE_SPACE)])
            return
        else:
            yield _json_line(decoder, number, text)
        is_first = is_first and is_blank(text)


def is_list(path: Path, *, compressed: bool = False) -> bool:
    """Return whether a .json file begins with a bracket, so that it contains a list and not lines."""
    return first_bytes(path, compressed=compressed).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def json_list(path: Path, *, compressed: bool = False) -> Iterator[Line]:
    """Yield the elements of a list, each with the line it starts on, or its number in the list if all are on
    one line. The file is read whole."""
    try:
        with open_bytes(path, compressed=compressed) as opened:
            content = opened.read().removeprefix(BYTE_ORDER_MARK)
        if b"\0" in content:
            raise UnicodeError
        text = content.decode()
    except DAMAGED as error:
        yield Line(1, mistake=damaged(error))
    except UnicodeError:
        lines = enumerate(map(decode_line, content.split(b"\n")), start=1)
        yield from (Line(number, mistake=mistake) for number, (_, mistake) in lines if mistake is not None)
    else:
        yield from _elements(text)


def json_type(value: object) -> str:
    """Return the JSON type of a value in words, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


class _Decoder:
    """A json.JSONDecoder that records what Python's parser accepts although it is not JSON."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, strict=True
        )

    def decode(self, text: str, start: int) -> tuple[object, int, str | None]:
        """Return the value at `start`, the position after it, and what is wrong with it, if anything."""
        self.mistakes.clear()
        value, end = self._decoder.raw_decode(text, start)
        return value, end, self.mistakes[0] if self.mistakes else None

    def _constant(self, name: str) -> None:
        self.mistakes.append(f"{name} is not JSON; write null, or remove the row")

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            self.mistakes.append(f'the key "{repeated}" appears twice in one object')
        return result


def _line(number: int, value: object, mistake: str | None) -> Line:
    if mistake is None and not isinstance(value, dict):
        mistake = f"the row is {json_type(value)}, not an object of columns and values"
    return Line(number, mistake=mistake) if mistake is not None else Line(number, row=value)  # type: ignore[arg-type]


def _json_line(decoder: _Decoder, number: int, text: str) -> Line:
    try:
        value, end, mistake = decoder.decode(text, _skip(text, 0))
    except RecursionError:
        return Line(number, mistake="nested too deeply to be read")
    except ValueError as error:
        return Line(number, mistake=_syntax(error, text))
    after = _skip(text, end)
    if mistake is None and after < len(text):
        mistake = f"more text after the object, at column {after + 1}; write one object per line"
    return _line(number, value, mistake)


def _syntax(error: ValueError, text: str) -> str:
    """Return the message for an error of Python's parser."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    if error.pos >= len(text.rstrip(WHITE_SPACE)) or error.msg.startswith("Unterminated string"):
        return "cut off: the JSON ends before it is complete"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {error.colno}"


def _skip(text: str, position: int) -> int:
    found = _WHITE_SPACE.match(text, position)
    return found.end() if found else position


def _elements(text: str) -> Iterator[Line]:
    """Yield the elements of a list, given its text, up to the first mistake of its syntax."""
    decoder, separator = _Decoder(), _BEGIN.match(text)
    position = end = 0
    is_one_line = "\n" not in text.strip(WHITE_SPACE)
    number = 0 if is_one_line else 1  # of the element at `position`, or of its line
    while separator is not None and separator[1] != "]":
        number += 1 if is_one_line else text.count("\n", position, separator.end())
        position = separator.end()
        try:
            value, end, mistake = decoder.decode(text, position)
        except RecursionError:
            yield Line(number, mistake=f"nested too deeply to be read{STOPS}")
            return
        except ValueError as error:
            is_last = text[position : position + 1] == "]"
            reason = "a comma before the closing ]" if is_last else _syntax(error, text)
            at = number if is_one_line else getattr(error, "lineno", number)
            yield Line(at, mistake=f"{reason}{STOPS}")
            return
        if end - position > MAX_LINE:
            mistake = TOO_LONG.format(f"the element has {end - position:,} characters")
        yield _line(number, value, mistake)
        separator = _SEPARATOR.match(text, end)
    after = separator.end() if separator else _skip(text, end)
    number += text.count("\n", position, after)
    if separator is None:
        reason = f'"{text[after]}" where "," or "]" is expected{STOPS}' if text[after:] else ""
        yield Line(number, mistake=reason or "cut off: the list has no closing ]")
    elif separator.end() < len(text):
        yield Line(number, mistake="more text after the list")
