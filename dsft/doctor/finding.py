"""What the doctor says of one thing on one host. Plain values; touches nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["pass", "warning", "failure"]


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
