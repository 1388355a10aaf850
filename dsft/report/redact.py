"""Remove secrets from text that is about to be written or sent.

A secret is the value of an environment variable, of a key or of a command-line option whose name says so
(HF_TOKEN, wandb.api_key, --password), or the part before the @ of a URL.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from dsft.errors import printable

HIDDEN = "(hidden)"  # a plain word in YAML too
_NAME = (
    r"(?:[\w.-]*[_.-])?(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)"  # special tokens of a tokenizer are not secrets
    r"(?:token|api[_-]?key|access[_-]?key|secret|password|passwd|credentials?)(?:[_.-](?:id|key|value))?"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?P<name>(?<![\w.-])-{{0,2}}{_NAME})=\S+", re.IGNORECASE)
_LISTED = re.compile(rf"^(?P<name>\s*['\"]?{_NAME}['\"]?): +\S.*$", re.IGNORECASE | re.MULTILINE)  # YAML
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SHORTEST = 6  # characters; a shorter value would hide ordinary words


def redact_values(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` with every value of a secret variable, and the part before the @ of every URL, replaced
    by (hidden). Values after names like wandb.api_key stay, so this is for messages about such keys."""
    for value in sorted(_values(environ), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _USER_INFO.sub(HIDDEN, text)


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Return `text` with every secret replaced by (hidden)."""
    text = redact_values(text, environ)
    text = _ASSIGNED.sub(lambda found: f"{found['name']}={HIDDEN}", text)
    return _LISTED.sub(lambda found: f"{found['name']}: {HIDDEN}", text)


def print_fault(error: BaseException) -> None:
    """Print the traceback of an unexpected exception as Python does, but without the secrets that its text or
    the source lines may contain."""
    text = "".join(traceback.format_exception(error))
    print(printable(redact(text, os.environ)), end="", file=sys.stderr, flush=True)


def redact_threads() -> None:
    """Print the tracebacks of threads with `print_fault` from now on."""

    def hook(fault: threading.ExceptHookArgs) -> None:
        if fault.exc_value is not None and not isinstance(fault.exc_value, SystemExit):
            print_fault(fault.exc_value)

    threading.excepthook = hook


def redact_command(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Redact a command line word by word; the word after an option such as --api-key is a secret too."""
    hidden = [redact(word, environ) for word in words]
    for position, option in enumerate(words[:-1]):
        if option.startswith("-") and _SECRET_NAME.fullmatch(option.lstrip("-")):
            hidden[position + 1] = HIDDEN
    return hidden


def redact_tree(value: Any, environ: Mapping[str, str]) -> Any:
    """Redact nested mappings and lists; string values under keys with a secret name are hidden as a whole."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(entry, str) and _SECRET_NAME.fullmatch(str(key))
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


def _values(environ: Mapping[str, str]) -> set[str]:
    return {
        value for name, value in environ.items() if _SECRET_NAME.fullmatch(name) and len(value) >= _SHORTEST
    }
