"""How many processes may come of a promise where hosts may be missing. Takes hosts and slots, gives numbers;
pure."""

from __future__ import annotations

from collections.abc import Mapping


def worlds(hosts: Mapping[str, int], fewest: int) -> dict[int, frozenset[int]]:
    """Number of hosts (`fewest` to all) -> the numbers of processes that so many of them have."""
    sums: list[set[int]] = [{0}, *(set[int]() for _ in hosts)]
    if len(set(hosts.values())) == 1:  # the usual case, at any number of hosts
        slots = next(iter(hosts.values()))
        return {count: frozenset({count * slots}) for count in range(fewest, len(hosts) + 1)}
    for slots in hosts.values():
        for count in range(len(hosts), 0, -1):
            sums[count] |= {total + slots for total in sums[count - 1]}
    return {count: frozenset(sums[count]) for count in range(fewest, len(hosts) + 1)}
