"""How links are judged, from figures made by hand; and measured once, between addresses of this machine."""

from __future__ import annotations

import random
import socket
from collections.abc import Mapping
from datetime import timedelta

import pytest

from dsft.doctor.links import (
    ALL_PAIRS,
    AllReduce,
    Link,
    Network,
    judged,
    measure,
    pairs_of,
    ranks_of,
    sizes_for,
)
from dsft.doctor.show import network_lines


def links_of(speeds: Mapping[tuple[str, str], float | None], round_trip: float = 1e-4) -> list[Link]:
    """(sender, receiver) -> Gbit/s; None: dead."""
    return [
        Link(one, other, "e0", other, None, None, "timed out")
        if gbit is None
        else Link(one, other, "e0", other, round_trip, gbit)
        for (one, other), gbit in speeds.items()
    ]


def all_of(names: str, gbit: float = 10.0) -> dict[tuple[str, str], float | None]:
    return {(one, other): gbit for one in names for other in names if one != other}


def found(links: list[Link], expected: float = 1.0, given: bool = False) -> list[tuple[str, str]]:
    return [(f.level, f.value.partition(":")[0]) for f in judged(links, expected, given=given)]


def test_a_healthy_network_is_one_finding() -> None:
    [finding] = judged(links_of(all_of("abcd")), 1.0, given=False)
    assert finding.level == "pass"
    assert finding.value == "12 directions, 10 to 10 Gbit/s, round trips of 0.1 to 0.1 ms"


def test_links_of_one_speed_are_not_named_for_their_noise() -> None:
    draw = random.Random(1)
    speeds = {pair: 10.0 * draw.uniform(0.7, 1.3) for pair in all_of("abcdefgh")}
    [finding] = judged(links_of(speeds), 1.0, given=False)
    assert finding.level == "pass", finding


@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_a_slow_direction_is_named(names: str) -> None:
    speeds = all_of(names) | {("b", "c"): 4.9}
    assert found(links_of(speeds)) == [("warning", "b (e0) → c (c)")]


@pytest.mark.parametrize("names", ["abc", "abcd"])
def test_all_links_of_a_slow_host_are_named_and_no_others(names: str) -> None:
    speeds = {pair: 4.0 if "b" in pair else gbit for pair, gbit in all_of(names).items()}
    named = {value for level, value in found(links_of(speeds)) if level == "warning"}
    assert named == {f"{one} (e0) → {other} ({other})" for one, other in speeds if "b" in (one, other)}


def test_two_hosts_are_held_against_what_is_expected() -> None:
    assert found(links_of(all_of("ab", 0.6))) == [
        ("pass", "2 directions, 0.6 to 0.6 Gbit/s, round trips of 0.1 to 0.1 ms")
    ]
    assert found(links_of({("a", "b"): 0.4, ("b", "a"): 0.9})) == [("warning", "a (e0) → b (b)")]
    [finding] = judged(links_of({("a", "b"): 20.0, ("b", "a"): 30.0}), 25.0, given=True)
    assert finding.value == "a (e0) → b (b): 20 Gbit/s, less than the 25 expected"


def test_a_dead_link_is_a_failure_and_a_far_one_a_warning() -> None:
    speeds = all_of("abc") | {("a", "c"): None}
    assert found(links_of(speeds)) == [("failure", "a (e0) → c (c)")]
    far = [*links_of(all_of("ab")), *links_of({("a", "c"): 9.0, ("c", "a"): 9.0}, round_trip=0.02)]
    assert found(far) == [("warning", "a (e0) → c (c)"), ("warning", "c (e0) → a (a)")]


def test_pairs() -> None:
    assert pairs_of(["a", "b", "c"]) == [("a", "b"), ("a", "c"), ("b", "c")]
    many = [f"h{n}" for n in range(ALL_PAIRS + 4)]
    pairs = pairs_of(many)
    assert len(pairs) == 40 and all(one != other for one, other in pairs)
    assert {host for pair in pairs for host in pair} == set(many)


def test_processes_of_the_all_reduce() -> None:
    hosts = {"a": 2, "b": 2}
    assert ranks_of(hosts, {"a": 8, "b": 2}, {}) == ("nccl", {"a": [0, 1], "b": [2, 3]})
    assert ranks_of(hosts, {"a": 8, "b": 1}, {}) == ("gloo", {"a": [0], "b": [1]})
    assert ranks_of(hosts, {"a": 8, "b": 8}, {"DS_ACCELERATOR": "cpu"})[0] == "gloo"
    assert ranks_of({"a": 2}, {"a": 0}, {}) == ("gloo", {"a": [0, 1]})


def test_a_slow_link_is_not_filled_for_minutes() -> None:
    assert sizes_for("gloo", links_of(all_of("ab", 10.0))) == [4, 65_536, 1 << 20, 1 << 24]
    assert sizes_for("gloo", links_of(all_of("ab", 0.001))) == [4]


def test_how_it_looks() -> None:
    links = links_of({("a", "b"): 9.41, ("b", "a"): None})
    reduces = (AllReduce(1 << 20, 0.001, 8.39),)
    shown = list(network_lines(Network(("a", "b"), tuple(links), reduces, "gloo", 2, (), False, 1.0)))
    assert shown == [
        "Gbit/s (round trip, ms)  → a   → b",
        "a                              9.41 (0.1)",
        "b                        dead",
        "",
        "all-reduce over gloo, 2 processes",
        "       bytes        time  bus Gbit/s",
        "   1,048,576    1,000 µs        8.39",
    ]
    hosts = tuple(f"h{n}" for n in range(20))
    sampled = list(network_lines(Network(hosts, tuple(links), (), None, 0, (), True, 1.0)))
    assert sampled[1:] == ["b → a: dead", "a → b: 9.41 (0.1)"]


def test_measured_between_addresses_of_this_machine() -> None:
    """127.0.0.2 is this machine too, to Linux: the programs and the sockets are real."""
    lines: list[str] = []
    hosts, environ = {"127.0.0.1": 1, "127.0.0.2": 1}, {"DS_ACCELERATOR": "cpu"}
    network = measure(hosts, environ=environ, progress=lines.append)
    assert [(link.sender, link.receiver, link.error) for link in network.links] == [
        ("127.0.0.1", "127.0.0.2", None),
        ("127.0.0.2", "127.0.0.1", None),
    ]
    assert all(link.round_trip and link.gbit and link.interface == "lo" for link in network.links)
    assert [each.bytes for each in network.reduces] == [4, 65_536, 1 << 20, 1 << 24]
    assert network.backend == "gloo" and network.processes == 2
    assert [f.check for f in network.findings if f.check == "all-reduce" and f.level == "pass"] == [
        "all-reduce"
    ]
    assert lines == ["127.0.0.1 ⇄ 127.0.0.2, pair 1 of 1", "all-reduce over gloo, 2 processes"]


def test_a_transfer_that_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host would be taken for silent, and its other links for dead."""
    from dsft.engine import links

    monkeypatch.setattr(links, "TIMEOUT", timedelta(seconds=0.5))
    store = links.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    order = {"do": "pair", "rank": 0, "name": "0", "address": "127.0.0.1", "port": store.port,
             "peer": "127.0.0.1"}  # fmt: skip
    found = links.pair(order, store)
    assert set(found) == {"error"} and found["error"].strip() and "\n" not in found["error"], found


def test_an_address_that_nobody_has_is_dead_within_seconds() -> None:
    from dsft.engine.links import reach

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "refused" in reach("127.0.0.1", port)["error"]
