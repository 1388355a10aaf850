"""The hostfile that `deepspeed --hostfile` reads: `host slots=n`, one per line. Text in, hosts out, and back;
pure.

Stricter than DeepSpeed, which ignores what follows `slots=n` and takes any word for a host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from dsft.errors import Problem, SpecError
from dsft.spec.hosts import is_host

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def parse(text: str, where: str) -> dict[str, int]:
    """Host -> slots (processes), in the order of the ranks. `where` names the file in messages.

    SpecError with every line that is not `host slots=n`, names no host, repeats one, or gives no slots.
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
            else f"{line.strip()!r} is not `host slots=n`; one host stands on each line"
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
    """The file's text; ranks follow its order."""
    return "".join(f"{host} slots={slots}\n" for host, slots in hosts.items())


def _fault(match: re.Match[str], hosts: Mapping[str, int]) -> str | None:
    host, slots = match[1], int(match[2])
    if not is_host(host):
        return f"{host!r} is neither a host name (letters, digits, '-' and '.') nor an IP address; correct it"
    if host in hosts:
        return f"{host} stands here a second time; give all its slots on one line"
    if slots == 0:
        return f"{host} has 0 slots, a host needs at least 1; leave the line out"
    return None
