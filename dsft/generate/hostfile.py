"""Parse and render the hostfile that `deepspeed --hostfile` reads: `host slots=n`, one per line.

Stricter than DeepSpeed, which ignores the rest of a line after `slots=n` and accepts any word as a host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsft.errors import Problem, SpecError
from dsft.spec.document import quote
from dsft.spec.hosts import duplicates, expand, is_host
from dsft.system.json_file import read_text

_LARGEST = 2**24  # bytes, for some hundred thousand hosts
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Parse a hostfile. Raises as `parse` does, SpecError too where it is too large or not UTF-8, and
    OSError where it cannot be read or is no regular file."""
    try:
        text = read_text(path, _LARGEST)
    except ValueError as error:
        raise SpecError("The hostfile cannot be used.", [Problem(str(path), f"it {error}")]) from None
    return parse(text, str(path))


def parse(text: str, where: str) -> dict[str, int]:
    """Parse a hostfile: host -> slots (processes), in rank order. `where` names the file in messages.

    Raise SpecError for all lines that are not `host slots=n`, have no valid host, repeat a host, or give 0
    slots.
    """
    hosts: dict[str, int] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        reason = (
            _fault(match, hosts)
            if match
            else f"{line.strip()!r} is not `host slots=n`; write one host per line"
        )
        if reason:
            problems.append(Problem(f"{where}:{number}", reason))
        elif match:
            hosts[match[1]] = int(match[2])
    if not hosts and not problems:
        problems.append(Problem(where, "no host in the file; write one `host slots=n` per line"))
    if problems:
        raise SpecError("The hostfile cannot be used.", problems)
    return hosts


def render(hosts: Mapping[str, int]) -> str:
    """Return the hostfile's text; its order is the order of the ranks."""
    return "".join(f"{host} slots={slots}\n" for host, slots in hosts.items())


def of_words(words: Sequence[str], slots: int | None) -> dict[str, int]:
    """Expand words such as `node[01-16]:8` to host -> slots. If `slots` is given, the words are names without
    a number, and each host gets `slots`.

    Raise SpecError for all words that are not of that form, have an invalid or repeated host, or give 0
    slots.
    """
    hosts: dict[str, int] = {}
    problems = []
    for word in words:
        try:
            names, count = _of_word(word, slots)
            again = next(duplicates([*hosts, *names]), None)
            if again is not None:
                raise ValueError(f"{again} is given twice; name each host once")
        except ValueError as error:
            problems.append(Problem(quote(word), str(error)))
            continue
        hosts |= dict.fromkeys(names, count)
    if problems:
        raise SpecError("These hosts cannot be used.", problems)
    return hosts


def _of_word(word: str, slots: int | None) -> tuple[list[str], int]:
    """Expand one word to (hosts, slots per host). Raise ValueError with the reason if it is invalid."""
    names, colon, number = word.rpartition(":")
    if slots is not None:
        if colon and ":" not in names and number.isdecimal():
            raise ValueError(f"has a number of slots, as --processes {slots} does; leave one of them out")
        return expand(word), slots
    if not colon:
        raise ValueError("has no number of slots; write it like node[01-16]:8, or give --processes")
    if not re.fullmatch(r"[0-9]{1,6}", number):
        raise ValueError(f"{quote(number)} is not a number of slots; write it like node[01-16]:8")
    if int(number) == 0:
        raise ValueError("a host needs at least 1 slot; write it like node[01-16]:8")
    return expand(names), int(number)


def _fault(match: re.Match[str], hosts: Mapping[str, int]) -> str | None:
    host, slots = match[1], int(match[2])
    if not is_host(host):
        return f"{host!r} is neither a host name (letters, digits, '-' and '.') nor an IP address; correct it"
    if host in hosts:
        return f"{host} is on an earlier line too; give all its slots on one line"
    if slots == 0:
        return f"{host} has 0 slots, but a host needs at least 1; leave the line out"
    return None
