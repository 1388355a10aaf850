"""Read JSON Lines, and lists of JSON objects, strictly.

Each object has the line it starts on, and so has each mistake. The encoding is UTF-8; a byte order mark and
blank lines are skipped. Everything else that RFC 8259 does not allow is a mistake, as are NaN, Infinity, a
repeated key and a row that is not an object. After a mistake, reading of JSON Lines continues with the next
line; reading of a list continues if its syntax is still intact.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from dsft.data.read.lines import (
    BYTE_ORDER_MARK,
    DAMAGED,
    MAX_LINE,
    TOO_LONG,
    damaged,
    first_bytes,
    is_blank,
    open_bytes,
    text_mistakes,
)
from dsft.data.rows import Line

WHITE_SPACE = " \t\n\r"  # RFC 8259, section 2
_WHITE_SPACE = re.compile(f"[{WHITE_SPACE}]*")
_NOT_FURTHER = "the file is not read further"
_OPENED = {
    "{": f"an object over several lines; write one a line, or a list of them as .json; {_NOT_FURTHER}",
    "[": f"a list over several lines; give the file the ending .json; {_NOT_FURTHER}",
}
_CHUNK = 1 << 20


def json_lines(texts: Iterable[tuple[str, str | None]]) -> Iterator[Line]:
    """Yield the rows of a JSON Lines file, given what `lines` yields. A first line that is only a bracket or
    brace begins JSON over several lines, which is one mistake instead of one per line."""
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
    """Yield the elements of a list, each with the line it starts on. Memory is bounded by a megabyte or twice
    the longest element, whatever the file's size."""
    number = 1
    try:
        with open_bytes(path, compressed=compressed) as opened:
            for line in _elements(_Text(opened)):
                number = line.number
                yield line
    except DAMAGED as error:
        yield Line(number, mistake=damaged(error))
    except _NoTextError:
        with open_bytes(path, compressed=compressed) as opened:
            yield from (Line(number, mistake=mistake) for number, mistake in text_mistakes(opened))


def json_type(value: object) -> str:
    """Return the JSON type of a value in words, for messages."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {str: "a string", list: "a list", dict: "an object", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


class _Decoder:
    """A json.JSONDecoder that records what Python's parser accepts although it is not JSON."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._decoder = json.JSONDecoder(
            object_pairs_hook=self._object, parse_constant=self._constant, strict=True
        )

    def decode(self, text: str, start: int) -> tuple[object, int, str | None]:
        """Return the value at `start`, the position after it, and what is wrong with it, if anything."""
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


def _line(number: int, value: object, fault: str | None) -> Line:
    if fault is None and not isinstance(value, dict):
        fault = f"the row is {json_type(value)}, not an object of columns and values"
    return Line(number, mistake=fault) if fault is not None else Line(number, row=value)  # type: ignore[arg-type]


def _json_line(decoder: _Decoder, number: int, text: str) -> Line:
    try:
        value, end, fault = decoder.decode(text, _skip(text, 0))
    except RecursionError:
        return Line(number, mistake="nested too deeply to be read")
    except ValueError as error:
        return Line(number, mistake=_syntax(error, text))
    after = _skip(text, end)
    if fault is None and after < len(text):
        fault = f"more text after the object, at column {after + 1}; a line holds one object"
    return _line(number, value, fault)


def _syntax(error: ValueError, text: str, column: int | None = None) -> str:
    """Return the message for an error of Python's parser."""
    if not isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    if error.pos >= len(text.rstrip(WHITE_SPACE)) or error.msg.startswith("Unterminated string"):
        return "cut off: the JSON ends before it is complete"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:]} at column {column or error.colno}"


def _skip(text: str, position: int) -> int:
    found = _WHITE_SPACE.match(text, position)
    return found.end() if found else position


# --- a list -----------------------------------------------------------------------------------------------


class _NoTextError(Exception):
    """The file has bytes that are not UTF-8, or NUL bytes."""


class _Text:
    """A buffered reader of a file's text. The unread text is `buffer` from `position` on; line and column,
    from 1, are those of the position."""

    def __init__(self, opened: IO[bytes]) -> None:
        self.buffer, self.position, self.at_end = "", 0, False
        self.line = self.column = 1
        self._opened = opened
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()  # skips a byte order mark

    @property
    def is_whole(self) -> bool:
        """Whether reading on is of no use: the file is at its end, or the element exceeds MAX_LINE."""
        return self.at_end or len(self.buffer) - self.position > MAX_LINE

    def more(self) -> None:
        """Drop the text before the position, and read as much as remains (at least _CHUNK bytes)."""
        self.buffer, self.position = self.buffer[self.position :], 0
        part = self._opened.read(max(_CHUNK, len(self.buffer)))
        self.at_end = not part
        try:
            self.buffer += self._decoder.decode(part, final=self.at_end)
        except UnicodeDecodeError as error:
            raise _NoTextError from error
        if b"\0" in part:
            raise _NoTextError

    def move(self, position: int) -> None:
        """Advance to a position of the buffer."""
        breaks = self.buffer.count("\n", self.position, position)
        self.line += breaks
        start = self.buffer.rindex("\n", 0, position) if breaks else self.position - self.column
        self.column, self.position = position - start, position

    def next(self) -> str:
        """Advance to the next character that is not white space, and return it; "" at the end."""
        self.move(_skip(self.buffer, self.position))
        while self.position == len(self.buffer) and not self.at_end:
            self.more()
            self.move(_skip(self.buffer, self.position))
        return self.buffer[self.position : self.position + 1]


def _elements(text: _Text) -> Iterator[Line]:
    decoder = _Decoder()
    text.next()
    text.move(text.position + 1)  # the bracket
    is_empty = text.next() == "]"
    while not is_empty:
        line = _element(decoder, text)
        yield line
        if line.mistake is not None and line.mistake.endswith(_NOT_FURTHER):
            return
        character = text.next()
        if character == "]":
            break
        if character == ",":
            text.move(text.position + 1)
            if text.next() != "]":
                continue
            reason = f"a comma before the closing ]; {_NOT_FURTHER}"
        elif character:
            reason = f'"," or "]" is expected, "{character}" stands there; {_NOT_FURTHER}'
        else:
            reason = "cut off: the list has no closing ]"
        yield Line(text.line, mistake=reason)
        return
    text.move(text.position + 1)
    if text.next():
        yield Line(text.line, mistake="more text after the list")


def _element(decoder: _Decoder, text: _Text) -> Line:
    """Read the element at the text's position and advance past it. An apparent error may be an element cut
    off by the end of the buffer, so it counts only if there is no more text to read."""
    number = text.line
    while True:
        try:
            value, end, fault = decoder.decode(text.buffer, text.position)
        except RecursionError:
            return Line(number, mistake=f"nested too deeply to be read; {_NOT_FURTHER}")
        except ValueError as error:
            if text.is_whole:
                return _broken(error, text)
        else:
            after = _skip(text.buffer, end)
            if text.is_whole or text.buffer[after : after + 1] in (",", "]"):
                break
        text.more()
    if end - text.position > MAX_LINE:
        fault = TOO_LONG.format(f"the element has {end - text.position:,} characters")
    text.move(end)
    return _line(number, value, fault)


def _broken(error: ValueError, text: _Text) -> Line:
    """Return the Line for an unreadable element at the text's position."""
    number = text.line
    text.move(error.pos if isinstance(error, json.JSONDecodeError) else text.position)
    reason = _syntax(error, text.buffer, text.column)
    if not reason.startswith("cut off"):
        number = text.line
    elif not text.at_end:
        reason = TOO_LONG.format(f"the element has over {MAX_LINE:,} characters")
    return Line(number, mistake=f"{reason}; {_NOT_FURTHER}")
