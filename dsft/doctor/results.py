"""The result of one check (`CheckResult`) and what the checks read (`ProbeResults`). Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dsft.doctor.hosts import ProbeAnswers
    from dsft.doctor.needs import Needs

Level = Literal["pass", "warning", "failure"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check, on one host or on all together.

    check  its name in docs/doctor.md, such as `port`
    host   as named in the spec; None: all hosts together
    level  failure: a run could not start
    value  what was found
    why    the consequence for a run
    do     the remedy
    """

    check: str
    host: str | None
    level: Level
    value: str
    why: str = ""
    do: str = ""

    def __str__(self) -> str:
        place = f"{self.check} on {self.host}" if self.host else self.check
        return ": ".join([place, "; ".join(part for part in (self.value, self.why, self.do) if part)])


def passed(check: str, host: str | None, value: str) -> CheckResult:
    return CheckResult(check, host, "pass", value)


def failures(findings: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the findings that would stop a run from starting."""
    return [finding for finding in findings if finding.level == "failure"]


@dataclass(frozen=True)
class ProbeResults:
    """What the doctor was to check, and what the hosts answered."""

    needs: Needs
    answers: ProbeAnswers

    @property
    def slots(self) -> Mapping[str, int | None]:
        return self.needs.hosts

    def part(self, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (host, that part of its probe's answer) for each host that answered and whose part did not
        fail."""
        for host, facts in self.answers.first.items():
            part = facts.get(name)
            if isinstance(part, Mapping) and set(part) != {"fault"}:
                yield host, part

    def on_cpu(self, host: str) -> bool:
        return bool(self.answers.first[host].get("on_cpu"))


def listed(hosts: list[str]) -> str:
    """Join host names with commas; beyond eight, only their number."""
    return ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
