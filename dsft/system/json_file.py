"""Read a JSON file that may be damaged or malicious. Size and nesting depth are limited, so that such a file
cannot exhaust the memory or the stack of the process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 64 * 2**20
"""Default limit in bytes. The largest files that dsft writes are a checkpoint's state.json, with about 110
bytes per parameter, and MANIFEST.json, with about 150 bytes per rank: 130 kB for the 1,137 parameters of
Llama 3.1 405B, 8 MB for a mixture of experts with 70,000 matrices, 2.5 MB for 16,384 ranks."""

DEPTH = 100
"""Limit of nested lists and objects. No file that dsft writes or reads has more than 20 levels."""

Pairs = Callable[[list[tuple[str, Any]]], Any]


def read_json(path: Path, limit: int = LIMIT, *, object_pairs_hook: Pairs | None = None) -> Any:
    """Read at most `limit` bytes and return the value. `object_pairs_hook` is that of `json.loads`; what it
    raises passes through, unless it is a ValueError.

    Raises ValueError with a clause that follows the file's name ("is not JSON at line 1, column 2: …") where
    the file is too large, is not UTF-8, is not JSON, is nested too deeply, or holds a number that is not
    finite or has thousands of digits. Raises OSError where it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"is larger than {limit:,} bytes")
    try:
        value = json.loads(
            content.decode("utf-8"),
            parse_float=_finite,
            parse_constant=_finite,
            object_pairs_hook=object_pairs_hook,
        )
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"is nested more than {DEPTH} levels deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):  # sys.get_int_max_str_digits()
            raise ValueError("holds an integer of thousands of digits") from None
        raise
    if _is_deeper(value, DEPTH):
        raise ValueError(f"is nested more than {DEPTH} levels deep")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {text[:20]}, which is not finite")
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested more than `depth` levels deep; without recursion."""
    level = [value]
    for _ in range(depth + 1):
        level = [one for one in level if isinstance(one, (dict, list))]
        if not level:
            return False
        level = [below for one in level for below in (one.values() if isinstance(one, dict) else one)]
    return True
