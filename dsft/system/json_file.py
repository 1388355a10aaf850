"""Read text and JSON files that may be damaged or malicious. Size, nesting depth and numbers are limited,
so that no file can exhaust the memory or the stack of the process, or make it wait."""

from __future__ import annotations

import errno
import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

LIMIT = 64 * 2**20
"""Default limit in bytes. The largest files that dsft writes are a checkpoint's state.json, with about 110
bytes per parameter, and MANIFEST.json, with about 150 bytes per rank: 130 kB for the 1,137 parameters of
Llama 3.1 405B, 8 MB for a mixture of experts with 70,000 matrices, 2.5 MB for 16,384 ranks."""

LARGEST_TEXT = 256 * 2**20
"""Limit in bytes of what libraries read of a model's folder; the largest tokenizer.json have about 40 MB."""

DEPTH = 100
"""Limit of nested lists and objects. No file that dsft writes or reads has more than 20 levels."""

DIGITS = 300
"""Limit of an integer's digits, so that it has a value as a float; the largest float has 309."""

Pairs = Callable[[list[tuple[str, Any]]], Any]


def open_file(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError, also for a device, a named pipe or a socket: reading
    one could wait or never end."""
    if special := special_kind(path):
        raise OSError(errno.EINVAL, f"it is {special}, not a file", str(path))
    return path.open("rb")


def special_kind(path: Path) -> str | None:
    """Return what a path is where it is neither a file nor a folder; None where it is, or does not exist."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def unfit_file(place: Path) -> str | None:
    """Return a clause about the first entry of a folder, or about a file, that cannot be given to a library
    which reads it without a limit: neither a file nor a folder, or a text, template or vocabulary larger than
    LARGEST_TEXT; None if all can."""
    for path in sorted(place.iterdir()) if place.is_dir() else (place,):
        if special := special_kind(path):
            return f"{path} is {special}, not a file"
        if (
            path.suffix in (".json", ".jinja", ".model")
            and path.is_file()
            and path.stat().st_size > LARGEST_TEXT
        ):
            return f"{path} is larger than {LARGEST_TEXT:,} bytes"
    return None


def read_text(path: Path, limit: int = LIMIT) -> str:
    """Return the text of a file of at most `limit` bytes, without a byte order mark.

    Raises ValueError with a clause that follows the file's name where it is larger or not UTF-8, OSError
    where it cannot be read or is no regular file.
    """
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"is larger than {limit:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def reason_of(error: OSError | ValueError) -> str:
    """Return the clause of an error of `read_text` or `read_json`, which follows the file's name."""
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def read_json(path: Path, limit: int = LIMIT, *, object_pairs_hook: Pairs | None = None) -> Any:
    """Return the value in a JSON file. Raises as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, limit), object_pairs_hook=object_pairs_hook)


def parse_json(text: str, *, object_pairs_hook: Pairs | None = None) -> Any:
    """Return the value of a JSON text. `object_pairs_hook` is that of `json.loads`; what it raises passes
    through.

    Raises ValueError with a clause that follows the file's name ("is not JSON at line 1, column 2: …") where
    the text is not JSON, is nested too deeply, or holds a number that is not finite or has too many digits.
    """
    try:
        value = json.loads(
            text,
            parse_float=_finite,
            parse_constant=_finite,
            parse_int=_integer,
            object_pairs_hook=object_pairs_hook,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"is nested more than {DEPTH} levels deep") from None
    if _is_deeper(value, DEPTH):
        raise ValueError(f"is nested more than {DEPTH} levels deep")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {text[:20]}, which is not finite")
    return value


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"holds an integer of more than {DIGITS} digits")
    return int(text)


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested more than `depth` levels deep; without recursion."""
    level = [value]
    for _ in range(depth + 1):
        level = [one for one in level if isinstance(one, (dict, list))]
        if not level:
            return False
        level = [below for one in level for below in (one.values() if isinstance(one, dict) else one)]
    return True
