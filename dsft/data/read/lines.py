"""Read the lines of a text file, or of a range of its bytes, and check that they are UTF-8 text.

Only one line is in memory at a time.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # U+FEFF in UTF-8, as some editors write at the start of a file
BLOCK_BYTES = 32 << 20
MAX_LINE = 32 << 20
"""Maximum bytes of a row: about eight million tokens."""
TOO_LONG = f"{{}}, but a row may have {MAX_LINE:,} at most; split it into several rows"
STOPS = "; the rest of the file is not read"
DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)
"""Errors that reading a compressed file raises if it is truncated, damaged or of another kind."""
_CHUNK = 1 << 20
_BLANK = " \t\n\r\v\f"


def open_bytes(path: Path, *, compressed: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if compressed else path.open("rb")


def first_bytes(path: Path, *, compressed: bool) -> bytes:
    """Return some bytes of a file that contain its first byte that is not white space; all of them white
    space if it has none, b"" if it is damaged."""
    with open_bytes(path, compressed=compressed) as opened:
        try:
            first = part = opened.read(_CHUNK)
            while part and not part.strip():
                part = opened.read(_CHUNK)
        except DAMAGED:
            return b""
    return first if first is part else first + part


def block_starts(path: Path, every: int = BLOCK_BYTES) -> list[int]:
    """Return where the blocks of a file start, in bytes: at the first line after each multiple of `every`
    bytes. Only the bytes between a multiple and the next line break are read."""
    size = path.stat().st_size
    starts = [0]
    with path.open("rb") as opened:
        mark = every
        while mark < size:
            opened.seek(mark - 1)
            start = mark - 1 + _skip_line(opened)  # the line that begins after the mark
            if start < size:
                starts.append(start)
            mark = (max(mark, start) // every + 1) * every
    return starts


def lines(
    path: Path, start: int = 0, stop: int | None = None, *, compressed: bool = False
) -> Iterator[tuple[str, str | None]]:
    """Yield (text, None) for each line, without its line break, or (the readable part, reason) for a line
    that is not text. start, stop: in bytes, both at the start of a line. A byte order mark is skipped."""
    left = stop - start if stop is not None else None
    with open_bytes(path, compressed=compressed) as opened:
        opened.seek(start)
        while left is None or left > 0:
            try:
                raw = opened.readline(MAX_LINE + 1)
                is_long = len(raw) > MAX_LINE and not raw.endswith(b"\n")
                size = len(raw) + (_skip_line(opened) if is_long else 0)
            except DAMAGED as error:
                yield "", damaged(error)
                return
            if not raw:
                return
            if left is not None:
                left -= size
            if start == 0:
                raw, start = raw.removeprefix(BYTE_ORDER_MARK), 1
            if is_long and b"\0" not in raw:  # a hole in a damaged file is a long line of NUL bytes
                yield "", TOO_LONG.format(f"the line has {size:,} bytes")
            else:
                yield decode_line(raw)


def damaged(error: Exception) -> str:
    """Return the reason why a compressed file cannot be read further."""
    if isinstance(error, EOFError):
        return "cut off: the compressed file ends before it is complete"
    return f"not gzip, or damaged: {error}{STOPS}"


def decode_line(raw: bytes) -> tuple[str, str | None]:
    """Return (text, None), without the line break, or (the readable part, reason) for a line that is not
    text."""
    raw, reason = raw.removesuffix(b"\n"), None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        text = raw.decode("utf-8", "replace")
        reason = f"not UTF-8: byte {error.start + 1} is 0x{raw[error.start]:02x}; save the file as UTF-8"
    if b"\0" in raw:
        reason = f"a NUL byte at byte {raw.index(0) + 1}; the file is damaged, or is not text"
    return text, reason


def is_blank(text: str) -> bool:
    """Return whether a line has only ASCII white space, as bytes.strip() defines it."""
    return not text.strip(_BLANK)


def _skip_line(opened: IO[bytes]) -> int:
    """Skip to the end of the current line and return the number of bytes skipped."""
    size = 0
    while True:
        part = opened.readline(_CHUNK)
        size += len(part)
        if not part or part.endswith(b"\n"):
            return size
