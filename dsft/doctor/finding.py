"""What was seen of a run's hosts, and what the doctor says of one thing on one host. Plain values; touches
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dsft.doctor.needs import Needs
    from dsft.doctor.visit import Visits

Level = Literal["pass", "warning", "failure"]
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """check: its name in docs/doctor.md, such as `port`; host: as the spec names it, None for what is said of
    all of them together; value: what was seen; why: what a run would come to; do: the way out. A failure is
    what a run could not start with."""

    check: str
    host: str | None
    level: Level
    value: str
    why: str = ""
    do: str = ""

    def as_json(self) -> dict[str, str | None]:
        return asdict(self)

    def __str__(self) -> str:
        place = f"{self.check} on {self.host}" if self.host else self.check
        return ": ".join([place, "; ".join(part for part in (self.value, self.why, self.do) if part)])


def passed(check: str, host: str | None, value: str) -> Finding:
    return Finding(check, host, "pass", value)


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Those with which a run could not start."""
    return [finding for finding in findings if finding.level == "failure"]


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
