"""Remove secrets from text that is about to be written or sent.

A secret is the value of an environment variable, of a key or of a command-line option whose name says so
(HF_TOKEN, wandb.api_key, --password), or the part before the @ of a URL. The time is linear in the text's
length.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import IO, Any
from urllib.parse import quote, quote_plus

from dsft.errors import printable

HIDDEN = "(hidden)"  # a plain word in YAML too
_LONGEST = 2**16  # characters of a line that a stream holds
_SHORTEST = 6  # characters; a shorter value of a variable would hide ordinary words

_CERTAIN = re.compile(
    r".*(?:(?:api|access|account|private)[_.-]?key|secret|passw(?:or)?d|passphrase|mysql_pwd|(?<!application_)credentials?|jwt"
    r"|connection[_-]?string|authorization)(?:[_.-]?(?:id|key|value))?",
    re.IGNORECASE,
)
"""Names of values that are secret whatever they are."""
_POSSIBLE = re.compile(r".*token|.*[_.-]key|(?:.*[_.-])?(?:pat|pass|auth)", re.IGNORECASE)
"""Names of values that are secret if they look so: pad_token may be `<pad>`, and sort_key `length`. The value
of a variable, whose name is in capitals, needs only some length."""
_OF_A_VARIABLE = re.compile(rf"(?![<\[])(?s:.{{{_SHORTEST},}})")
_OF_A_KEY = re.compile(r"(?![</.~])(?![+-]?\d*[.,]\d)(?=\S*\d)(?=\S*[^\W\d_])[^\s()\[\]{}]{8,}[)\]},;]*")
_NO_VALUE = re.compile(r"(?:none|null|true|false)?\W*", re.IGNORECASE)

_ASSIGNED = re.compile(
    r"""(?:token|key|pat|secret|passw(?:or)?d|passphrase|mysql_pwd|credentials?|jwt|connection[_-]?string
    |authorization)(?:[_.-]?(?:id|key|value))?(?P<sign>\\*["']?[ \t]*(?:=>|[=:]{1,2})[ \t]*)
    (?P<value>"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?|\\+["'][^"'\n]*
    |(?:(?:bearer|basic|digest|token)[ \t]+)?[^\s"']\S*)""",
    re.IGNORECASE | re.VERBOSE,
)
"""The end of a name, and its value: NAME=value, name: value, "name": "value", {'name': 'value'}."""
_LISTED = re.compile(
    r"""^(?P<before>[ \t]*(?:-[ \t]+)?(?P<name>[\w.-]+):[ \t]+)(?P<value>[^\s"'].*)$""", re.MULTILINE
)
"""A line of YAML, whose value is all that follows."""
_USER_INFO = re.compile(r"""(?<=://)[^/\s"'<>]+(?=@)""")


def redact_values(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` with every value of a secret variable, and the part before the @ of every URL, replaced
    by (hidden). Values after names like wandb.api_key stay, so this is for messages about such keys."""
    for form in _forms(tuple((name, environ[name]) for name in environ if _is_name(name))):
        text = text.replace(form, HIDDEN)
    return _USER_INFO.sub(HIDDEN, text)


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` with every secret replaced by (hidden)."""
    text = _LISTED.sub(_listed, redact_values(text, environ))
    return _ASSIGNED.sub(_assigned, text)


def print_fault(error: BaseException) -> None:
    """Print the traceback of an unexpected exception as Python does, but without the secrets that its text or
    the source lines may contain."""
    text = "".join(traceback.format_exception(error))
    print(printable(redact(text, os.environ)), end="", file=sys.stderr, flush=True)


class RedactedStream(io.TextIOWrapper):
    """A text stream that hides secrets, so in logs, warnings and tracebacks too. What a thread writes waits
    for the end of its line, so that no secret is written in two parts. A progress bar, which begins its
    states with a carriage return, is written when it is flushed."""

    def __init__(self, raw: IO[bytes], encoding: str, errors: str, *, line_buffering: bool) -> None:
        super().__init__(raw, encoding, errors, line_buffering=line_buffering)
        self._of_thread = threading.local()
        atexit.register(self._write_held)

    def write(self, text: str) -> int:
        held = getattr(self._of_thread, "held", "") + text
        end = max(held.rfind("\n"), held.rfind("\r")) + 1
        if len(held) - end > _LONGEST:
            end = len(held)
        self._of_thread.held = held[end:]
        if end:
            self._of_thread.is_bar = held[end - 1] == "\r"
            super().write(redact(held[:end], os.environ))
        return len(text)

    def flush(self) -> None:
        if getattr(self._of_thread, "is_bar", False):
            self._write_held()
        super().flush()

    def _write_held(self) -> None:
        held, self._of_thread.held = getattr(self._of_thread, "held", ""), ""
        super().write(redact(held, os.environ))


def redact_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Redact a command line word by word; the word after an option such as --api-key is a secret too."""
    hidden = [redact(word, environ) for word in words]
    for position, option in enumerate(words[:-1], start=1):
        if option.startswith("-") and is_secret(option.lstrip("-"), words[position]):
            hidden[position] = HIDDEN
    return hidden


def redact_tree(value: Any, environ: Mapping[str, str]) -> Any:
    """Redact nested mappings and lists; string values under keys with a secret name are hidden as a whole."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(entry, str) and is_secret(str(key), entry)
            else redact_tree(entry, environ)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_tree(entry, environ) for entry in value]
    return redact(value, environ) if isinstance(value, str) else value


def one_line(error: Exception) -> str:
    """Return the text of an error in one line of at most 200 characters, without secrets."""
    words = redact(" ".join(str(error).split()), os.environ) or type(error).__name__
    return words if len(words) <= 200 else f"{words[:199]}…"  # cut last: half a secret is not recognized


@lru_cache
def _is_name(name: str) -> bool:
    return bool(_CERTAIN.fullmatch(name) or _POSSIBLE.fullmatch(name))


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a variable or key of this name is a secret."""
    if _CERTAIN.fullmatch(name):
        return not _NO_VALUE.fullmatch(value)
    shape = _OF_A_VARIABLE if name.isupper() else _OF_A_KEY
    return bool(_POSSIBLE.fullmatch(name) and shape.fullmatch(value))


@lru_cache
def _forms(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the forms in which secret values of variables may appear, the longest first: their lines, also
    as Python and JSON quote them and as URLs encode them."""
    values = [value for name, value in variables if is_secret(name.upper(), value)]
    forms = set()
    for line in {line.strip() for value in values for line in (value, *value.splitlines())}:
        forms |= {line, repr(line)[1:-1], json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1]}
        encoded = line.encode(errors="surrogateescape")
        forms |= {quote(encoded), quote(encoded, safe=""), quote_plus(encoded)}
    return tuple(sorted((form for form in forms if len(form) >= _SHORTEST), key=len, reverse=True))


def _listed(found: re.Match[str]) -> str:
    return found["before"] + HIDDEN if is_secret(found["name"], found["value"]) else found[0]


def _assigned(found: re.Match[str]) -> str:
    text, end, value = found.string, found.start("sign"), found["value"]
    start = end
    while start > max(0, end - 100) and (text[start - 1].isalnum() or text[start - 1] in "_.-"):
        start -= 1
    bare = value.strip("\\\"'")
    is_word = ":" in found["sign"] and value[:1] == bare[:1] and len(bare) < _SHORTEST  # as in `token: str`
    if is_word or not is_secret(text[start:end].lstrip("-."), bare):
        return found[0]
    return found[0].removesuffix(value) + value.replace(bare, HIDDEN)
