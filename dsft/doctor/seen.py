"""All that was seen of a run's hosts, as the checks take it. Plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsft.doctor.needs import Needs
from dsft.doctor.visit import Visits

GIB = 2**30


@dataclass(frozen=True)
class Seen:
    needs: Needs
    visits: Visits

    @property
    def slots(self) -> Mapping[str, int | None]:
        return self.needs.hosts

    def part(self, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(host, what its probe says under that name), of each host that answered and could tell."""
        for host, facts in self.visits.first.items():
            part = facts.get(name)
            if isinstance(part, Mapping) and set(part) != {"fault"}:
                yield host, part

    def on_cpu(self, host: str) -> bool:
        return bool(self.visits.first[host].get("on_cpu"))


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 100 * GIB else f"{size / GIB:,.0f} GiB"


def listed(hosts: list[str]) -> str:
    """Those of a large cluster not all."""
    return ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
