"""Expand ranges of host names (`node[01-16]`, `rack[1-2]n[1-4]`, `a,b[1-3]`, as Slurm writes them), and
check a cluster's hosts and environment. Names are not resolved.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dsft.spec.document import Document, quote
from dsft.spec.findings import Finding
from dsft.system.redact import is_secret

if TYPE_CHECKING:  # a rank's start expands names without pydantic
    from dsft.spec.schema import Spec

MOST_HOSTS = 10_000

_PIECE = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")  # up to a comma outside brackets
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:/([1-9][0-9]{0,8}))?)?")


def expand(text: str) -> list[str]:
    """Return the names to which the text expands; duplicates are not removed.

    Raise ValueError, with the reason and what to do, if it is not a list of names, a range runs backwards,
    there are over MOST_HOSTS names, or a name is invalid.
    """
    pieces = _PIECE.findall(text)
    if not pieces or ",".join(pieces) != text:
        raise ValueError(f"{quote(text)} is not a list of hosts; write it like node[01-16] or a,b[1-3]")
    names: list[str] = []
    for piece in pieces:
        parts = [_numbers(match, piece) for match in _PART.finditer(piece)]
        if len(names) + math.prod(map(len, parts)) > MOST_HOSTS:
            raise ValueError(f"{quote(text)} expands to over {MOST_HOSTS} hosts; correct the range")
        names += ("".join(words) for words in itertools.product(*parts))
    for name in names:
        if not is_host(name):
            raise ValueError(
                f"{quote(name)} is neither a host name (letters, digits, '-' and '.') nor an IP address; "
                "correct it"
            )
    return names


def _numbers(match: re.Match[str], piece: str) -> Sequence[str]:
    """Return the texts of one part of a name: the part itself, or the numbers in its brackets."""
    if match[1] is None:
        return [match[2]]
    numbers: list[str] = []
    for words in match[1].split(","):
        found = _RANGE.fullmatch(words)
        if found is None:
            brackets = quote(f"[{match[1]}]")
            raise ValueError(
                f"{brackets} in {quote(piece)} is not a range of numbers; write it like [01-16] or [1-3,7]"
            )
        ends = (found[1], found[2] or found[1])
        first, last, step = int(ends[0]), int(ends[1]), int(found[3] or 1)
        if (last - first) // step >= MOST_HOSTS:  # checked before the range is expanded
            raise ValueError(f"{quote(piece)} expands to over {MOST_HOSTS} hosts; correct the range")
        is_padded = any(len(end) > 1 and end[0] == "0" for end in ends)
        if last < first or (is_padded and len(ends[0]) != len(ends[1])):
            raise ValueError(
                f"[{words}] in {quote(piece)} runs backwards, or a number with a leading zero has more or "
                "fewer digits than the other; write it like [01-16]"
            )
        numbers += (
            f"{number:0{len(ends[0]) if is_padded else 0}}" for number in range(first, last + 1, step)
        )
    return numbers


def expand_hosts(document: Document) -> None:
    """Replace the ranges in the document's `cluster.hosts` by single hosts. Invalid ranges and repeated hosts
    are added to the document's problems, with their lines."""
    cluster = document.data.get("cluster") if isinstance(document.data, dict) else None
    hosts = cluster.get("hosts") if isinstance(cluster, dict) else None
    if not isinstance(cluster, dict) or not isinstance(hosts, dict):
        return
    if not any(_is_range(key) for key in hosts):
        return
    expanded: dict[str, object] = {}
    written: dict[str, str] = {}  # host in lower case, since host names ignore case -> key
    for key, slots in hosts.items():
        path = ("cluster", "hosts", key)
        try:
            names = expand(key) if _is_range(key) else [key]
        except ValueError as error:
            document.problems.append(document.problem(path, str(error)))
            continue
        for name in names:
            other = written.setdefault(name.lower(), key)
            if name in expanded or other != key:
                message = f"{name} is in both {quote(other)} and {quote(key)}; name each host once"
                document.problems.append(document.problem(path, message))
                break
            expanded[name] = slots
            if path in document.locations:
                document.locations.setdefault(("cluster", "hosts", name), document.locations[path])
    cluster["hosts"] = expanded or {"localhost": 1}


def with_ranks(spec: Spec, ranks: int) -> Spec:
    """Return a spec that lists hosts for another number of ranks with as many as `ranks` ranks need, each of
    the largest host's size."""
    if spec.cluster is None or sum(spec.cluster.hosts.values()) == ranks:
        return spec
    slots = max(spec.cluster.hosts.values())
    hosts = {f"host{n}": min(slots, ranks - first) for n, first in enumerate(range(0, ranks, slots))}
    cluster = spec.cluster.model_copy(update={"hosts": hosts, "min_hosts": None})
    return spec.model_copy(update={"cluster": cluster})


def _is_range(key: object) -> bool:
    return isinstance(key, str) and ("[" in key or "]" in key)


def duplicates(names: Sequence[str]) -> Iterator[str]:
    """Yield each repeated name, at every occurrence but the first; case is ignored."""
    seen: set[str] = set()
    for name in names:
        if name.lower() in seen:
            yield name
        seen.add(name.lower())


_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


def is_host(name: str) -> bool:
    """Return whether the text is a host name or an IP address. A name whose last label is only digits must be
    an address (RFC 1123, section 2.1)."""
    if ":" in name:
        return "%" not in name and _is_address(name)
    labels = name.split(".")
    if labels[-1].isdigit() and len(labels) > 1:
        return _is_address(name)
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels) and not name.isdigit()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Variables that the launcher sets for each process.
_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# Characters that a launcher would change: DeepSpeed and pdsh put a value in double quotes without escaping,
# and pdsh expands %h.
_CHANGED = '"$`\\%'


def host_findings(spec: Spec) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    for host in spec.cluster.hosts if spec.cluster else ():
        path = ("cluster", "hosts", host)
        if not is_host(host):
            rule = "is neither a host name (RFC 1123) nor an IP address"
            yield Finding(path, f"{quote(host)} {rule}; write one host per line, such as node1: 8")
        elif host.lower() in seen:
            message = f"{quote(host)} is the same host as {quote(seen[host.lower()])}; keep one of them"
            yield Finding(path, message)
        seen.setdefault(host.lower(), host)


def environment_findings(spec: Spec) -> Iterator[Finding]:
    for name, value in spec.cluster.env.items() if spec.cluster else ():
        path = ("cluster", "env", name)
        if not _VARIABLE.fullmatch(name):
            message = f"{quote(name)} is not a name of an environment variable; use letters, digits and '_'"
            yield Finding(path, message)
        elif is_secret(name.upper(), value):
            rule = "is a secret, and every run's folder contains a copy of the spec"
            yield Finding(path, f"{name} {rule}; set it on the hosts instead")
        elif name in _LAUNCHERS:
            yield Finding(path, f"{name} is set by the launcher for each process; leave it out")
        elif not value.isprintable():
            message = "contains control characters, which a launch script cannot pass on; remove them"
            yield Finding(path, f"{quote(value)} {message}")
        elif set(value) & set(_CHANGED):
            rule = f"contains one of {_CHANGED}, which DeepSpeed's launcher would change on the way to a host"
            yield Finding(path, f"{quote(value)} {rule}; set the variable on the hosts instead")
